"""The layouts of weights on both sides of a sync: of vLLM's ranks, and of a trainer's by FSDP2.

Those of vLLM are recorded from config.json alone. DP ranks of an engine with expert parallelism
hold equal weights but for their experts, and expert number e of DP rank d is read where that of
rank 0 is, some multiple of d further. Of 64 such ranks recording all takes minutes, so the layouts
of most follow from those of three.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from hybridengine.engine.vllm.environment import (
    models_inspected_here,
    prepare_environment,
    vllm_available,
)
from hybridengine.engine.vllm.weights import record_engine_layout
from hybridengine.model.parameters import checkpoint_layout_from_config
from hybridengine.sync.layout import Copy, EngineLayout
from hybridengine.sync.shards import Holders, ShardSpec, Split
from hybridengine.vision.engine import import_image_models
from hybridengine.vision.formats import IMAGE_MODEL_TYPES


def record_engine_layouts(
    model_path: str,
    tp_size: int,
    trust_remote_code: bool = False,
    *,
    dp_size: int = 1,
    expert_parallel: bool = False,
) -> tuple[dict[str, tuple[int, ...]], list[EngineLayout]]:
    """Return trained parameter shapes and vLLM's layout of every engine rank, from config.json.

    The ranks are in vLLM's order, TP rank fastest: one per TP rank, of each DP rank. One process
    takes the place of each in turn; no weight memory is allocated.

    dp_size: vLLM's data_parallel_size: each DP rank holds all weights but experts, which all engine
      ranks divide.
    expert_parallel: they divide them by experts, else like TP ranks.
    """
    if not vllm_available():
        raise ImportError("the reshard advisor records vLLM's own loader; install vllm first")
    prepare_environment()
    from transformers import AutoConfig
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs

    hf_config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    checkpoint = checkpoint_layout_from_config(hf_config, trust_remote_code)
    if hf_config.model_type in IMAGE_MODEL_TYPES:
        import_image_models(hf_config.architectures or ())
    with _world_of_one(), models_inspected_here():
        config = EngineArgs(
            model=model_path,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            tensor_parallel_size=tp_size,
            data_parallel_size=dp_size,
            enable_expert_parallel=expert_parallel,
            distributed_executor_backend="external_launcher",
            enforce_eager=True,
            trust_remote_code=trust_remote_code,
        ).create_engine_config()
        parallel = config.parallel_config
        with (
            set_current_vllm_config(config),
            patch.object(parallel, "data_parallel_size", 1),  # vLLM's groups of a world of one
        ):
            parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")
            parallel_state.initialize_model_parallel(1)

        def record(dp_rank: int, tp_rank: int) -> EngineLayout:
            parallel.data_parallel_rank = parallel.data_parallel_index = dp_rank
            with (
                _as_rank(parallel_state._TP, tp_size, tp_rank),
                _as_rank(parallel_state._DP, dp_size, dp_rank),
                _as_rank(parallel_state._EP, dp_size * tp_size, dp_rank * tp_size + tp_rank),
            ):
                return record_engine_layout(config, checkpoint, torch.bfloat16)

        by_tp = [record_dp_ranks(partial(record, tp_rank=t), dp_size) for t in range(tp_size)]
    return checkpoint.parameters, [layouts[d] for d in range(dp_size) for layouts in by_tp]


@contextmanager
def _as_rank(group: Any, size: int, rank: int) -> Iterator[None]:
    """While open, one of vLLM's groups tells a model that it has `size` ranks and this is `rank`.

    group: None for a group that the model has not (dense models: expert parallelism).
    """
    if group is None:
        yield
        return
    told = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    with patch.multiple(group, world_size=size, rank_in_group=rank, device_group=told):
        yield


@contextmanager
def _world_of_one() -> Iterator[None]:
    """Provide a process group of this process alone, which vLLM's model code requires."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with patch.dict(os.environ, rank):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            cleanup_dist_env_and_memory()


def record_dp_ranks(record: Callable[[int], EngineLayout], dp_size: int) -> list[EngineLayout]:
    """Return `record(dp_rank)` of every DP rank, each calculated from others where possible.

    Ranks 0, 1 and the last are recorded. If their copies differ in source offsets alone, by equal
    steps from rank to rank, the others follow; else all ranks are recorded.
    """
    if dp_size <= 3:
        return [record(rank) for rank in range(dp_size)]
    first, second, last = (record(rank) for rank in (0, 1, dp_size - 1))
    steps, derive = _source_steps(first, second), record
    if steps is not None and _shifted(first, steps, dp_size - 1).digest() == last.digest():
        derive = partial(_shifted, first, steps)
    return [first, second, *map(derive, range(2, dp_size - 1)), last]


def _source_steps(first: EngineLayout, second: EngineLayout) -> dict[Copy, int] | None:
    """Return how much further `second` reads for each copy of `first`; None if more differs."""

    def keyed(layout: EngineLayout) -> dict[Copy, Copy]:
        return {replace(copy, source_offset=0): copy for copy in layout.copies}

    ours, theirs = keyed(first), keyed(second)
    if ours.keys() != theirs.keys() or len(ours) != len(first.copies):
        return None
    return {copy: theirs[key].source_offset - copy.source_offset for key, copy in ours.items()}


def _shifted(layout: EngineLayout, steps: dict[Copy, int], times: int) -> EngineLayout:
    """Return the layout with `times` steps added to each source offset."""
    copies = [
        replace(copy, source_offset=copy.source_offset + step * times)
        for copy, step in steps.items()
    ]
    return replace(layout, copies=copies).ordered()


_EXPERT_DIMS = 3  # a fused weight of experts has at least so many dimensions


@dataclass(frozen=True)
class TrainerLayout:
    """Replicas (HSDP) of `fsdp_size` contiguous ranks; rank r of one has inner rank r % inner_size.

    inner_dims: parameter → the dimension that tensor or expert parallelism over `inner_size` ranks
      divides before FSDP2 divides the rest.
    shares_inner: FSDP2 divides all other parameters over all ranks of a replica (expert
      parallelism), else over ranks of equal inner rank (tensor parallelism, where each of them
      holds the parameter in full).
    """

    world_size: int
    fsdp_size: int
    inner_size: int
    inner_dims: Mapping[str, int]
    shares_inner: bool

    @classmethod
    def of(
        cls,
        shapes: Mapping[str, tuple[int, ...]],
        sliced: Mapping[str, int],
        world_size: int,
        fsdp_size: int,
        tp_size: int = 1,
        ep_size: int = 1,
    ) -> TrainerLayout:
        """Return the layout of FSDP2 over tensor parallelism or over expert parallelism.

        sliced: parameter → dimension that the engine slices (`EngineLayout.sliced_dims`); tensor
        parallelism of the trainer divides the same.

        Raises ValueError for sizes that do not divide `fsdp_size`, for both kinds at once, and
        where the engine does not tell which dimensions tensor parallelism divides.
        """
        for name, size in (("train_tp", tp_size), ("train_ep", ep_size)):
            if size < 1 or fsdp_size % size:
                raise ValueError(
                    f"{name}: got {size}, expected a divisor of the {fsdp_size} ranks of a replica"
                )
        if tp_size > 1 and ep_size > 1:
            raise ValueError(
                f"train_tp and train_ep: got {tp_size} and {ep_size}, expected at most one above 1"
            )
        if tp_size > 1 and not sliced:
            raise ValueError(
                f"train_tp: got {tp_size} for an engine of TP 1. The trainer is taken to divide "
                "the weights on the dimensions that the engine slices: give tp"
            )
        experts = {name: 0 for name, shape in shapes.items() if len(shape) >= _EXPERT_DIMS}
        inner_dims = dict(sliced) if tp_size > 1 else experts if ep_size > 1 else {}
        return cls(world_size, fsdp_size, max(tp_size, ep_size), inner_dims, ep_size > 1)

    def sources(
        self, shapes: Mapping[str, tuple[int, ...]], on_dim1: Iterable[str] = ()
    ) -> dict[str, ShardSpec]:
        """Return the placement of every parameter. on_dim1: those that FSDP2 shards on dim 1."""
        on_dim1 = set(on_dim1)
        return {n: self._place(n, shape or (1,), int(n in on_dim1)) for n, shape in shapes.items()}

    def _place(self, name: str, shape: tuple[int, ...], dim: int) -> ShardSpec:
        inner, outer = self.inner_size, self.fsdp_size // self.inner_size
        holders = self._holders
        if name not in self.inner_dims:
            way = "outer, inner" if self.shares_inner else "outer"
            return ShardSpec.along(shape, torch.float32, dim, holders[way])
        inner_dim = self.inner_dims[name]
        splits: tuple[Split, ...]
        if inner_dim == dim:
            splits = (Split(dim, (inner, outer)),)
        else:
            splits = tuple(sorted((Split(dim, (outer,)), Split(inner_dim, (inner,)))))
        way = "outer, inner" if dim < inner_dim else "inner, outer"
        return ShardSpec(shape, torch.float32, splits, holders[way])

    @cached_property
    def _holders(self) -> dict[str, Holders]:
        """Holders by the order in which shards are numbered: outer rank, inner rank, or both."""
        inner, outer = self.inner_size, self.fsdp_size // self.inner_size
        ranks = np.arange(self.world_size).reshape(-1, outer, inner)  # replica, outer, inner
        by_order = {
            "outer": ranks.transpose(1, 0, 2).reshape(outer, -1),
            "outer, inner": ranks.transpose(1, 2, 0).reshape(outer * inner, -1),
            "inner, outer": ranks.transpose(2, 1, 0).reshape(outer * inner, -1),
        }
        return {
            order: tuple(tuple(shard) for shard in by_shard.tolist())
            for order, by_shard in by_order.items()
        }
