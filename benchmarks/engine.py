"""vLLM on the ranks that train: syncs into a real engine, through sleep, against the trainer.

Build, sync, generate; sleep (on a GPU at level 2, which discards the weights), change all weights,
sync, wake, generate again. The log-probs of both responses are compared with the trainer's; other
weights, or a part of them, would differ by far more than the limit, and with `rollout.exact` no bit
may differ. At TP 1, and at TP 2 where there are two GPUs; on a GPU in each of MODES. The second
model runner and async scheduling are vLLM's defaults.
"""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks._bench import OURS, Bench, short
from benchmarks.step import write_model
from hybridengine.engine.vllm.environment import vllm_available
from tests.engines import build_engine
from tests.loading import load_sharded
from tests.ranks import run_ranks

Pairs = list[tuple[list[int], list[int]]]  # prompt, response

TP_SIZES = (1, 2)
EXACT = "exact"  # the mode in which engine and trainer have the same operators
# What writes weights in place under less or more of vLLM, the most telling first; the last one is
# its default, with compiled layers. name: arguments of vLLM on a GPU.
_CACHE = {"kv_cache_memory_bytes": 1 << 30}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"attention_backend": "TRITON_ATTN"} | _CACHE,
    EXACT: _CACHE,
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}} | _CACHE,
    "default": _CACHE,
}
ON_CPU = ("eager", EXACT)
TIMEOUT_S = {"cuda": 120, "cpu": 900}  # of an engine; on one GPU they fit the part of the report
RESPONSES, TOKENS = 8, 64
# Mean absolute difference of log-probs: of sums in other orders, and of bfloat16 activations.
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.02}
OTHER = 10  # times the limit: how much other weights differ at least


def run(bench: Bench) -> None:
    device = bench.device.type
    on_gpu = device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model"
        millions = write_model(path, tiny=not on_gpu, mean_tokens=TOKENS)
        failed = []
        for tp_size, mode in product(TP_SIZES, MODES if on_gpu else ON_CPU):
            shape = f"{millions}M tp={tp_size} {mode}"
            if reason := _why_not(tp_size, on_gpu):
                bench.leave_out("engine", "check", shape, dtype, {OURS: reason})
            elif not bench.results.keep({"pass": "check"}, op="engine", shape=shape):
                try:
                    _add_rows(bench, str(path), tp_size, mode, shape, dtype)
                except Exception:
                    traceback.print_exc()
                    failed.append(shape)
        assert not failed, f"engines that failed: {', '.join(failed)}; see above"


def _why_not(tp_size: int, on_gpu: bool) -> str:
    if not vllm_available():
        return "vLLM is not installed"
    if on_gpu and torch.cuda.device_count() < tp_size:
        return f"there are fewer than {tp_size} GPUs"
    return ""


def _add_rows(
    bench: Bench, path: str, tp_size: int, mode: str, shape: str, dtype: torch.dtype
) -> None:
    """Add a row for every step and one for the comparison. Raises AssertionError if it fails."""
    device, exact = bench.device.type, mode == EXACT
    arguments = (path, tp_size, device, dtype, mode)
    results = run_ranks(_rank, tp_size, *arguments, timeout_s=TIMEOUT_S[device], device=device)
    for step in results[0]["ms"]:
        slowest = max(result["ms"][step] for result in results)
        rate = RESPONSES * TOKENS * 1e3 / slowest if step.startswith("generate") else None
        note = "" if rate is None else f" {rate:.0f} tokens/s"
        row = {"dtype": short(dtype), "ms_p50": slowest, "tokens_per_s": rate}
        bench.add("engine", step, OURS, shape, note, **row)
    same, other = results[0]["same"], results[0]["other"]
    note = f" mean |difference| of log-probs {same}, from other weights {other:.2g}"
    more = {"differences": same, "difference_of_other_weights": other}
    bench.add("engine", "check", OURS, shape, note, dtype=short(dtype), ms_p50=0.0, **more)
    limit = 0.0 if exact else LIMITS[dtype]
    assert max(same) <= limit, f"the engine's log-probs differ from the trainer's by {same}"
    assert other >= OTHER * LIMITS[dtype], f"other weights differ by {other} only"


def _rank(
    rank: int,
    world_size: int,
    path: str,
    tp_size: int,
    device: str,
    dtype: torch.dtype,
    mode: str,
) -> dict[str, Any]:
    """Return the milliseconds of every step; mean differences of log-probs from the trainer's.

    same: of the responses before and after the change of weights. other: of the second ones from
    the trainer's log-probs before the change.
    """
    from hybridengine.engine.interface import SamplingSpec
    from hybridengine.model import (
        parameter_shards,
        sharding_mesh,
        use_exact_operators,
    )
    from hybridengine.reshard import Resharder

    ms: dict[str, float] = {}

    def timed(step: str, call: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = call()
        if device == "cuda":
            torch.cuda.synchronize()
        ms[step] = (time.perf_counter() - started) * 1e3
        return result

    engine = timed(
        "build",
        lambda: build_engine(
            "vllm",
            path,
            tensor_model_parallel_size=tp_size,
            max_model_len=256,
            dtype=str(dtype).removeprefix("torch."),
            gpu_memory_utilization=0.2,
            kv_cache_gib=64 / 1024,
            exact=mode == EXACT,
            enforce_eager=mode == "eager",
            engine_kwargs=MODES[mode] if device == "cuda" else {},
        ),
    )
    sliced = engine.target.layout.sliced_dims(engine.checkpoint.parameters)
    splits = {name: tp_size for name, dim in sliced.items() if dim == 1}
    model = load_sharded(
        path,
        mesh=sharding_mesh(device, world_size),
        param_dtype=dtype,
        shard_dim1=lambda name: sliced.get(name) == 1,
        adapt=partial(use_exact_operators, splits=splits) if mode == EXACT else None,
    )
    resharder = Resharder(lambda: parameter_shards(model), engine, delta="off")
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(256, (RESPONSES, 48), generator=generator).tolist()
    spec = SamplingSpec(n=1, max_tokens=TOKENS)

    def generate(step: str, seed: int) -> tuple[Pairs, torch.Tensor]:
        completions = timed(step, lambda: engine.generate(prompts, spec, seed))
        pairs = [(p, c.token_ids) for p, (c,) in zip(prompts, completions, strict=True)]
        return pairs, torch.tensor([x for (c,) in completions for x in c.log_probs])

    timed("sync", lambda: resharder.sync(verify=True))
    pairs, log_probs = generate("generate", 1)
    same = [_difference(model, pairs, log_probs)]
    timed("sleep", engine.sleep)
    old = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():  # vectors are norms and biases
            parameter.normal_(0, 0.02) if parameter.dim() > 1 else parameter.add_(0.1)
    timed("sync asleep", lambda: resharder.sync(verify=True))
    pairs, log_probs = generate("generate again", 2)
    same.append(_difference(model, pairs, log_probs))
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), old, strict=True):
            parameter.copy_(value)
    other = _difference(model, pairs, log_probs)
    engine.shutdown()
    return {"ms": ms, "same": same, "other": other}


def _difference(model: torch.nn.Module, pairs: Pairs, log_probs: torch.Tensor) -> float:
    """Return the mean absolute difference of the engine's log-probs from those of `model`."""
    from hybridengine.model import free_gathered, pack_rollouts, packed_log_probs

    batch = pack_rollouts(pairs, next(model.parameters()).device)
    with torch.no_grad():
        own, _ = packed_log_probs(model, batch, 1.0)
    free_gathered(model)  # a sync, or a write to the weights, may come next
    return (own.cpu() - log_probs).abs().mean().item()
