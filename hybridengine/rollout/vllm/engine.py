"""vLLM as an in-process engine on the ranks that train (`external_launcher`, tensor parallel).

Every rank builds one `LLM`; ranks of a tensor-parallel group run in lock step on the same prompts.
The weights start uninitialised (`load_format="dummy"`) and come from the reshard alone.
"""

from __future__ import annotations

import difflib
import glob
import logging
import os
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridengine.rollout.engine import Completion, RolloutEngine, SamplingSpec
from hybridengine.rollout.vllm.lora import LoraSlot, slot_options
from hybridengine.rollout.vllm.weights import VllmWeights, WeightsInPlace, replaced
from hybridengine.sharding.layout import Checkpoint
from hybridengine.sharding.tp_groups import tp_groups

__all__ = ["VllmEngine", "check_engine_options", "vllm_available"]

# Arguments of vllm.LLM that a job sets by keys of its own, or that the weight sync depends on.
_OWN_OPTIONS = {
    "model": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "seed": "seed",
    "dtype": "rollout.dtype",
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
    "enable_lora": "reshard.lora",
    "max_loras": "reshard.lora",
    "max_lora_rank": "model.lora_rank",
}
_FIXED_OPTIONS = {
    "load_format", "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "hf_config_path",
    "hf_overrides", "quantization", "revision", "distributed_executor_backend", "worker_cls",
    "logprobs_mode", "disable_log_stats", "data_parallel_size", "pipeline_parallel_size",
}  # fmt: skip


def vllm_available() -> bool:
    import importlib.util

    return importlib.util.find_spec("vllm") is not None


def prepare_environment() -> None:
    """Settings vLLM reads at import: in-process engine, no thread binding of the training ranks."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    logging.getLogger("vllm").setLevel(logging.ERROR)  # until vLLM reads its own level
    if os.environ.get("HYBRIDENGINE_ISA") in ("portable", "avx2"):  # vLLM has no limit of its own
        for feature in ("avx512", "avx512_bf16", "amx_tile"):
            setattr(torch.cpu, f"_is_{feature}_supported", lambda: False)


def check_engine_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError, in one sentence, for arguments that a job cannot hand on to `vllm.LLM`."""
    prepare_environment()
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in fields(EngineArgs)}
    for name in options:
        if name in _OWN_OPTIONS:
            raise ValueError(f"{name} is set by {_OWN_OPTIONS[name]}; use that key")
        if name in _FIXED_OPTIONS:
            raise ValueError(f"{name} is set by the trainer, which relies on it; remove it")
        if name not in known:
            close = difflib.get_close_matches(name, known - _OWN_OPTIONS.keys(), n=1, cutoff=0.8)
            hint = f"did you mean {close[0]}?" if close else "see the arguments of vllm.LLM"
            raise ValueError(f"{name} is no engine argument of vLLM {vllm.__version__}; {hint}")


class VllmEngine(VllmWeights, RolloutEngine):
    """A vLLM engine whose weights are written in place by the reshard.

    model_path: folder or name with config and tokenizer; its weights are not read.
    checkpoint: what the trained model's checkpoint is made of (`checkpoint_layout`).
    tp_size: tensor-parallel size, a divisor of the world size and of the attention heads.
    max_model_len: longest prompt + response, in tokens.
    stop_token_ids: tokens that end a response (kept as its last token).
    lora_rank: adapters of up to this rank can be held beside the weights (`load_adapters`).
    kv_cache_bytes: size of the key-value cache; None takes `memory_share` of the GPU.
    free_cache: `sleep()` frees weights and cache on a GPU, the cache alone on a CPU.
    stop_texts: whether `SamplingSpec.stop` may be given, for which vLLM needs its tokenizer.
    engine_options: further keyword arguments of `vllm.LLM`.
    """

    def __init__(
        self,
        model_path: str | Path,
        checkpoint: Checkpoint,
        *,
        tp_size: int,
        max_model_len: int,
        stop_token_ids: Sequence[int],
        dtype: torch.dtype = torch.bfloat16,
        lora_rank: int = 0,
        seed: int = 0,
        kv_cache_bytes: int | None = None,
        memory_share: float = 0.5,
        free_cache: bool = True,
        stop_texts: bool = False,
        engine_options: Mapping[str, Any] | None = None,
    ) -> None:
        prepare_environment()
        from vllm import LLM

        ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        groups = tp_groups(dist.get_world_size(), tp_size, ranks_per_node)
        self.tp_size, self.replicas = tp_size, len(groups)
        self.replica = next(j for j, group in enumerate(groups) if dist.get_rank() in group)
        self._stop_token_ids, self.free_cache = list(stop_token_ids), free_cache
        with _strided_groups(groups), WeightsInPlace() as in_place, _own_shared_memory():
            self._llm = LLM(
                model=str(model_path),
                load_format="dummy",
                dtype=str(dtype).removeprefix("torch."),
                tensor_parallel_size=tp_size,
                **slot_options(lora_rank, checkpoint.parameters),
                distributed_executor_backend="external_launcher",
                max_model_len=max_model_len,
                seed=seed,
                skip_tokenizer_init=not stop_texts,
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                kv_cache_memory_bytes=kv_cache_bytes,
                gpu_memory_utilization=memory_share,
                enable_sleep_mode=free_cache and torch.cuda.is_available(),
                **(engine_options or {}),
            )
        super().__init__(self._llm, checkpoint, in_place)
        self._slot = LoraSlot(self._runner) if lora_rank else None

    def _generate(
        self, prompts: Sequence[Sequence[int]], spec: SamplingSpec, seed: int
    ) -> list[list[Completion]]:
        from vllm import SamplingParams

        sampling = SamplingParams(
            n=spec.n,
            temperature=spec.temperature,
            top_p=spec.top_p,
            top_k=spec.top_k,
            max_tokens=spec.max_tokens,
            logprobs=0,
            stop_token_ids=self._stop_token_ids,
            stop=list(spec.stop),
            include_stop_str_in_output=True,
            detokenize=bool(spec.stop),
        )
        requests = [{"prompt_token_ids": list(ids)} for ids in prompts]
        # One generator state for all ranks of the replica: they must sample the same tokens.
        with torch.random.fork_rng():
            torch.manual_seed(seed * self.replicas + self.replica)
            outputs = self._llm.generate(
                requests, sampling, use_tqdm=False, lora_request=self._slot and self._slot.request
            )
        return [[_completion(o) for o in output.outputs] for output in outputs]

    def _suspend(self) -> None:
        if torch.cuda.is_available():
            self._llm.sleep(level=1)  # weights wait in host memory: not all are written by a sync
            return
        self._reset_caches()
        caches = (cache.untyped_storage() for cache in self._runner.kv_caches)
        self._freed = {s.data_ptr(): (s, s.nbytes()) for s in caches}
        for storage, _ in self._freed.values():
            storage.resize_(0)

    def _resume(self, part: str) -> None:
        if torch.cuda.is_available():
            self._llm.wake_up(tags=[part])
        elif part == "kv_cache":
            for storage, num_bytes in self._freed.values():
                storage.resize_(num_bytes)
                storage.fill_(0)  # a masked entry may be multiplied by zero, so no NaN

    def shutdown(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def _completion(output: Any) -> Completion:
    ids = list(output.token_ids)
    log_probs = [step[token].logprob for step, token in zip(output.logprobs, ids, strict=True)]
    return Completion(ids, log_probs, output.finish_reason)


def _strided_groups(groups: list[list[int]]) -> AbstractContextManager:
    """Let vLLM's tensor- and expert-parallel groups be `groups` instead of runs of neighbours."""
    from vllm.distributed import parallel_state

    build: Callable = parallel_state.init_model_parallel_group
    tp_size = len(groups[0])
    neighbours = [list(range(i * tp_size, (i + 1) * tp_size)) for i in range(len(groups))]

    def build_strided(group_ranks: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        return build(groups if group_ranks == neighbours else group_ranks, *args, **kwargs)

    return replaced(parallel_state, "init_model_parallel_group", build_strided)


@contextmanager
def _own_shared_memory() -> Iterator[None]:
    """Give vLLM's CPU collectives shared memory of this run's own, gone when its processes are.

    vLLM names the segments by TP group alone, so a second run on the machine, or one after a killed
    run, would fail to create them. Once every rank has them open their names are not needed.
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

    with replaced(_CPUSHMDistributed, "make_group_name", staticmethod(unique_name)):
        yield
    dist.barrier()
    for name in names:
        for segment in Path("/dev/shm").glob(f"{glob.escape(name)}_*"):
            segment.unlink(missing_ok=True)
