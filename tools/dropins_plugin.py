"""A pytest plugin: patch a package by its adapter, and count the calls of every function of ours.

Without HYBRIDENGINE_DROPIN the tests run against the package alone.
"""

from __future__ import annotations

import functools
import importlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

CALLS: dict[str, Any] = {}  # counters that forked ranks share

# Here, because conftest files are imported before pytest_configure.
for stub in filter(None, os.environ.get("HYBRIDENGINE_DROPIN_STUBS", "").split(",")):
    sys.modules[stub] = MagicMock(__spec__=ModuleSpec(stub, None))


def pytest_configure() -> None:
    name = os.environ.get("HYBRIDENGINE_DROPIN")
    if not name:
        return
    adapter = importlib.import_module(f"hybridengine.integrations.{name}")
    patches = adapter.patch.__self__
    groups = [g for g in os.environ.get("HYBRIDENGINE_DROPIN_GROUPS", "").split(",") if g]
    chosen = groups or patches.default_groups
    patches.replacements = tuple(
        replace(r, function=_counted(r.target, r.function))
        for r in patches.replacements
        if r.group in chosen
    )
    patches.patch(*groups)
    for counter in CALLS.values():  # the patch has probed them
        counter.value = 0


def pytest_unconfigure() -> None:
    if CALLS:
        counts = {target: counter.value for target, counter in CALLS.items()}
        Path(os.environ["HYBRIDENGINE_DROPIN_CALLS"]).write_text(json.dumps(counts))


def _counted(target: str, function: Any) -> Any:
    """Return `function`, or a subclass of it, that counts its calls under `target`."""
    CALLS[target] = multiprocessing.Value("q", 0)
    if isinstance(function, (staticmethod, classmethod)):
        return type(function)(_wrapped(target, function.__func__))
    if isinstance(function, type):
        is_autograd = hasattr(function, "forward") and hasattr(function, "apply")
        name = "forward" if is_autograd else "__init__"
        wrapped = _wrapped(target, getattr(function, name))
        body = {name: staticmethod(wrapped) if is_autograd else wrapped}
        return type(function.__name__, (function,), body)
    return _wrapped(target, function)


def _wrapped(target: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def count(*args: Any, **kwargs: Any) -> Any:
        with CALLS[target].get_lock():
            CALLS[target].value += 1
        return function(*args, **kwargs)

    return count
