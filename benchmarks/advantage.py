"""Group advantages and GAE against verl."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks._baselines import verl_algorithms
from benchmarks._bench import OURS, Bench, rms_error
from hybridengine.kernels import gae, group_advantage, whiten

Calls = dict[str, Callable[[], Any]]


def run(bench: Bench) -> None:
    verl = verl_algorithms()
    per_response(bench, verl)
    per_token(bench, verl)


def per_response(bench: Bench, verl: Any | None) -> None:
    """One reward per response in, one advantage per response out."""
    count, size = (1024 if bench.quick else 16384), 8
    rewards = torch.rand(count, device=bench.device)
    ids = torch.arange(count, device=bench.device) // size
    exact = group_advantage(rewards.cpu().double(), ids.cpu(), backend="reference")
    implementations: Calls = {OURS: lambda: group_advantage(rewards, ids)}
    errors = {OURS: rms_error(group_advantage(rewards, ids).cpu(), exact)}
    if verl is not None:
        index, column = ids.cpu().numpy(), rewards[:, None]
        ones = torch.ones_like(column)
        for name in ("grpo", "grpo_vectorized"):
            function = verl.core_algos.get_adv_estimator_fn(name)
            label = "verl" if name == "grpo" else "verl_vectorized"
            implementations[label] = partial(verl_advantages, function, column, ones, index)
            errors[label] = rms_error(implementations[label]()[:, 0].cpu(), exact)
    bench.compare(
        "group_advantage",
        "grpo",
        f"{count} in groups of {size}",
        torch.float32,
        implementations,
        bytes_moved=count * (4 + 8 + 4),
        errors=errors,
    )


def verl_advantages(function: Callable, column: Tensor, ones: Tensor, index: Any) -> Tensor:
    return function(column.clone(), ones, index=index)[0]


def per_token(bench: Bench, verl: Any | None) -> None:
    """Rewards and values per token in, advantages and returns out."""
    batch, seqlen = (64, 128) if bench.quick else (256, 4096)
    rewards, values = (torch.randn(batch, seqlen, device=bench.device) for _ in range(2))
    ends = torch.arange(0, batch * seqlen + 1, seqlen, device=bench.device, dtype=torch.int32)
    flat_rewards, flat_values = rewards.flatten(), values.flatten()

    def ours() -> tuple[Tensor, Tensor]:
        return gae(flat_rewards, flat_values, ends, gamma=0.99, lam=0.95)

    implementations: Calls = {OURS: ours, f"{OURS} (with whitening)": lambda: whiten(ours()[0])}
    if verl is not None:
        compute = verl.core_algos.compute_gae_advantage_return
        ones = torch.ones_like(rewards)
        implementations["verl (with whitening)"] = partial(
            compute, rewards, values, ones, 0.99, 0.95
        )
    bench.compare(
        "gae",
        "forward",
        f"{batch}x{seqlen}",
        torch.float32,
        implementations,
        bytes_moved=16 * rewards.numel(),
        peak="copy",
    )
