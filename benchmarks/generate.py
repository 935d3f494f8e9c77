"""Tokens per second of a real vLLM engine on a CPU, with our products and sampler and without.

A random model of the shapes of SmolLM2-135M with a float32 head, set up as the trainer sets up its
engine: in bfloat16 where the CPU multiplies it fast, else in float32. `step` compares the products,
with our sampler in both, and `rollout.exact`, which has our attention and norms as well; `sampler`
compares it with vLLM's own.

A time is the median of decoding steps of all sequences, of several generations by each way in
turns. `share_of_limit` compares it with the larger of the time to read all weights and the time of
the products at the rate of a large one. The parts of a step are timed in steps of their own, around
the functions of vLLM that compute them, so that no step is replayed.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks._bench import OURS, Bench, short
from benchmarks._models import smollm2_135m
from hybridengine.kernels import has_fast_products, mixed_gemm

EXACT = f"{OURS}_exact"
SEQUENCES = (1, 8, 32, 128)
SAMPLED_SEQUENCES = 32
MAX_MODEL_LEN = 512
# A token more than four blocks of the cache, which only the first round computes.
PROMPT_TOKENS, STEPS, ROUNDS = 129, 24, 3


def run(bench: Bench) -> None:
    dtype = prepared_dtype(bench, "generate")
    if dtype is None:
        return
    from hybridengine.engine.vllm.sampling import request_generators

    def add(
        part: str, name: str, n: int, seconds: dict[str, float], note: str = "", **more: Any
    ) -> None:
        took, peer = seconds[name], {"step": "torch", "sampler": "vllm"}[part]
        bench.add(
            "generate",
            part,
            name,
            f"135M sequences={n}{more.pop('label', '')}",
            dtype=short(dtype),
            ms_p50=took * 1e3,
            ratio_to_best_peer=seconds[peer] / took if name.startswith(OURS) else None,
            note=f"  {n / took:.0f} tokens/s{note}",
            tokens_per_s=n / took,
            **more,
        )

    with tempfile.TemporaryDirectory() as folder, request_generators():
        llm, parameters = build(Path(folder), dtype, cache_prompts=True)
        exact_llm, _ = build(Path(folder), dtype, exact=True, cache_prompts=True)
        read = dtype.itemsize * parameters / (bench.peak("read", dtype) * 1e9)
        multiply = 2 * parameters / (bench.peak("gemm", dtype) * 1e12)
        seconds = dict[str, float]()
        for sequences in SEQUENCES:
            times, parts = defaultdict[str, list[float]](list), dict[str, dict[str, float]]()
            for _ in range(ROUNDS):
                for name in ("torch", OURS, EXACT):
                    used = exact_llm if name == EXACT else llm
                    with products(used, name != "torch"), sampler(used, True):
                        times[name] += _step_times(used, sequences)
                        parts[name] = parts.get(name) or _parts(used, sequences)
            seconds |= {name: statistics.median(values) for name, values in times.items()}
            for name in times:
                add(
                    *("step", name, sequences, seconds, f"; ms of {parts[name]}"),
                    share_of_limit=max(read, multiply * sequences) / seconds[name],
                    parts_ms=parts[name],
                )
        truncations: dict[str, dict[str, Any]] = {"": {}, " top_p=0.95": {"top_p": 0.95}}
        for label, truncation in truncations.items():
            times = defaultdict(list)
            for _ in range(ROUNDS):
                for name in ("vllm", OURS):
                    with sampler(llm, name == OURS):
                        times[name] += _step_times(llm, SAMPLED_SEQUENCES, **truncation)
            seconds |= {name: statistics.median(values) for name, values in times.items()}
            for name in times:
                add("sampler", name, SAMPLED_SEQUENCES, seconds, label=label)


def prepared_dtype(bench: Bench, op: str) -> torch.dtype | None:
    """Return the engine's dtype, with vLLM's environment set; None if the benchmark is left out."""
    from hybridengine.engine.vllm.environment import prepare_environment, vllm_available

    dtype = torch.bfloat16 if has_fast_products(torch.bfloat16) else torch.float32
    if bench.device.type != "cpu" or bench.quick or not vllm_available():
        reason = "an engine on a CPU, not in a quick run"
        bench.leave_out(op, "step", "135M", dtype, {OURS: reason})
        return None
    prepare_environment()
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    return dtype


def build(
    folder: Path, dtype: torch.dtype, *, exact: bool = False, cache_prompts: bool = False
) -> tuple[Any, int]:
    """Return an engine, by `rollout.exact` if `exact`, and how many weights a step multiplies."""
    from vllm import LLM

    from hybridengine.engine.exact.operators import (
        exact_engine,
        use_exact_operators,
        use_plain_head,
    )
    from hybridengine.engine.vllm.environment import CPU_BLOCK_SIZE
    from hybridengine.engine.vllm.post_load import writable_weights

    config = smollm2_135m(max_position_embeddings=2048, architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    exactness: AbstractContextManager[dict[str, Any]]
    exactness = exact_engine() if exact else nullcontext({})
    with writable_weights(), exactness as required:
        llm = LLM(
            str(folder),
            load_format="dummy",
            dtype=str(dtype).removeprefix("torch."),  # type: ignore[arg-type]
            skip_tokenizer_init=True,
            max_model_len=MAX_MODEL_LEN,
            logprobs_mode="processed_logprobs",
            hf_overrides={"head_dtype": "float32"},
            enable_prefix_caching=cache_prompts,
            block_size=CPU_BLOCK_SIZE,
            max_num_seqs=max(SEQUENCES),
            disable_log_stats=True,
            **{"enforce_eager": True, **required},
        )
    model = _model(llm)
    if exact:
        use_exact_operators(model, MAX_MODEL_LEN)
    else:
        use_plain_head(model)
    return llm, sum(p.numel() for p in model.parameters() if p.dim() == 2)


def _is_exact(llm: Any) -> bool:
    from hybridengine.engine.exact.attention_backend import ExactAttention

    return any(isinstance(getattr(m, "impl", None), ExactAttention) for m in _model(llm).modules())


def _runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def _model(llm: Any) -> Any:
    return _runner(llm).get_model()


@contextmanager
def sampler(llm: Any, ours: bool) -> Iterator[None]:
    """While open, sample as our engine does, or by vLLM's own sampler."""
    from hybridengine.engine.vllm.sampling import FusedSampler

    own = _runner(llm).sampler
    with patch.object(own, "forward", own.forward):
        if ours:
            FusedSampler(_runner(llm), exact=_is_exact(llm))
        yield


@contextmanager
def products(llm: Any, ours: bool) -> Iterator[None]:
    """While open, multiply as our engine does, or by torch's product and, in the head, oneDNN's."""
    from hybridengine.engine.exact import operators

    def head_product(x: Tensor, weight: Tensor, bias: Any, dtype: torch.dtype) -> Tensor:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=dtype)
        mixed_gemm(out, x, weight, bias)
        return out

    with ExitStack() as stack:
        if not ours:
            stack.enter_context(patch.object(operators, "inference_linear", head_product))
            for module in _model(llm).modules():
                if hasattr(module, "cpu_linear"):
                    stack.enter_context(patch.object(module, "cpu_linear", nn.functional.linear))
        yield


def _parts(llm: Any, sequences: int) -> dict[str, float]:
    """Return the milliseconds of a decoding step that each of its parts takes."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    from hybridengine.engine.exact import attention_backend

    seconds: dict[str, float] = defaultdict(float)

    def timed(name: str, function: Callable) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            seconds[name] += time.perf_counter() - start
            return result

        return run

    modules = list(_model(llm).modules())
    linears = [("products", m.quant_method, "apply") for m in modules if isinstance(m, LinearBase)]
    heads = [("head", m, "_apply_head") for m in modules if isinstance(m, LogitsProcessor)]
    attention = [("attention", _custom_ops, "cpu_attention_with_kv_cache")]
    if _is_exact(llm):
        attention = [("attention", attention_backend, "paged_attention")]
    with ExitStack() as stack:
        hook = modules[0].register_forward_pre_hook(lambda *_: None)  # or steps are replayed
        stack.callback(hook.remove)
        for name, owner, function in (
            *linears,
            *heads,
            *attention,
            ("sampler", _runner(llm).sampler, "forward"),
        ):
            wrapped = timed(name, getattr(owner, function))
            stack.enter_context(patch.object(owner, function, wrapped))
        steps = _step_times(llm, sequences, before=seconds.clear)
    seconds["step"] = sum(steps)
    return {name: round(total / len(steps) * 1e3, 2) for name, total in seconds.items()}


def _step_times(
    llm: Any, sequences: int, *, before: Callable[[], None] = lambda: None, **truncation: Any
) -> list[float]:
    """Return the seconds of STEPS steps in which all sequences decode; `before` is called first."""
    from vllm import SamplingParams

    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(1000, 40_000, (sequences, PROMPT_TOKENS), generator=draw).tolist()
    engine, names = llm.llm_engine, [f"{time.monotonic_ns()}-{i}" for i in range(sequences)]
    options: dict[str, Any] = {"ignore_eos": True, "detokenize": False, "logprobs": 0}
    for i, (name, ids) in enumerate(zip(names, prompts, strict=True)):
        params = SamplingParams(max_tokens=MAX_MODEL_LEN, seed=i, **options, **truncation)
        engine.add_request(name, {"prompt_token_ids": ids}, params)
    while len(engine.step()) < sequences:
        pass
    engine.step()  # warm up
    before()
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    engine.abort_request(names)
    return times
