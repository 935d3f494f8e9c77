"""Tokens per second of a real vLLM engine on a CPU, with our products and sampler and without.

A random model of the shapes of SmolLM2-135M with a float32 head, set up as the trainer sets up its
engine: in bfloat16 where the CPU multiplies it fast, else in float32. `step` compares the products,
with our sampler in both, and `rollout.exact`, which has our attention and norms as well; `sampler`
compares it with vLLM's own.

A time is that of one decoding step of all sequences: of a generation of many tokens less that of
few, by the difference in tokens. `share_of_limit` compares it with the larger of the time to read
all weights and the time of the products at the rate of a large one. The parts of a step are timed
in a run of their own, around the functions of vLLM that compute them.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from hybridengine.kernels import has_fast_products, mixed_gemm
from torch import Tensor, nn

from benchmarks._bench import OURS, Bench, short
from benchmarks._models import smollm2_135m

EXACT = f"{OURS}_exact"
SEQUENCES = (1, 8, 32, 128)
SAMPLED_SEQUENCES = 32
MAX_MODEL_LEN = 512
PROMPT_TOKENS, FEW_TOKENS, MANY_TOKENS = 128, 4, 28


def run(bench: Bench) -> None:
    dtype = prepared_dtype(bench, "generate")
    if dtype is None:
        return
    from hybridengine.rollout.vllm.seeds import request_generators

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
        llm, parameters = build(Path(folder), dtype)
        exact_llm, _ = build(Path(folder), dtype, exact=True)
        read = dtype.itemsize * parameters / (bench.peak("read", dtype) * 1e9)
        multiply = 2 * parameters / (bench.peak("gemm", dtype) * 1e12)
        seconds = dict[str, float]()
        for sequences in SEQUENCES:
            for name in ("torch", OURS, EXACT):
                used = exact_llm if name == EXACT else llm
                with products(used, name != "torch"), sampler(used, True):
                    _generate(used, sequences, FEW_TOKENS)  # warm up
                    seconds[name] = _seconds_per_step(used, sequences)
                    parts = _parts(used, sequences)
                add(
                    *("step", name, sequences, seconds, f"; ms of {parts}"),
                    share_of_limit=max(read, multiply * sequences) / seconds[name],
                    parts_ms=parts,
                )
        for label, truncation in {"": {}, " top_p=0.95": {"top_p": 0.95}}.items():
            for name in ("vllm", OURS):
                with sampler(llm, name == OURS):
                    _generate(llm, SAMPLED_SEQUENCES, FEW_TOKENS, **truncation)  # warm up
                    seconds[name] = _seconds_per_step(llm, SAMPLED_SEQUENCES, **truncation)
                add("sampler", name, SAMPLED_SEQUENCES, seconds, label=label)


def prepared_dtype(bench: Bench, op: str) -> torch.dtype | None:
    """Return the engine's dtype, with vLLM's environment set; None if the benchmark is left out."""
    from hybridengine.rollout.vllm.environment import prepare_environment, vllm_available

    dtype = torch.bfloat16 if has_fast_products(torch.bfloat16) else torch.float32
    if bench.device.type != "cpu" or bench.quick or not vllm_available():
        reason = "an engine on a CPU, not in a quick run"
        bench.leave_out(op, "step", "135M", dtype, {OURS: reason})
        return None
    prepare_environment()
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    return dtype


def build(folder: Path, dtype: torch.dtype, exact: bool = False) -> tuple[Any, int]:
    """Return an engine, by `rollout.exact` if `exact`, and how many weights a step multiplies."""
    from vllm import LLM

    from hybridengine.rollout.vllm.environment import CPU_BLOCK_SIZE
    from hybridengine.rollout.vllm.exact import exact_engine, use_exact_operators
    from hybridengine.rollout.vllm.head import use_plain_head
    from hybridengine.rollout.vllm.post_load import writable_weights

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
            enable_prefix_caching=False,
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
    from hybridengine.rollout.vllm.attention_backend import ExactAttention

    return any(isinstance(getattr(m, "impl", None), ExactAttention) for m in _model(llm).modules())


def _runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def _model(llm: Any) -> Any:
    return _runner(llm).get_model()


@contextmanager
def sampler(llm: Any, ours: bool) -> Iterator[None]:
    """While open, sample as our engine does, or by vLLM's own sampler."""
    from hybridengine.rollout.vllm.sampling import FusedSampler

    own = _runner(llm).sampler
    with patch.object(own, "forward", own.forward):
        if ours:
            FusedSampler(_runner(llm), exact=_is_exact(llm))
        yield


@contextmanager
def products(llm: Any, ours: bool) -> Iterator[None]:
    """While open, multiply as our engine does, or by torch's product and, in the head, oneDNN's."""
    from hybridengine.rollout.vllm import head

    def head_product(x: Tensor, weight: Tensor, bias: Any, dtype: torch.dtype) -> Tensor:
        out = torch.empty(x.shape[0], weight.shape[0], dtype=dtype)
        mixed_gemm(out, x, weight, bias)
        return out

    with ExitStack() as stack:
        if not ours:
            stack.enter_context(patch.object(head, "inference_linear", head_product))
            for module in _model(llm).modules():
                if hasattr(module, "cpu_linear"):
                    stack.enter_context(patch.object(module, "cpu_linear", nn.functional.linear))
        yield


def _parts(llm: Any, sequences: int) -> dict[str, float]:
    """Return the milliseconds of a decoding step that each of its parts takes."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    from hybridengine.rollout.vllm import attention_backend

    totals: dict[int, dict[str, float]] = {}
    for tokens in (FEW_TOKENS, MANY_TOKENS):
        seconds: dict[str, float] = defaultdict(float)
        totals[tokens] = seconds

        def timed(
            name: str, function: Callable, seconds: dict[str, float] = seconds
        ) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                start = time.perf_counter()
                result = function(*args, **kwargs)
                seconds[name] += time.perf_counter() - start
                return result

            return run

        modules = list(_model(llm).modules())
        linears = [
            ("products", m.quant_method, "apply") for m in modules if isinstance(m, LinearBase)
        ]
        heads = [("head", m, "_apply_head") for m in modules if isinstance(m, LogitsProcessor)]
        attention = [("attention", _custom_ops, "cpu_attention_with_kv_cache")]
        if _is_exact(llm):
            attention = [("attention", attention_backend, "paged_attention")]
        with ExitStack() as stack:
            for name, owner, function in (
                *linears,
                *heads,
                *attention,
                ("sampler", _runner(llm).sampler, "forward"),
            ):
                wrapped = timed(name, getattr(owner, function))
                stack.enter_context(patch.object(owner, function, wrapped))
            seconds["step"] = _generate(llm, sequences, tokens)
    steps = MANY_TOKENS - FEW_TOKENS
    few, many = totals[FEW_TOKENS], totals[MANY_TOKENS]
    return {name: round((many[name] - few[name]) / steps * 1e3, 2) for name in many}


def _seconds_per_step(llm: Any, sequences: int, **sampling: Any) -> float:
    times = {
        tokens: [_generate(llm, sequences, tokens, **sampling) for _ in range(2)]
        for tokens in (FEW_TOKENS, MANY_TOKENS)
    }
    return (min(times[MANY_TOKENS]) - min(times[FEW_TOKENS])) / (MANY_TOKENS - FEW_TOKENS)


def _generate(llm: Any, sequences: int, tokens: int, **truncation: Any) -> float:
    """Generate so many tokens of each sequence; return the seconds."""
    from vllm import SamplingParams

    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(1000, 40_000, (sequences, PROMPT_TOKENS), generator=draw).tolist()
    options: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True, "detokenize": False}
    sampling = [
        SamplingParams(**options, logprobs=0, seed=i, **truncation) for i in range(sequences)
    ]
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return time.perf_counter() - start
