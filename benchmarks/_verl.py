"""verl's own algorithms, from the released package (`pip install --no-deps verl==0.9.1`).

verl imports services (Ray, its loggers) that the functions here do not use. Those that are not
installed are replaced by empty modules while verl is imported.
"""

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any

_SERVICES = ("ray", "tensordict", "codetiming", "hydra", "pylatexenc", "wandb", "orjson")


class Empty(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__class_getitem__": classmethod(lambda cls, _: cls)})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder: finds services that are not installed."""

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] in _SERVICES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = Empty(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextlib.contextmanager
def empty_services() -> Iterator[None]:
    """Import services that are not installed as empty modules, removed at the end."""
    before = set(sys.modules)
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if isinstance(sys.modules[name], Empty):
                del sys.modules[name]


if importlib.util.find_spec("verl") is None:
    raise ImportError("verl is not installed: pip install --no-deps verl==0.9.1", name="verl")
with empty_services():
    from verl.trainer.ppo import core_algos, rollout_corr_helper  # noqa: F401
    from verl.utils import seqlen_balancing, torch_functional  # noqa: F401
    from verl.utils.experimental.torch_functional import FusedLinearForPPO  # noqa: F401
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy  # noqa: F401
    from verl.workers.config import ActorConfig  # noqa: F401
