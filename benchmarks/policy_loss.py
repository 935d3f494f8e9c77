"""Policy loss and value loss, forward and backward, against plain PyTorch and verl."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks._baselines import verl_algorithms
from benchmarks._bench import OURS, Bench, rms_error
from hybridengine.kernels import LOSS_MODES, policy_loss, value_loss

COMPILED_MODES = ("ppo_clip", "gspo")  # compiling takes seconds for each
VERL_MODES = {"ppo_clip": "vanilla", "gspo": "gspo", "cispo": "cispo", "gmpo": "geo_mean"}


def run(bench: Bench) -> None:
    verl = verl_algorithms()
    for batch, seqlen in shapes(bench):
        generator = torch.Generator(bench.device).manual_seed(0)
        draw = partial(torch.randn, batch, seqlen, generator=generator, device=bench.device)
        old = -draw().abs() - 0.05
        log_probs = old + draw() * 0.3
        advantages = draw()[:, :1].expand(batch, seqlen).contiguous()
        mask = torch.rand(batch, seqlen, generator=generator, device=bench.device) < 0.9
        ends = torch.arange(0, old.numel() + 1, seqlen, device=bench.device, dtype=torch.int32)
        for mode in VERL_MODES if bench.quick else LOSS_MODES:
            compare(bench, mode, log_probs, old, advantages, mask, ends, verl)
        if bench.gpu is not None:
            compare_values(bench, log_probs, old, advantages, mask)


def compare_values(
    bench: Bench, values: Tensor, old: Tensor, returns: Tensor, mask: Tensor
) -> None:
    values, old, returns, mask = (x.flatten() for x in (values, old, returns, mask))
    given: dict[str, Any] = {"response_mask": mask, "global_num_tokens": int(mask.sum())}

    eager = partial(value_loss, backend="reference", **given)

    def step(loss_of: Callable[..., Any], dtype: torch.dtype = torch.float32) -> Tensor:
        leaf = values.detach().to(dtype).requires_grad_()
        return torch.autograd.grad(loss_of(leaf, old.to(dtype), returns.to(dtype))[0], leaf)[0]

    functions: dict[str, Callable[..., Any]] = {
        OURS: partial(value_loss, **given),
        "eager": eager,
        "compile": torch.compile(eager),
    }
    exact = step(eager, torch.float64)
    errors = {name: rms_error(step(functions[name]), exact) for name in (OURS, "eager")}
    bench.compare(
        "value_loss",
        "fwd+bwd",
        f"{values.numel()} tokens",
        torch.float32,
        {name: partial(step, function) for name, function in functions.items()},
        bytes_moved=values.numel() * (3 * 4 + 1 + 4),
        peak="read",
        errors=errors,
    )


def shapes(bench: Bench) -> list[tuple[int, int]]:
    if bench.quick:
        return [(16, 256)]
    # A GPU also with a micro-batch, whose time is that of launches.
    return [(1024, 1024), (16, 1024)] if bench.gpu is not None else [(1024, 1024)]


def compare(
    bench: Bench,
    mode: str,
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ends: Tensor,
    verl: Any | None,
) -> None:
    """All tensors are [B, L], as verl takes them; ours run on their packed form."""
    packed = [x.flatten() for x in (log_probs, old, advantages, mask)]
    agg = "seq-mean-token-mean" if mode in ("gspo", "gmpo", "sapo") else "token-mean"
    options = {
        "response_mask": packed[3],
        "loss_mode": mode,
        "selected": torch.rand(packed[0].shape, device=bench.device) < 0.01,
        "loss_agg_mode": agg,
        "cu_seqlens": ends,
        "global_num_tokens": int(mask.sum()),
        "global_num_seqs": mask.size(0),
    }
    leaf = packed[0].clone().requires_grad_()

    def ours() -> Tensor:
        loss, _ = policy_loss(leaf, packed[1], packed[2], **options)
        return torch.autograd.grad(loss, leaf)[0]

    def eager(dtype: torch.dtype = torch.float32) -> Tensor:
        x = packed[0].to(dtype, copy=True).requires_grad_()
        constants = (packed[1].to(dtype), packed[2].to(dtype))
        loss, _ = policy_loss(x, *constants, **options, backend="reference")
        return torch.autograd.grad(loss, x)[0]

    implementations: dict[str, Callable[[], Tensor]] = {OURS: ours, "eager": eager}
    exact = eager(torch.float64)
    errors = {name: rms_error(call(), exact) for name, call in implementations.items()}
    if verl is not None and mode in VERL_MODES:
        implementations["verl"] = verl_step(verl, mode, log_probs, old, advantages, mask, agg)
    if bench.gpu is not None and mode in COMPILED_MODES:
        compiled = torch.compile(partial(policy_loss, backend="reference", **options))

        def compiled_step() -> Tensor:
            loss, _ = compiled(leaf, packed[1], packed[2])
            return torch.autograd.grad(loss, leaf)[0]

        implementations["compile"] = compiled_step
    count = log_probs.numel()
    bytes_moved = count * (3 * 4 + 1 + 4)  # three inputs and the mask in, the gradient out
    bench.compare(
        "policy_loss",
        "fwd+bwd",
        f"{mode}, {count} tokens",
        torch.float32,
        implementations,
        bytes_moved=bytes_moved,
        peak="read",
        errors=errors,
    )


def verl_step(
    verl: Any, mode: str, log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, agg: str
) -> Callable[[], Tensor]:
    config = verl.ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    function = verl.core_algos.get_policy_loss_fn(VERL_MODES[mode])
    floats = mask.float()

    def step() -> Tensor:
        x = log_probs.detach().clone().requires_grad_()
        loss, _ = function(old, x, advantages, floats, agg, config)
        return torch.autograd.grad(loss, x)[0]

    return step
