"""One architecture on this world of ranks: reshard into vLLM's model, then vLLM's own loader.

Every rank builds vLLM's model (real tensors on the CPU, no engine around it), shards random float32
parameters as FSDP2 does, reshards, and compares each engine tensor, bit for bit, with what vLLM's
`load_weights` makes of the whole checkpoint, converted by transformers itself.
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

from hybridengine.rollout.engine import RolloutEngine, tp_groups
from tests.architectures.catalogue import CATALOGUE

__all__ = ["Outcome", "sweep_body"]

DTYPE = torch.bfloat16
BUCKET_BYTES = 1 << 16


@dataclass
class Outcome:
    """What became of one architecture on one rank.

    stage, error: where it stopped and why; empty if it went through. tensors: engine tensors
    compared. unequal: those that differ. fallback: parameter → why it was gathered whole.
    received, lower_bound: bytes of one sync.
    """

    architecture: str
    model_class: str = ""
    stage: str = "transformers config"
    error: str = ""
    tensors: int = 0
    unequal: list[str] = field(default_factory=list)
    fallback: dict[str, str] = field(default_factory=dict)
    received: int = 0
    lower_bound: int = 0


class BareEngine(RolloutEngine):
    """vLLM's model as the reshard sees an engine; it never generates."""

    def __init__(self, model, checkpoint, layout, tp_rank: int, tp_size: int) -> None:
        self._model, self._checkpoint = model, checkpoint
        self.layout, self.tp_rank, self.tp_size, self.dtype = layout, tp_rank, tp_size, DTYPE

    def weights(self) -> dict[str, torch.Tensor]:
        from hybridengine.rollout.vllm_weights import live_tensors

        own = live_tensors(self._model)
        return {name: own[name] for name in self.layout.destinations if name in own}

    def load_whole(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._model.load_weights(self._checkpoint.assemble(weights))

    def _forget_cached_prefixes(self) -> None: ...

    def _generate(self, prompts, spec, seed):
        raise NotImplementedError

    def shutdown(self) -> None: ...


def sweep_body(
    rank: int, world_size: int, tp_size: int, folder: str, names: list[str]
) -> list[Outcome]:
    """The outcome of each architecture on this rank (the body of one world of ranks)."""
    from hybridengine.rollout.vllm import prepare_environment

    prepare_environment()
    if importlib.util.find_spec("torchvision") is None:
        stand_ins = str(Path(__file__).parent / "stand_ins")
        sys.path.append(stand_ins)
        os.environ["PYTHONPATH"] = stand_ins  # vLLM inspects models in a process of its own
    _start_vllm_groups(rank, world_size, tp_size)
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

    from hybridengine.rollout.vllm import _own_shared_memory, _strided_groups

    with (
        set_current_vllm_config(VllmConfig()),
        _strided_groups(tp_groups(world_size, tp_size)),
        _own_shared_memory(),
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
            ("vLLM model", self.build),
            ("vLLM loader", self.load),
            ("recording", self.record),
            ("reshard", self.reshard),
            ("comparison", self.compare),
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
            traceback.print_exc()  # shown by pytest where the outcome is not what it should be
            return f"{type(error).__name__}: {error}"
        return ""

    def configure(self) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        from hybridengine.model import describe_checkpoint

        config = CATALOGUE[self.outcome.architecture].config()
        causal = type(config) in AutoModelForCausalLM._model_mapping
        auto: Any = AutoModelForCausalLM if causal else AutoModelForImageTextToText
        with torch.device("meta"):
            self.hf = auto.from_config(config)
        self.outcome.model_class = type(self.hf).__name__
        self.checkpoint = describe_checkpoint(self.hf)
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

    def build(self) -> None:
        from vllm.model_executor.model_loader.utils import initialize_model
        from vllm.utils.torch_utils import set_default_torch_dtype

        config = copy.copy(self.vllm_config)
        config.compilation_config = copy.copy(config.compilation_config)
        config.compilation_config.static_forward_context = {}
        with set_default_torch_dtype(DTYPE):
            self.model = initialize_model(vllm_config=config)

    def load(self) -> None:
        """The reference: vLLM's own loader over the whole checkpoint."""
        generator = torch.Generator().manual_seed(1)
        self.whole = {
            name: torch.randn(shape, generator=generator)
            for name, shape in self.checkpoint.parameters.items()
        }
        _spoil(self.model)
        # Clones: loaders may zero in place what belongs to another rank.
        whole = {name: tensor.clone() for name, tensor in self.whole.items()}
        self.model.load_weights(iter(revert_weight_conversion(self.hf, whole).items()))
        self.loaded = {name: t.clone() for name, t in _tensors(self.model).items()}

    def record(self) -> None:
        from hybridengine.rollout.vllm_weights import record_vllm

        self.layout = record_vllm(self.vllm_config, self.checkpoint, DTYPE)
        self.outcome.fallback = self.layout.fallback

    def reshard(self) -> None:
        from vllm.distributed import get_tp_group

        from hybridengine.reshard import Resharder

        buffers = {name for name, _ in self.hf.named_buffers()}
        sliced = self.layout.sliced_dims(self.checkpoint.parameters)
        shards = {
            name: tensor if name in buffers else self._distribute(tensor, sliced.get(name, 0))
            for name, tensor in self.whole.items()
        }
        engine = BareEngine(
            self.model,
            self.checkpoint,
            self.layout,
            dist.get_group_rank(get_tp_group().cpu_group, self.rank),
            self.tp_size,
        )
        _spoil(self.model)
        resharder = Resharder(lambda: shards, engine, BUCKET_BYTES)
        self.outcome.received = resharder.sync(1).bytes_received
        self.outcome.lower_bound = resharder.plan.lower_bound[self.rank]

    def _distribute(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """As FSDP2: dim 1 only where it divides."""
        if dim != 1 or tensor.shape[1] % self.world_size:
            dim = 0
        return distribute_tensor(tensor, self.mesh, [Shard(dim)], src_data_rank=None)

    def compare(self) -> None:
        arrived = _tensors(self.model)
        self.outcome.unequal = [
            name for name, tensor in self.loaded.items() if not _same_bits(tensor, arrived[name])
        ]
        self.outcome.tensors = len(self.layout.destinations)


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.data for n, t in [*model.named_parameters(), *model.named_buffers()]}


def _spoil(model: torch.nn.Module) -> None:
    """NaN everywhere, so that what nobody writes shows."""
    for tensor in _tensors(model).values():
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and torch.equal(*(t.reshape(-1).contiguous().view(torch.uint8) for t in (a, b)))
