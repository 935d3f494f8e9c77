"""Policy loss, forward and backward, against plain PyTorch, torch.compile and verl."""

from __future__ import annotations

import torch
from hybridengine.kernels import LOSS_MODES, policy_loss

from benchmarks.advantage import verl
from benchmarks.frame import OURS, Bench, rms_error

MODES = {"ppo_clip": "vanilla", "gspo": "gspo", "cispo": "cispo", "gmpo": "geo_mean"}


def run(bench: Bench) -> None:
    batch, seqlen = (16, 256) if bench.quick else (1024, 1024)
    generator = torch.Generator(bench.device).manual_seed(0)

    def normal(scale):
        noise = torch.randn(batch, seqlen, generator=generator, device=bench.device)
        return noise * scale

    old = -normal(1).abs() - 0.05
    log_probs = old + normal(0.3)
    advantages = normal(1)[:, :1].expand(batch, seqlen).contiguous()
    mask = torch.rand(batch, seqlen, generator=generator, device=bench.device) < 0.9
    ends = torch.arange(0, old.numel() + 1, seqlen, device=bench.device, dtype=torch.int32)
    for mode in LOSS_MODES if not bench.quick else MODES:
        compare(bench, mode, log_probs, old, advantages, mask, ends)


def compare(bench, mode, log_probs, old, advantages, mask, ends) -> None:
    flat = [x.flatten() for x in (log_probs, old, advantages, mask)]
    selected = torch.rand(flat[0].shape, device=bench.device) < 0.01
    agg = "seq-mean-token-mean" if mode in ("gspo", "gmpo", "sapo") else "token-mean"
    tokens = int(mask.sum())

    def step(backend, dtype=torch.float32):
        x = flat[0].to(dtype, copy=True).requires_grad_()
        loss, _ = policy_loss(
            *(x, flat[1].to(dtype), flat[2].to(dtype)),
            response_mask=flat[3],
            loss_mode=mode,
            selected=selected,
            loss_agg_mode=agg,
            cu_seqlens=ends,
            global_num_tokens=tokens,
            global_num_seqs=mask.size(0),
            backend=backend,
        )
        return torch.autograd.grad(loss, x)[0]

    x = flat[0].clone().requires_grad_()

    def ours():
        loss, _ = policy_loss(
            *(x, flat[1], flat[2]),
            response_mask=flat[3],
            loss_mode=mode,
            selected=selected,
            loss_agg_mode=agg,
            cu_seqlens=ends,
            global_num_tokens=tokens,
            global_num_seqs=mask.size(0),
        )
        return torch.autograd.grad(loss, x)[0]

    implementations = {OURS: ours, "eager": lambda: step("reference")}
    exact = step("reference", torch.float64)
    errors = {name: rms_error(call(), exact) for name, call in implementations.items()}
    core = verl() if mode in MODES else None
    if core is not None:
        implementations["verl"] = verl_step(core, mode, log_probs, old, advantages, mask, agg)
    count = log_probs.numel()
    bench.compare(
        "policy_loss",
        "fwd+bwd",
        f"{mode}, {count} tokens",
        torch.float32,
        implementations,
        bytes_moved=count * (3 * 4 + 1 + 4),  # three inputs and the mask in, the gradient out
        limit="read",
        errors=errors,
    )


def verl_step(core, mode, log_probs, old, advantages, mask, agg):
    from benchmarks._verl import ActorConfig

    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1)
    function = core.get_policy_loss_fn(MODES[mode])
    floats = mask.float()

    def step():
        x = log_probs.detach().clone().requires_grad_()
        loss, _ = function(old, x, advantages, floats, agg, config)
        return torch.autograd.grad(loss, x)[0]

    return step
