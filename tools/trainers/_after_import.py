"""Run a function on a module once it has been imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

__all__ = ["after_import"]

_CALLS: dict[str, list[Callable[[ModuleType], None]]] = {}


def after_import(name: str, call: Callable[[ModuleType], None]) -> None:
    """Call `call` with the module `name` after its import, now if that has happened."""
    if name in sys.modules:
        call(sys.modules[name])
        return
    if not _CALLS:
        sys.meta_path.insert(0, _Finder())
    _CALLS.setdefault(name, []).append(call)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _CALLS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            execute(module)
            for call in _CALLS[name]:
                call(module)

        spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec
