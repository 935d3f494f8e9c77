"""A training micro-batch of a random model with the shape of Qwen2 0.5B: 4,096 tokens in 8 rows.

Forward and backward of the policy loss on one rank. `transformers` is the model in bfloat16 as its
library has it, with SDPA, padding (no row is padded here) and a loss from [T, V] logits. Ours is
loaded as a job loads it, packed: plain, on a GPU with `model.cuda_graphs`, with `model.compile`,
and under FSDP2, which one rank does not need. `host_ms` is the time until the calls return.
`tflop_per_s` counts the operations of the model (6 per parameter and token, and attention's),
`share_of_limit` is of the measured rate of a large product. Then clipping and AdamW. On a GPU a
trace of one micro-batch of ours is written beside the JSON file, as <op>.trace.json.gz for
chrome://tracing or Perfetto.
"""

from __future__ import annotations

import gzip
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks._bench import OURS, Bench, first_line
from benchmarks.step import write_model
from tests.loading import load_sharded

ROWS, PROMPT, RESPONSE = 8, 256, 256
FORMS: dict[str, dict[str, Any]] = {
    OURS: {},
    f"{OURS}_cuda_graphs": {"cuda_graphs": True},
    f"{OURS}_compile": {"compile": True},
    f"{OURS}_fsdp2": {"fsdp2": True},
}
LR = 1e-6
Loaded = tuple[nn.Module, Callable[[], Tensor], Callable[[], None]]  # with loss, optimizer step


def run(bench: Bench) -> None:
    on_gpu = bench.device.type == "cuda"
    prompt, response = (PROMPT, RESPONSE) if on_gpu else (4, 4)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with tempfile.TemporaryDirectory() as name, one_rank(on_gpu):
        millions = write_model(Path(name) / "model", tiny=not on_gpu, mean_tokens=64)
        problem = Problem(bench, str(Path(name) / "model"), dtype, prompt, response)
        problem.shape = f"{millions}M T={ROWS * (prompt + response)}"
        problem.time("transformers", problem.transformers)
        for form, options in FORMS.items():
            if on_gpu or "cuda_graphs" not in options:
                problem.time(form, partial(problem.ours, **options))


@contextmanager
def one_rank(on_gpu: bool) -> Iterator[None]:
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Problem:
    """The micro-batch, and how a model is timed with it."""

    shape = ""

    def __init__(
        self, bench: Bench, path: str, dtype: torch.dtype, prompt: int, response: int
    ) -> None:
        from hybridengine.model import pack_rollouts

        self.bench, self.path, self.dtype, self.prompt = bench, path, dtype, prompt
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(256, (ROWS, prompt + response), generator=generator)
        self.advantages = torch.randn(ROWS * response, generator=generator).to(bench.device)
        pairs = [(row[:prompt], row[prompt:]) for row in self.ids.tolist()]
        self.batch = pack_rollouts(pairs, bench.device)
        self.ids = self.ids.to(bench.device)
        self.flops = 0.0

    def time(self, impl: str, load: Callable[[], Loaded]) -> None:
        """Add the rows of a model. What fails leaves a row with the reason."""
        bench = self.bench
        if bench.results.keep({"pass": "optimizer"}, op="micro_batch", impl=impl):
            return
        try:
            model, loss, optimizer_step = load()
            self.flops = self.flops or self._flops(model)

            def both_passes() -> None:
                loss().backward()

            measured = self._measure(both_passes, partial(_drop_gradients, model))
            rate = self.flops / measured["ms_p50"] / 1e9
            share = rate / bench.peak("gemm", self.dtype) if bench.gpu else None
            more = {"tflop_per_s": rate, "share_of_limit": share}
            self._add("fwd+bwd", impl, **more, **measured)
            if bench.gpu and impl == OURS:
                self._trace(both_passes)
            both_passes()  # for gradients
            self._add("optimizer", impl, **self._measure(optimizer_step, lambda: None))
        except Exception as error:  # as a compiler that is missing; the other forms still run
            reason = f"{type(error).__name__}: {first_line(error)}"
            bench.leave_out("micro_batch", "fwd+bwd", self.shape, self.dtype, {impl: reason})

    def _add(self, pass_: str, impl: str, **values: Any) -> None:
        dtype, host = str(self.dtype).removeprefix("torch."), values["host_ms"]
        note = f" host {host:.1f} ms"
        self.bench.add("micro_batch", pass_, impl, self.shape, note, dtype=dtype, **values)

    def _measure(self, call: Callable[[], object], after: Callable[[], object]) -> dict[str, Any]:
        """Return quantiles of the milliseconds of a call, of its host time, and the peak memory."""
        device, times, host = self.bench.device, list[float](), list[float]()
        synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        for _ in range(3):  # of them the first compile
            call()
            after()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for _ in range(3 if self.bench.quick else 10):
            synchronize()
            start = time.perf_counter()
            call()
            host.append((time.perf_counter() - start) * 1e3)
            synchronize()
            times.append((time.perf_counter() - start) * 1e3)
            after()
        times.sort()
        p20, p50, p80 = (times[round(q * (len(times) - 1))] for q in (0.2, 0.5, 0.8))
        peak = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
        measured = {"ms_p20": p20, "ms_p50": p50, "ms_p80": p80, "peak_mib": peak}
        return measured | {"host_ms": sorted(host)[len(host) // 2]}

    def _flops(self, model: nn.Module) -> float:
        """Operations of forward and backward: products with all parameters, and attention."""
        config: Any = model.config
        numel = sum(p.numel() for p in model.parameters())
        tokens, length = self.ids.numel(), self.ids.shape[1]
        pairs = tokens * (length + 1) / 2
        return 6.0 * numel * tokens + 12.0 * pairs * config.num_hidden_layers * config.hidden_size

    def _trace(self, call: Callable[[], object]) -> None:
        from torch.profiler import ProfilerActivity, profile

        file = self.bench.results.path
        if file is None:
            return
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            call()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as name:
            trace.export_chrome_trace(f"{name}/trace.json")
            data = Path(name, "trace.json").read_bytes()
        file.with_name(f"{file.stem}.trace.json.gz").write_bytes(gzip.compress(data))

    def transformers(self) -> Loaded:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(
            self.path, dtype=self.dtype, attn_implementation="sdpa"
        )
        model = model.to(self.bench.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

        def loss() -> Tensor:
            logits = model(input_ids=self.ids, use_cache=False).logits[:, self.prompt - 1 : -1]
            labels = self.ids[:, self.prompt :].flatten()
            log_probs = -F.cross_entropy(logits.flatten(0, 1).float(), labels, reduction="none")
            ratio = (log_probs - log_probs.detach()).exp()
            return -(ratio * self.advantages).mean()

        def step() -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        return model, loss, step

    def ours(self, fsdp2: bool = False, **options: bool) -> Loaded:
        from hybridengine.model import Optimizer, loading, packed_policy_loss, sharding_mesh

        mesh = sharding_mesh(self.bench.device.type, 1)
        with patch.object(loading, "needs_fsdp", lambda *_: fsdp2):
            model = load_sharded(self.path, mesh, self.dtype, **options)
        optimizer = Optimizer(model, lr=LR, total_steps=2**20, param_dtype=self.dtype)
        gradients = dict[nn.Parameter, Tensor | None]()

        def loss() -> Tensor:
            return packed_policy_loss(
                model, self.batch, old_log_probs=None, advantages=self.advantages
            )[0]

        def step() -> None:
            if not gradients:  # a step drops them
                gradients.update({p: p.grad for p in model.parameters()})
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            optimizer.step(max_norm=1.0)

        return model, loss, step


def _drop_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None
