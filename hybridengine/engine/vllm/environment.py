"""Process-wide settings under which vLLM runs on the ranks that train."""

from __future__ import annotations

import functools
import glob
import importlib.util
import inspect
import logging
import os
import sys
import types
import uuid
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers.utils import is_torchvision_available

from hybridengine.run.errors import UserError
from hybridengine.run.messages import broadcast_value

# Tokens of a KV cache block on a CPU: the fewest that vLLM's attention takes there. Responses share
# the full blocks of their prompt, and vLLM's default, 128, is longer than many prompts.
CPU_BLOCK_SIZE = 32
# Of vLLM's attention on a CPU.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_TORCHVISION = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


def vllm_available() -> bool:
    """Whether vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None


def prepare_environment() -> None:
    """Set what vLLM reads at import: in-process engine, no thread binding of the training ranks.

    Raises UserError where a variable is set that the engine on training ranks cannot have.
    """
    if os.environ.get("VLLM_DISTRIBUTED_USE_SPLIT_GROUP", "0") != "0":
        raise UserError(
            "VLLM_DISTRIBUTED_USE_SPLIT_GROUP is set, but vLLM then needs a process group that is "
            "bound to one device, and the group of the training ranks is not; unset it"
        )
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    logging.getLogger("vllm").setLevel(logging.ERROR)  # until vLLM reads its own level
    if os.environ.get("HYBRIDENGINE_ISA") in ("portable", "avx2"):  # vLLM has no such limit
        for feature in ("avx512", "avx512_bf16", "amx_tile"):
            setattr(torch.cpu, f"_is_{feature}_supported", lambda: False)


@contextmanager
def unchanged_local_world_size() -> Iterator[None]:
    """Set LOCAL_WORLD_SIZE, which says how many ranks a node has, back at the end.

    vLLM's CPU platform sets it to the tensor-parallel size.
    """
    before = os.environ.get("LOCAL_WORLD_SIZE")
    try:
        yield
    finally:
        if before is not None:
            os.environ["LOCAL_WORLD_SIZE"] = before


@contextmanager
def models_inspected_here() -> Iterator[None]:
    """While open, vLLM looks at the class of a model in this process, which imports it anyway.

    By default it starts a process, which keeps CUDA uninitialized here, for every model that it
    does not know yet: 15 s of CPU time on every rank. The class may need `without_torchvision`.
    """
    from vllm.model_executor.models import registry

    lazy_class = registry._LazyRegisteredModel
    load = without_torchvision()(lazy_class.load_model_cls)
    with (
        patch.object(registry, "_run_in_subprocess", lambda inspect: inspect()),
        patch.object(lazy_class, "load_model_cls", load),
    ):
        yield


@contextmanager
def without_torchvision() -> Iterator[None]:
    """While open, empty modules are in the place of torchvision's where it is missing.

    vLLM's files of models, of some that take text alone as well, import transformers' image
    processors of torchvision for a function or a type hint. What runs are those of Pillow, which
    give the same tokens.
    """
    if is_torchvision_available():
        yield
        return
    empty = {name: types.ModuleType(name) for name in _TORCHVISION}
    for name, content in empty.items():
        vars(content)["InterpolationMode"] = object  # of type hints
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(empty[parent], own, content)
    sys.modules.update(empty)
    try:
        yield
    finally:
        for name in empty:
            del sys.modules[name]


@contextmanager
def unbound_memory() -> Iterator[None]:
    """While open, vLLM's CPU worker does not bind the memory of this process to a NUMA node.

    By default every rank would bind its own, that of training included, to the node of the first
    core that the rank may use, and torch would print a warning.
    """
    with patch.object(torch.ops._C, "init_cpu_memory_env", lambda nodes: None, create=True):
        yield


@contextmanager
def strided_groups(groups: list[list[int]]) -> Iterator[None]:
    """While open, vLLM builds `groups` as tensor- and expert-parallel groups.

    By default its groups are consecutive ranks.
    """
    from vllm.distributed import parallel_state

    build = parallel_state.init_model_parallel_group
    tp_size = len(groups[0])
    consecutive = [list(range(i * tp_size, (i + 1) * tp_size)) for i in range(len(groups))]

    def build_strided(group_ranks: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        return build(groups if group_ranks == consecutive else group_ranks, *args, **kwargs)

    with patch.object(parallel_state, "init_model_parallel_group", build_strided):
        yield


@contextmanager
def unique_shared_memory() -> Iterator[None]:
    """While open, vLLM's CPU collectives create shared memory under names unique to this run.

    vLLM names the segments by TP group alone, so a second run on the machine, or one after a killed
    run, would fail to create them. The names are removed at exit, when every rank has opened them.
    """
    if torch.cuda.is_available():
        yield
        return
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    token = broadcast_value(uuid.uuid4().hex, str)
    name_of = _CPUSHMDistributed.make_group_name
    names: list[str] = []

    def unique_name(communicator: Any) -> str:
        names.append(f"hybridengine-{token}-{name_of(communicator).lstrip('/')}")
        return names[-1]

    with patch.object(_CPUSHMDistributed, "make_group_name", staticmethod(unique_name)):
        yield
    dist.barrier()
    for name in names:
        for segment in Path("/dev/shm").glob(f"{glob.escape(name)}_*"):
            segment.unlink(missing_ok=True)


@contextmanager
def own_model_classes() -> Iterator[None]:
    """While open, vLLM derives a class where it would change one of transformers.

    vLLM serves many types by the model of transformers (its Transformers backend), and makes the
    class of that model compilable in place: other `__init__`, `__call__` and bases. A trainer's
    model in the same process is of the same class, and then fails when it is built or called.

    The models that vLLM builds meanwhile are of the derived class, also afterwards. Their rotary
    embeddings are those of the trained one (`hybridengine.model.rotary`).
    """
    from transformers import PreTrainedModel
    from vllm.compilation import decorators
    from vllm.config import get_current_vllm_config

    from hybridengine.model.rotary import fix_rotary_length

    decorate = decorators._support_torch_compile

    def decorate_derived(cls: type, *args: Any) -> type:
        is_derived = decorators.TorchCompileWithNoGuardsWrapper in cls.__bases__
        if is_derived or not issubclass(cls, PreTrainedModel):
            return decorate(cls, *args)
        build = cls.__init__

        @functools.wraps(build)
        def build_fixed(model: Any, *args: Any, **options: Any) -> None:
            build(model, *args, **options)
            if "input_ids" in inspect.signature(cls.forward).parameters:  # no vision encoder
                fix_rotary_length(model, get_current_vllm_config().model_config.max_model_len)

        members = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        derived: Any = decorate(
            type(cls.__name__, (cls,), members | {"__init__": build_fixed}), *args
        )

        @functools.wraps(build)
        def build_derived(model: Any, *args: Any, **options: Any) -> None:
            if type(model) is cls:
                model.__class__ = derived
                derived.__init__(model, *args, **options)
            else:
                build(model, *args, **options)

        stack.enter_context(patch.object(cls, "__init__", build_derived))
        return derived

    with ExitStack() as stack, patch.object(decorators, "_support_torch_compile", decorate_derived):
        yield
