"""What every job needs: configuration, ranks and their failures, tracking, storage, plugins.

Optional parts register themselves by entry points of an installed distribution.

    [project.entry-points."hybridengine.commands"]
    mine = "my_package.commands:app"

The core names a group and never a module. The groups are listed in docs/extending.md. Code that a
key names (a file, a class in it) is imported here, too. Reward workers import this module: it needs
only the standard library.
"""

from __future__ import annotations

import importlib.util
import pkgutil
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from hybridengine.run.errors import ConfigError, RewardError, located


@cache
def plugins(group: str) -> Mapping[str, EntryPoint]:
    """Return what is registered in the group `hybridengine.<group>`, by name, not yet imported.

    Raises ConfigError where two packages register unlike parts under one name.
    """
    found = dict[str, EntryPoint]()
    for entry in entry_points(group=f"hybridengine.{group}"):
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise ConfigError(
                f"two installed packages register `{entry.name}` in the entry-point group "
                f"hybridengine.{group}: {other.value} and {entry.value}; uninstall one of them"
            )
    return dict(sorted(found.items()))


def load_plugin(group: str, name: str, key: str) -> Any:
    """Import and return what is registered as `name`.

    key: the configuration key that asks for it, which the error names.
    """
    known = plugins(group)
    if name not in known:
        raise ConfigError(
            f"{key} needs `{name}`, which no installed package registers in the entry-point group "
            f"hybridengine.{group}; registered are: {', '.join(known) or 'none'}. "
            "Install hybridengine with its extras/ again (`pip install .`)."
        )
    return known[name].load()


def registers(registry: dict[str, Any], what: str, name: str) -> Callable[[Any], Any]:
    """Return a decorator that registers as `name`; ValueError for a name that is registered."""

    def register(value: Any) -> Any:
        if registry.setdefault(name, value) is not value:
            raise ValueError(f"{what} {name!r} is already registered")
        return value

    return register


def import_object(key: str, name: str) -> Any:
    """Import `file.py:name` or `package.module.name`.

    Raises ConfigError, which names `key`, where it does not exist, and RewardError for a file that
    fails to import.
    """
    file, _, attribute = name.rpartition(":")
    if not file.endswith(".py"):
        try:
            return pkgutil.resolve_name(name)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"{key}: {name!r} cannot be imported: {error}; give file.py:name or "
                "package.module.name"
            ) from error
    path = Path(file).expanduser()
    if not path.is_file():
        raise ConfigError(f"{key}: the file {located(file)} does not exist; check the path")
    module = import_file(path.resolve())
    if not hasattr(module, attribute):
        origins = {n: getattr(x, "__module__", None) for n, x in vars(module).items()}
        names = ", ".join(n for n, origin in origins.items() if origin == module.__name__)
        raise ConfigError(
            f"{key} names {attribute!r}, which is not in {file}; {names or 'nothing'} is there"
        )
    return getattr(module, attribute)


def import_file(file: Path) -> Any:
    """Import the user's file as a module.

    Raises RewardError, with the line, where it cannot be imported or ends the process.
    """
    spec = importlib.util.spec_from_file_location(f"_hybridengine_user_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise RewardError(f"file {file} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling in the user's file look it up
    try:
        spec.loader.exec_module(module)
    except RewardError:  # of a built-in rule, already a full message
        raise
    except SyntaxError as error:
        raise RewardError(
            f"file {error.filename}:{error.lineno} is not Python: {error.msg}"
        ) from None
    except (Exception, SystemExit) as error:
        where = error_line(error, file, 1)
        raise RewardError(
            f"file {where} fails to import: {type(error).__name__}: {error}"
        ) from error
    return module


def error_line(error: BaseException, file: Path, default: int) -> str:
    """`file:line` of the deepest frame of `file` in the traceback of `error`."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    return f"{file}:{lines[-1] if lines else default}"
