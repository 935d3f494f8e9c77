"""Stub of torchvision where it is not installed, so that vLLM can import its vision models.

Any name can be imported and does nothing: the tests process no images.
"""

import importlib.abc
import importlib.machinery
import sys
import types


class _Anything(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(f"{self.__name__}.{name}")

    def __call__(self, *args, **kwargs):
        return self


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith(__name__ + "."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Anything(spec.name)

    def exec_module(self, module) -> None: ...


sys.meta_path.insert(0, _Finder())
__version__ = "0.0"


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Anything(f"{__name__}.{name}")
