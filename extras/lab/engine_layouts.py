"""The layouts of vLLM's engine ranks, recorded from config.json alone.

DP ranks of an engine with expert parallelism hold equal weights but for their experts, and expert
number e of DP rank d is read where that of rank 0 is, some multiple of d further. Of 64 such ranks
recording all takes minutes, so the layouts of most follow from those of three.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from hybridengine.engine.vllm.environment import (
    models_inspected_here,
    prepare_environment,
    vllm_available,
)
from hybridengine.engine.vllm.record import record_engine_layout
from hybridengine.model.checkpoint import checkpoint_layout_from_config
from hybridengine.sync.copies import Copy
from hybridengine.sync.layout import EngineLayout
from hybridengine.vision.engine import import_image_models
from hybridengine.vision.packed import IMAGE_MODEL_TYPES


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
