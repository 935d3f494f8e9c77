"""Import modules that import torchvision where it is not installed.

vLLM's model files import transformers' image processors of torchvision for a function or a type
hint alone. While they are imported, empty modules take the place of torchvision; what runs then
are transformers' image processors of Pillow, which give the same tokens.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types

__all__ = ["has_torchvision", "import_without_torchvision"]

_NAMES = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


def has_torchvision() -> bool:
    """Whether torchvision is installed, as transformers sees it, for the whole process."""
    from transformers.utils import is_torchvision_available

    return bool(is_torchvision_available())


def import_without_torchvision(module: str) -> None:
    """Import a module with empty modules in the place of torchvision's."""
    assert not has_torchvision()
    empty = {name: types.ModuleType(name) for name in _NAMES}
    for name, content in empty.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(empty[parent], own, content)
    sys.modules.update(empty)
    try:
        importlib.import_module(module)
    finally:
        for name in empty:
            del sys.modules[name]
