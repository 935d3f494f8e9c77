"""Paths of what a job reads: relative ones are looked up, and become absolute."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

__all__ = ["ReadPath", "find_input", "read_paths"]


@dataclass(frozen=True)
class ReadPath:
    """Marks a key whose value names what a job reads.

    contains: part of every value that is a path; others are names.
    """

    contains: str = ""


def read_paths(types: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys that `ReadPath` marks, each with what its paths contain.

    types: key → type.
    """

    def marks(hint: Any) -> Iterator[ReadPath]:
        yield from (x for x in getattr(hint, "__metadata__", ()) if isinstance(x, ReadPath))
        for argument in get_args(hint):
            yield from marks(argument)

    return {key: mark.contains for key, hint in types.items() for mark in marks(hint)}


def find_input(value: Any, contains: str, folders: Sequence[Path]) -> Any:
    """Return a path, or each path of a list, as the absolute one of the first folder that has it.

    Other values, and paths that no folder has, stay as they are.

    contains: see `ReadPath`.
    folders: those that are searched after the working directory.
    """
    if isinstance(value, list):
        return [find_input(item, contains, folders) for item in value]
    if not isinstance(value, str) or not value or contains not in value or "{" in value:
        return value  # no path, or the text of a template
    path = os.path.expanduser(value)
    file = re.sub(r"(?<=\.py):\w+$", "", path)  # without the name of an object in it
    for folder in (Path.cwd(), *folders):
        if os.path.exists(folder / file) or any(glob.iglob(file, root_dir=folder)):
            return str(folder / path)
    return value
