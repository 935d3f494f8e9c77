"""Host time and launches of a call: public operators, a training micro-batch, an optimizer step.

Tensors are tiny, so that nearly all of a call is Python, torch's dispatcher and autograd. `ms` is
CPU time of the process, which other processes on the machine do not enter, of a call in a run of
many; `launches` are the torch operators that compute something (views and allocations do not) and
calls of our kernels. `torch` is the operator that torch has for it, or the nearest one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks._bench import OURS, Bench, OutOfTime, quantiles
from hybridengine import kernels as he
from hybridengine.kernels import _backend

TORCH = "torch"
LAYERS = 24
T, H, V, HEADS, SEQUENCES = 16, 32, 64, 4, 4  # tokens, hidden size, vocabulary
_RUN_S = 0.02  # of calls that are timed together
_QUEUED = 800  # launches in a run on a GPU: more than it queues would wait

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_NO_KERNELS = {"empty_from_pool", "has_mixed_gemm"}  # functions of the extension


class _Launches(TorchDispatchMode):
    """Count torch's operators that compute something, also those inside ours."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        if function.namespace == "hybridengine":
            tensor = next(_tensors(args))
            key = DispatchKey.CUDA if tensor.is_cuda else DispatchKey.CPU
            with self:
                return function.redispatch(DispatchKeySet(key), *args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if not function.is_view and name not in _ALLOCATIONS:
            self.count += 1
        return function(*args, **(kwargs or {}))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


class _Counted:
    """The extension; calls of its kernels are counted."""

    def __init__(self, extension: Any, counter: _Launches) -> None:
        self._extension, self._counter = extension, counter

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._extension, name)
        if isinstance(function, type) or not callable(function) or name in _NO_KERNELS:
            return function

        def call(*args: Any, **kwargs: Any) -> Any:
            self._counter.count += 1
            return function(*args, **kwargs)

        return call


@contextmanager
def _counting() -> Iterator[_Launches]:
    counter = _Launches()
    with ExitStack() as stack:
        extension = _backend.EXTENSION
        if extension is not None:
            stack.enter_context(patch.object(_backend, "EXTENSION", _Counted(extension, counter)))
        if _backend.has_triton():
            from hybridengine.kernels._launch import Forms

            launch = Forms.launch

            def counted(self: Any, *args: Any) -> None:
                counter.count += 1
                launch(self, *args)

            stack.enter_context(patch.object(Forms, "launch", counted))
        stack.enter_context(counter)
        yield counter


def launches(call: Callable[[], object]) -> int:
    """Return how many kernels a call launches."""
    call()
    with _counting() as counter:
        call()
    return counter.count


def host_ms(
    bench: Bench, calls: Mapping[str, Callable[[], object]], num_launches: Mapping[str, int]
) -> dict[str, dict[str, float]]:
    """Return quantiles of the CPU time of each call, from runs of many calls in turn."""
    sizes: dict[str, int] = {}
    run_s = min(_RUN_S, bench.budget_s)
    for name, call in calls.items():
        start = time.perf_counter()
        call()
        sizes[name] = max(1, int(run_s / (time.perf_counter() - start)))
        if bench.gpu is not None:
            sizes[name] = max(1, min(sizes[name], _QUEUED // max(1, num_launches[name])))
    times: dict[str, list[float]] = {name: [] for name in calls}
    done = time.perf_counter() + bench.budget_s * len(calls)
    gc.collect()
    gc.disable()
    while len(times[next(iter(times))]) < 3 or time.perf_counter() < done:
        for name, call in calls.items():
            if bench.gpu is not None:
                torch.cuda.synchronize()
            start_ns = time.process_time_ns()
            for _ in range(sizes[name]):
                call()
            times[name].append((time.process_time_ns() - start_ns) / sizes[name] / 1e6)
    gc.enable()
    return {name: quantiles(values) for name, values in times.items()}


def run(bench: Bench) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for op, (gradients, calls) in operators(bench.device).items():
        leaves = [tensor.requires_grad_() for tensor in gradients]
        with torch.no_grad():
            _compare(bench, op, "fwd", f"T={T}", calls)
        if leaves:
            both = {name: partial(_both_passes, call, leaves) for name, call in calls.items()}
            _compare(bench, op, "fwd+bwd", f"T={T}", both)
    layers = 2 if bench.quick else LAYERS
    _compare(bench, "micro_batch", "fwd+bwd", f"{layers} layers", micro_batch(bench.device, layers))
    _compare(bench, "optimizer", "step", f"{layers} layers", optimizer_step(bench.device, layers))
    torch.set_num_threads(threads)


def _both_passes(call: Callable[[], Any], leaves: Sequence[Tensor]) -> None:
    result = call()
    first: Tensor = result if isinstance(result, Tensor) else next(_tensors(result))
    torch.autograd.grad(first, leaves, torch.ones_like(first), allow_unused=True)


def _compare(
    bench: Bench, op: str, pass_: str, shape: str, calls: Mapping[str, Callable[[], object]]
) -> None:
    if bench.results.keep({"impl": list(calls)[-1]}, **{"op": op, "pass": pass_}):
        return
    if time.monotonic() > bench.op_end:
        raise OutOfTime
    counts = {name: launches(call) for name, call in calls.items()}
    measured = host_ms(bench, calls, counts)
    best = min(row["ms_p50"] for name, row in measured.items() if not name.startswith(OURS))
    for name, row in measured.items():
        ratio = best / row["ms_p50"] if name.startswith(OURS) else None
        values: dict[str, Any] = {"launches": counts[name], "ratio_to_best_peer": ratio, **row}
        note = f" {counts[name]:6} launches"
        bench.add(op, pass_, name, shape, note, dtype="float32", **values)


Case = tuple[Sequence[Tensor], dict[str, Callable[[], Any]]]


def operators(device: torch.device) -> dict[str, Case]:
    """Return by name what each operator is differentiated by, and the calls that are compared."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape).to(device)

    def longs(values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, device=device)

    ids, hidden, weight, logits = longs(range(T)), draw(T, H), draw(V, H), draw(T, V)
    gate, up, scale = draw(T, H), draw(T, H), draw(H)
    length = T // SEQUENCES
    ends = longs(range(0, T + 1, length)).int()
    subtree_ends = ends[1:].repeat_interleave(length)
    q, k, v = draw(1, HEADS, T, H), draw(1, HEADS // 2, T, H), draw(1, HEADS // 2, T, H)
    old, advantages, mask = -draw(T).abs(), draw(T), longs([1] * T) > 0
    new, values, rollout = -draw(T).abs(), draw(T), -draw(T).abs()
    loss = {"response_mask": mask, "global_num_tokens": float(T)}
    correct = {"response_mask": mask, "cu_seqlens": ends, "rollout_is": "token"}
    padded, padding = draw(SEQUENCES, length, H), mask.view(SEQUENCES, length)
    packed = he.pack([padded], padding, capacity=T)
    rows = draw(T, H)
    taps, experts, counts = draw(H, 4), draw(2, V, H), longs([0, T // 2, T]).int()
    recurrence = draw(T, 1, 8), draw(T, 1, 8), draw(T, 2, 8), -draw(T, 2).square()
    table, cells = longs([[0, 0, 0, 0, 1, 1, 1, T, 0, 0, 0, 1, 0, 0, 0, 1]]).cpu(), draw(T)
    written = torch.zeros(T, device=device)

    def from_logits(x: Tensor) -> Tensor:
        return -F.cross_entropy(x, ids, reduction="none")

    def ratio_loss(log_probs: Tensor) -> Tensor:
        return -((log_probs - old).exp() * advantages).mean()

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return {
        "token_log_probs": (
            [logits],
            {OURS: lambda: he.token_log_probs(logits, ids), TORCH: lambda: from_logits(logits)},
        ),
        "cross_entropy": (
            [logits],
            {
                OURS: lambda: he.cross_entropy(logits, ids),
                TORCH: lambda: F.cross_entropy(logits, ids),
            },
        ),
        "linear_token_log_probs": (
            [hidden, weight],
            {
                OURS: lambda: he.linear_token_log_probs(hidden, weight, ids),
                TORCH: lambda: from_logits(F.linear(hidden, weight)),
            },
        ),
        "linear_cross_entropy": (
            [hidden, weight],
            {
                OURS: lambda: he.linear_cross_entropy(hidden, weight, ids),
                TORCH: lambda: F.cross_entropy(F.linear(hidden, weight), ids),
            },
        ),
        "linear_policy_loss": (
            [hidden, weight],
            {
                OURS: lambda: he.linear_policy_loss(
                    hidden, weight, ids, old_log_probs=None, advantages=advantages, **loss
                ),
                TORCH: lambda: ratio_loss(from_logits(F.linear(hidden, weight))),
            },
        ),
        "policy_loss": (
            [new],
            {
                OURS: lambda: he.policy_loss(new, old, advantages, **loss),
                TORCH: lambda: ratio_loss(new),
            },
        ),
        "value_loss": (
            [values],
            {
                OURS: lambda: he.value_loss(values, old, advantages, **loss),
                TORCH: lambda: F.mse_loss(values, advantages),
            },
        ),
        "rollout_correction": (
            [],
            {
                OURS: lambda: he.rollout_correction(old, rollout, **correct),
                TORCH: lambda: (old - rollout).exp().clamp(max=2.0),
            },
        ),
        "gae": (
            [],
            {OURS: lambda: he.gae(advantages, old, ends), TORCH: lambda: advantages.cumsum(0)},
        ),
        "group_advantage": (
            [],
            {
                OURS: lambda: he.group_advantage(advantages, ids // 4),
                TORCH: lambda: advantages - advantages.view(-1, 4).mean(1).repeat_interleave(4),
            },
        ),
        "whiten": ([], {OURS: lambda: he.whiten(old, mask), TORCH: lambda: torch.std_mean(old)}),
        "tree_attention": (
            [q, k, v],
            {OURS: lambda: he.tree_attention(q, k, v, subtree_ends), TORCH: attend},
        ),
        "rms_norm": (
            [rows, scale],
            {
                OURS: lambda: he.rms_norm(rows, scale, 1e-6),
                TORCH: lambda: F.rms_norm(rows, (H,), scale, 1e-6),
            },
        ),
        "gated_activation": (
            [gate, up],
            {OURS: lambda: he.gated_activation(gate, up), TORCH: lambda: F.silu(gate) * up},
        ),
        "grouped_linear": (
            [rows, experts],
            {
                OURS: lambda: he.grouped_linear(rows, experts, counts),
                TORCH: lambda: torch.bmm(rows.view(2, -1, H), experts.transpose(1, 2)),
            },
        ),
        "decode_linear": (
            [],
            {OURS: lambda: he.decode_linear(rows, weight), TORCH: lambda: F.linear(rows, weight)},
        ),
        "causal_conv1d": (
            [rows, taps],
            {
                OURS: lambda: he.causal_conv1d(rows, taps, cu_seqlens=ends),
                TORCH: lambda: F.conv1d(rows.t()[None], taps[:, None], padding=3, groups=H),
            },
        ),
        "linear_recurrence": (
            recurrence,
            {
                OURS: lambda: he.linear_recurrence(*recurrence, cu_seqlens=ends, delta_rule=False),
                TORCH: lambda: recurrence[0] @ (recurrence[1].mT @ recurrence[2][:, :1]),
            },
        ),
        "sample_tokens": (
            [],
            {
                OURS: lambda: he.sample_tokens(logits, ids, ids),
                TORCH: lambda: logits.softmax(-1).multinomial(1),
            },
        ),
        "pack": (
            [padded],
            {
                OURS: lambda: he.pack([padded], padding, capacity=T).values,
                TORCH: lambda: padded[padding],
            },
        ),
        "unpack": (
            [rows],
            {OURS: lambda: he.unpack(rows, packed), TORCH: lambda: rows.index_select(0, ids)},
        ),
        "strided_copy": (
            [],
            {
                OURS: lambda: he.strided_copy([cells], [written], table),
                TORCH: lambda: written.copy_(cells),
            },
        ),
    }


def _model(device: torch.device, layers: int, attention: str) -> Any:
    """Return a tiny model with the layers of Qwen2."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    sizes: dict[str, Any] = dict(hidden_size=H, intermediate_size=2 * H, vocab_size=V)
    sizes |= dict(num_hidden_layers=layers, num_attention_heads=HEADS, num_key_value_heads=2)
    config = Qwen2Config(**sizes, tie_word_embeddings=True)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(device)


class NoGraphs:
    """Captures nothing: what is left is the host's work around replays."""

    runs = 0

    def warm_up(self, work: Callable[[], Any]) -> Any:
        return work()

    def capture(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], object]]:
        return work(), lambda: None


def micro_batch(device: torch.device, layers: int) -> dict[str, Callable[[], object]]:
    """Return forward and backward of a training micro-batch; plain: transformers, padded.

    graphs: with `model.cuda_graphs`; on a CPU the graphs compute nothing.
    """
    from hybridengine.compile.decoder import GraphedDecoder
    from hybridengine.compile.graphs import CudaGraphs
    from hybridengine.model import pack_rollouts, packed_log_probs, packed_policy_loss
    from hybridengine.model.attention import ATTENTION
    from hybridengine.model.head import patch_head

    names = (ATTENTION, ATTENTION, "sdpa")
    ours, graphed, plain = (_model(device, layers, name) for name in names)
    patch_head(ours)
    patch_head(graphed)
    GraphedDecoder(graphed, CudaGraphs() if device.type == "cuda" else NoGraphs())
    length = T // SEQUENCES
    ids = torch.arange(2 * T).view(SEQUENCES, -1)
    batch = pack_rollouts([(row[:length], row[length:]) for row in ids.tolist()], device)
    ids, advantages = ids.to(device), torch.randn(T).to(device)

    def step(model: Any, loss: Callable[[], Tensor]) -> None:
        loss().backward()
        model.zero_grad()

    def log_probs() -> Tensor:
        return packed_log_probs(ours, batch)[0].mean()

    def one_pass(model: Any) -> Tensor:
        return packed_policy_loss(model, batch, old_log_probs=None, advantages=advantages)[0]

    def padded() -> Tensor:
        logits = plain(input_ids=ids, use_cache=False).logits[:, length - 1 : -1]
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, length:].flatten())

    for _ in range(3):  # as it is, before a capture, captured
        step(graphed, partial(one_pass, graphed))
    return {
        f"{OURS}_log_probs": partial(step, ours, log_probs),
        f"{OURS}_policy_loss": partial(step, ours, partial(one_pass, ours)),
        f"{OURS}_policy_loss_graphs": partial(step, graphed, partial(one_pass, graphed)),
        "transformers": partial(step, plain, padded),
    }


def optimizer_step(device: torch.device, layers: int) -> dict[str, Callable[[], object]]:
    """Return clipping and AdamW of the same model's parameters; plain: torch's, fused."""
    from hybridengine.model import Optimizer

    ours, plain = (_model(device, layers, "sdpa") for _ in range(2))
    optimizer = Optimizer(ours, lr=1e-6, total_steps=2**20)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-6, fused=True)
    parameters = [list(model.parameters()) for model in (ours, plain)]
    for parameter in (*parameters[0], *parameters[1]):
        parameter.grad = torch.ones_like(parameter)
    kept = [parameter.grad for parameter in parameters[0]]

    def step() -> None:
        optimizer.step(max_norm=1.0)
        for parameter, grad in zip(parameters[0], kept, strict=True):
            parameter.grad = grad

    def plain_step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters[1], 1.0)
        adamw.step()

    return {OURS: step, TORCH: plain_step}
