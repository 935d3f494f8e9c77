"""verl's own algorithms, from the released package (`pip install --no-deps verl==0.9.1`).

verl imports its services (Ray, its loggers) beside its maths; what is not installed of those is
replaced by empty modules while it loads, and none of it is used by the functions named here.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

_SERVICES = ("ray", "tensordict", "codetiming", "hydra", "pylatexenc", "wandb", "orjson")


class _Empty(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__class_getitem__": classmethod(lambda cls, _: cls)})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Asked last: only for services that are not installed."""

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in _SERVICES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _Empty(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


def _load():
    if importlib.util.find_spec("verl") is None:
        raise ImportError("verl is not installed: pip install --no-deps verl==0.9.1")
    before = set(sys.modules)
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        from verl.trainer.ppo import core_algos, rollout_corr_helper
        from verl.utils import seqlen_balancing, torch_functional
        from verl.utils.experimental.torch_functional import FusedLinearForPPO
        from verl.workers.config import ActorConfig
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:  # no empty module outlives the import
            if isinstance(sys.modules[name], _Empty):
                del sys.modules[name]
    return (
        core_algos, rollout_corr_helper, seqlen_balancing, ActorConfig, torch_functional,
        FusedLinearForPPO,
    )  # fmt: skip


(
    core_algos, rollout_corr_helper, seqlen_balancing, ActorConfig, torch_functional,
    FusedLinearForPPO,
) = _load()  # fmt: skip
