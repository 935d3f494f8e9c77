"""Process-wide settings under which vLLM runs on the ranks that train, and its arguments."""

from __future__ import annotations

import difflib
import glob
import importlib.util
import logging
import os
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

# Tokens of a KV cache block on a CPU: the fewest that vLLM's attention takes there. Responses share
# the full blocks of their prompt, and vLLM's default, 128, is longer than many prompts.
CPU_BLOCK_SIZE = 32


def vllm_available() -> bool:
    """Whether vLLM is installed."""
    return importlib.util.find_spec("vllm") is not None


def prepare_environment() -> None:
    """Set what vLLM reads at import: in-process engine, no thread binding of the training ranks."""
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

    token = [uuid.uuid4().hex]
    dist.broadcast_object_list(token)
    name_of = _CPUSHMDistributed.make_group_name
    names: list[str] = []

    def unique_name(communicator: Any) -> str:
        names.append(f"hybridengine-{token[0]}-{name_of(communicator).lstrip('/')}")
        return names[-1]

    with patch.object(_CPUSHMDistributed, "make_group_name", staticmethod(unique_name)):
        yield
    dist.barrier()
    for name in names:
        for segment in Path("/dev/shm").glob(f"{glob.escape(name)}_*"):
            segment.unlink(missing_ok=True)


# Arguments of vllm.LLM that a job sets by another key.
_OPTIONS_WITH_KEY = {
    "model": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "seed",
    "dtype": "rollout.dtype",
    "quantization": "rollout.quantization",
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "max_model_len": "rollout.max_model_len",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_num_batched_tokens": "rollout.max_num_batched_tokens",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "enforce_eager": "rollout.enforce_eager",
    "enable_prefix_caching": "rollout.enable_prefix_caching",
    "enable_chunked_prefill": "rollout.enable_chunked_prefill",
    "enable_sleep_mode": "rollout.free_cache_engine",
    "return_sampling_mask": "algorithm.sampling_replay",
    "enable_lora": "reshard.lora",
    "max_loras": "reshard.lora",
    "max_lora_rank": "model.lora_rank",
}
# Arguments that the trainer sets, because the weight sync depends on them.
_FIXED_OPTIONS = {
    "load_format", "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "hf_config_path",
    "hf_overrides", "quantization_config", "revision", "distributed_executor_backend", "worker_cls",
    "logprobs_mode", "disable_log_stats", "data_parallel_size", "pipeline_parallel_size",
}  # fmt: skip


def check_engine_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments that a job cannot pass to `vllm.LLM`."""
    prepare_environment()
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    for name in options:
        if name in _OPTIONS_WITH_KEY:
            raise ValueError(f"{name} is set by {_OPTIONS_WITH_KEY[name]}; use that key")
        if name in _FIXED_OPTIONS:
            raise ValueError(f"{name} is set by the trainer, which relies on it; remove it")
        if name not in known:
            close = difflib.get_close_matches(
                name, known - _OPTIONS_WITH_KEY.keys(), n=1, cutoff=0.8
            )
            hint = f"did you mean {close[0]}?" if close else "see the arguments of vllm.LLM"
            raise ValueError(f"{name} is no engine argument of vLLM {vllm.__version__}; {hint}")
