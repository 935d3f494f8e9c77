"""Group advantages and GAE against verl: the released package where it is installed."""

from __future__ import annotations

import torch
from hybridengine.kernels import gae, group_advantage, whiten

from benchmarks.frame import OURS, Bench, rms_error


def verl():
    try:
        from benchmarks import _verl
    except ImportError as error:
        print(f"# verl left out: {error}")
        return None
    return _verl.core_algos


def run(bench: Bench) -> None:
    group(bench, verl())
    token_level(bench, verl())


def group(bench: Bench, core) -> None:
    """One reward per response in, one advantage per response out."""
    count, size = (1024 if bench.quick else 16384), 8
    rewards = torch.rand(count, device=bench.device)
    ids = torch.arange(count, device=bench.device) // size
    exact = group_advantage(rewards.cpu().double(), ids.cpu(), backend="reference")
    implementations = {OURS: lambda: group_advantage(rewards, ids)}
    errors = {OURS: rms_error(group_advantage(rewards, ids).cpu(), exact)}
    if core is not None:
        index, column = ids.cpu().numpy(), rewards[:, None]
        ones = torch.ones_like(column)
        for name in ("grpo", "grpo_vectorized"):
            function = core.get_adv_estimator_fn(name)

            def call(function=function):
                return function(column.clone(), ones, index=index)[0]

            label = "verl" if name == "grpo" else "verl_vectorized"
            implementations[label] = call
            errors[label] = rms_error(call()[:, 0].cpu(), exact)
    bench.compare(
        "group_advantage",
        "grpo",
        f"{count} in groups of {size}",
        torch.float32,
        implementations,
        bytes_moved=count * (4 + 8 + 4),
        errors=errors,
    )


def token_level(bench: Bench, core) -> None:
    batch, seqlen = (64, 128) if bench.quick else (256, 4096)
    rewards, values = (torch.randn(batch, seqlen, device=bench.device) for _ in range(2))
    ends = torch.arange(0, batch * seqlen + 1, seqlen, device=bench.device, dtype=torch.int32)
    flat_rewards, flat_values = rewards.flatten(), values.flatten()

    def ours():
        return gae(flat_rewards, flat_values, ends, gamma=0.99, lam=0.95)

    implementations = {OURS: ours, f"{OURS} (with whitening)": lambda: whiten(ours()[0])}
    if core is not None:
        ones = torch.ones_like(rewards)
        implementations["verl (with whitening)"] = lambda: core.compute_gae_advantage_return(
            rewards, values, ones, 0.99, 0.95
        )
    bench.compare(
        "gae",
        "forward",
        f"{batch}x{seqlen}",
        torch.float32,
        implementations,
        bytes_moved=16 * rewards.numel(),
        limit="copy",
    )
