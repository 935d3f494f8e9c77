"""One architecture on this world of ranks: reshard into vLLM's model, then vLLM's own loader.

Every rank builds vLLM's model (real tensors on the CPU, no engine around it), shards random float32
parameters as FSDP2 does, and syncs three times: different weights twice, then a delta. Each time
every tensor that the model's objects hold is compared, bit for bit, with a model that vLLM's own
loader has filled from the full checkpoint, converted by transformers itself.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.core_model_loading import revert_weight_conversion

from hybridengine.sync.shards import local_shard, tp_groups
from hybridengine.sync.weight_target import WeightTarget
from tests.architectures.catalogue import CATALOGUE

__all__ = ["Outcome", "sweep_body"]

DTYPE = torch.bfloat16
BUCKET_BYTES = 1 << 16


@dataclass
class Outcome:
    """The outcome of one architecture on one rank.

    stage, error: where it failed and why; empty if it passed. tensors: engine tensors that a sync
    writes. unequal: tensors of the model that differ after a sync. fallback: parameter → why it
    is gathered in full. unrounded: engine weights with float32 values that bfloat16 would round.
    received, lower_bound: bytes of one sync. delta: whether the third sync was a delta.
    """

    architecture: str
    model_class: str = ""
    stage: str = "transformers config"
    error: str = ""
    tensors: int = 0
    unequal: list[str] = field(default_factory=list)
    fallback: dict[str, str] = field(default_factory=dict)
    unrounded: set[str] = field(default_factory=set)
    received: int = 0
    lower_bound: int = 0
    delta: bool = False


class BareEngine(WeightTarget):
    """vLLM's model as its loader leaves it, without an engine."""

    def __init__(self, model, post_load, checkpoint, vllm_config, tp_rank: int) -> None:
        from hybridengine.engine.vllm.weights import optional_parameters, record_engine_layout

        self._model, self._post_load, self._checkpoint = model, post_load, checkpoint
        self.tp_rank, self.dtype = tp_rank, DTYPE
        self.optional_parameters = optional_parameters(checkpoint)
        layout = record_engine_layout(vllm_config, checkpoint, DTYPE)
        self.layout = post_load.adapt_layout(model, layout, checkpoint.parameters)

    def weights(self) -> dict[str, torch.Tensor]:
        return self._post_load.weights(self._model, self.layout)

    def load_full(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._post_load.restore_plain_weights()
        self._model.load_weights(self._checkpoint.assemble(weights))

    def finish_update(self) -> None:
        self._post_load.rerun(self._model, self.dtype)


def sweep_body(
    rank: int, world_size: int, tp_size: int, folder: str, names: list[str]
) -> list[Outcome]:
    """The outcome of each architecture on this rank (the body of one world of ranks)."""
    from hybridengine.engine.vllm.environment import prepare_environment

    prepare_environment()
    if importlib.util.find_spec("torchvision") is None:
        stubs = str(Path(__file__).parent / "stubs")
        sys.path.append(stubs)
        os.environ["PYTHONPATH"] = stubs  # vLLM inspects models in a process of its own
    _start_vllm_groups(rank, world_size, tp_size)
    from vllm.triton_utils import triton

    triton.set_allocator = lambda allocate: None  # OLMo-Hybrid's layers call it, on GPUs
    mesh = init_device_mesh("cpu", (world_size,))
    outcomes = []
    for name in names:
        outcome = Outcome(name)
        _Case(outcome, rank, world_size, tp_size, Path(folder) / name.replace(" ", "_")).run(mesh)
        outcomes.append(outcome)
        gc.collect()
    return outcomes


def _start_vllm_groups(rank: int, world_size: int, tp_size: int) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    from hybridengine.engine.vllm.environment import strided_groups, unique_shared_memory

    os.environ["VLLM_DIST_IDENT"] = "sweep"  # vLLM's worker sets it; read on CPUs with AVX-512
    with (
        set_current_vllm_config(VllmConfig()),
        strided_groups(tp_groups(world_size, tp_size)),
        unique_shared_memory(),
    ):
        init_distributed_environment(world_size, rank, "env://", rank, backend="gloo")
        initialize_model_parallel(tp_size, backend="gloo")


class _Case:
    """One architecture on one rank; a stage in which any rank fails ends it on all of them."""

    def __init__(
        self, outcome: Outcome, rank: int, world_size: int, tp_size: int, folder: Path
    ) -> None:
        self.outcome, self.folder = outcome, folder
        self.rank, self.world_size, self.tp_size = rank, world_size, tp_size

    def run(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        for stage, step in (
            ("transformers config", self.configure),
            ("vLLM config", self.configure_vllm),
            ("vLLM model and loader", self.load),
            ("recording", self.record),
            ("reshard", self.reshard),
        ):
            self.outcome.stage = stage
            error = self._attempt(step)
            errors: list = [None] * self.world_size
            dist.all_gather_object(errors, error)
            if any(errors):
                self.outcome.error = error or next(e for e in errors if e)
                return
        self.outcome.stage = ""

    def _attempt(self, step: Callable[[], None]) -> str:
        try:
            step()
        except Exception as error:
            traceback.print_exc()  # shown by pytest if the outcome is not the expected one
            return f"{type(error).__name__}: {error}"
        return ""

    def configure(self) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        from hybridengine.model.parameters import checkpoint_layout

        config = CATALOGUE[self.outcome.architecture].config()
        causal = type(config) in AutoModelForCausalLM._model_mapping
        auto: Any = AutoModelForCausalLM if causal else AutoModelForImageTextToText
        with torch.device("meta"):
            self.hf = auto.from_config(config)
        self.outcome.model_class = type(self.hf).__name__
        self.checkpoint = checkpoint_layout(self.hf)
        config.architectures = [self.outcome.model_class]
        if self.rank == 0:
            config.save_pretrained(self.folder)
        dist.barrier()

    def configure_vllm(self) -> None:
        from vllm.engine.arg_utils import EngineArgs

        self.vllm_config = EngineArgs(
            model=str(self.folder),
            load_format="dummy",
            dtype=str(DTYPE).removeprefix("torch."),
            tensor_parallel_size=self.tp_size,
            distributed_executor_backend="external_launcher",
            max_model_len=64,
            enforce_eager=True,
            skip_tokenizer_init=True,
            **CATALOGUE[self.outcome.architecture].engine,
        ).create_engine_config()

    def load(self) -> None:
        self.model, self.post_load = self._loaded(seed=0)

    def record(self) -> None:
        from vllm.distributed import get_tensor_model_parallel_rank

        self.engine = BareEngine(
            self.model,
            self.post_load,
            self.checkpoint,
            self.vllm_config,
            get_tensor_model_parallel_rank(),
        )
        self.outcome.fallback = self.engine.layout.fallback
        self.outcome.tensors = len(self.engine.layout.destinations)

    def reshard(self) -> None:
        from hybridengine.sync.resharder import Resharder

        # So that what a sync does not write shows.
        for tensor in self.engine.weights().values():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        shards = self._shards(seed=1)
        resharder = Resharder(lambda: shards, self.engine, BUCKET_BYTES, delta="on")
        self.outcome.received = resharder.sync(1).bytes_received
        self.outcome.lower_bound = resharder.plan.lower_bound[self.rank]
        self._compare(seed=1)
        self.outcome.unrounded = {
            name
            for name, weight in self.engine.weights().items()
            if weight.dtype == torch.float32 and not torch.equal(weight, weight.to(DTYPE).float())
        }
        for name, shard in self._shards(seed=2).items():
            local_shard(shards[name]).copy_(local_shard(shard))
        resharder.sync(2)
        self._compare(seed=2)
        for name, shard in self._shards(seed=2, changed=0.02).items():
            local_shard(shards[name]).copy_(local_shard(shard))
        self.outcome.delta = resharder.sync(3).delta
        self._compare(seed=2, changed=0.02)

    def _compare(self, seed: int, changed: float = 0.0) -> None:
        """The engine's model against a new one that vLLM's own loader has filled."""
        expected = _reachable(self._loaded(seed, changed)[0])
        arrived = _reachable(self.model)
        self.outcome.unequal += [
            name
            for name in expected.keys() | arrived.keys()
            if name not in expected
            or name not in arrived
            or not _same_bits(expected[name], arrived[name])
        ]

    def _full(self, seed: int, changed: float = 0.0) -> dict[str, torch.Tensor]:
        """Random parameters; changed: the share of elements that differ from those of `seed`."""
        generator = torch.Generator().manual_seed(seed)
        full = {
            name: torch.randn(shape, generator=generator)
            for name, shape in self.checkpoint.parameters.items()
        }
        for tensor in full.values() if changed else ():
            tensor[torch.rand(tensor.shape, generator=generator) < changed] += 1
        return full

    def _shards(self, seed: int, changed: float = 0.0) -> dict[str, torch.Tensor]:
        buffers = {name for name, _ in self.hf.named_buffers()}
        sliced = self.engine.layout.sliced_dims(self.checkpoint.parameters)
        return {
            name: tensor if name in buffers else self._distribute(tensor, sliced.get(name, 0))
            for name, tensor in self._full(seed, changed).items()
        }

    def _distribute(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """As FSDP2: dim 1 only where it divides."""
        if dim != 1 or tensor.shape[1] % self.world_size:
            dim = 0
        return distribute_tensor(tensor, self.mesh, [Shard(dim)], src_data_rank=None)

    def _loaded(self, seed: int, changed: float = 0.0) -> tuple[torch.nn.Module, Any]:
        """vLLM's model as its own loader leaves it, and the processing that kept its weights."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader import base_loader
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        from hybridengine.engine.vllm.post_load import writable_weights

        stored = revert_weight_conversion(self.hf, self._full(seed, changed))
        config = copy.copy(self.vllm_config)
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        with (
            set_current_vllm_config(config),
            set_default_torch_dtype(DTYPE),
            writable_weights() as post_load,
        ):
            model = initialize_model(vllm_config=config)
            model.load_weights(iter(stored.items()))
            base_loader.process_weights_after_loading(
                model, config.model_config, torch.device("cpu")
            )
        return model, post_load


def _reachable(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that vLLM's objects hold, registered or not, by one path to it.

    What torch.fx keeps of tracing a module (`_tensor_constant0`) is no part of a model.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    queue: list[tuple[str, Any]] = [("", model)]
    while queue:
        path, value = queue.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found[path] = value.detach()
        elif isinstance(value, dict):
            queue += [(f"{path}.{key}", part) for key, part in value.items()]
        elif isinstance(value, list | tuple):
            queue += [(f"{path}.{i}", part) for i, part in enumerate(value)]
        elif _holds_weights(value):
            parts = vars(value).items()
            queue += [(f"{path}.{k}", x) for k, x in parts if not k.startswith("_tensor_constant")]
    return found


def _holds_weights(value: Any) -> bool:
    module = type(value).__module__
    of_vllm = module.startswith("vllm.") and not module.startswith("vllm.config")
    return isinstance(value, torch.nn.Module) or (of_vllm and hasattr(value, "__dict__"))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and torch.equal(*(t.reshape(-1).contiguous().view(torch.uint8) for t in (a, b)))
