"""The libraries that can be run, by name: each a module with the operations of the cases."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

# name -> (its distribution, the module of its operations)
_LIBRARIES = {
    "hybridengine": ("hybridengine", "ours"),
    "trl": ("trl", "trl"),
    "verl": ("verl", "verl"),
    "liger": ("liger-kernel", "liger"),
    "openrlhf": ("openrlhf", "openrlhf"),
}


def load(names: list[str] | None = None) -> dict[str, tuple[str, ModuleType]]:
    """Import the installed libraries: name -> (version, operations).

    names: those to take; None: all that are installed.

    Raises:
        ValueError: a name without operations here, or a library that is not installed or lacks a
            function that is imported.
    """
    if unknown := [name for name in names or () if name not in _LIBRARIES]:
        known = ", ".join(_LIBRARIES)
        raise ValueError(f"no operations for {', '.join(unknown)}; expected some of {known}")
    found = {}
    for name in names or _LIBRARIES:
        distribution, module = _LIBRARIES[name]
        try:
            installed = version(distribution)
        except PackageNotFoundError:
            if names:
                raise ValueError(f"{name} is not installed: pip install {distribution}") from None
            continue
        try:
            found[name] = installed, importlib.import_module(f"{__name__}.{module}")
        except ImportError as error:
            others = " ".join(x for x in _LIBRARIES if x != name)
            raise ValueError(
                f"{name} {installed} lacks what is run here ({error}); name the other libraries "
                f"({others})"
            ) from error
    return found
