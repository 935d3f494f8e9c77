"""Import a library whose services are not installed (verl by `pip install --no-deps`)."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any


class Empty(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)

        def ignore(self: Any, *_: Any, **__: Any) -> None:
            """As a decorator, with arguments or without."""

        item = classmethod(lambda cls, _: cls)
        return type(name, (), dict(__init__=ignore, __call__=ignore, __class_getitem__=item))


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: it is asked for what is not installed."""

    def __init__(self, services: Sequence[str]) -> None:
        self.services = services

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in self.services:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = Empty(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextlib.contextmanager
def empty_services(services: Sequence[str]) -> Iterator[None]:
    """Import `services` that are not installed as empty modules, removed at the end."""
    before, finder = set(sys.modules), _Finder(services)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if isinstance(sys.modules[name], Empty):
                del sys.modules[name]
