"""What corrections leave of a policy gradient where the rollout engine is deliberately wrong.

A softmax policy over 512 tokens, from 64 states of a recurrence. Tokens come from an engine with
one error; 10% of the tokens of a state are rewarded, and advantages are rewards minus their mean
over all states. Nothing is sampled: expectations are sums over the vocabulary, in float64.

engine_kl: KL(engine || policy), nats: what a run logs as rollout_corr/kl.
drift: |gradient of a constant advantage of 1| / |true gradient of the advantages|; 0 on policy.
bias: |expected gradient - true gradient| / |true gradient|.
variance: of the gradient of one token, relative to that of sampling from the policy itself.
kl: KL(first policy || last), nats, after 200 steps of SGD along the expected gradient of a constant
advantage, with an engine made anew of the weights at every step; 0 on policy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks._bench import OURS, Bench
from hybridengine.kernels import score_centering
from hybridengine.kernels.policy_loss.importance import ImportanceBounds

STATES, WIDTH, VOCAB, RECORDED = 64, 64, 512, 32
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Estimator(NamedTuple):
    """bounds: of importance weights per token; None: no weights."""

    bounds: tuple[float, float | None] | None
    centered: bool


ESTIMATORS = {
    "no correction": Estimator(None, False),
    "weights up to 2": Estimator((2.0, None), False),
    "weights in [0.5, 2], others 0": Estimator((2.0, 0.5), False),
    "centering": Estimator(None, True),
    "weights up to 2, centering": Estimator((2.0, None), True),
    "weights in [0.5, 2], others 0, centering": Estimator((2.0, 0.5), True),
}


def _fp8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 448
    return (weight / scale).float().to(torch.float8_e4m3fn).double() * scale


def _fp4(weight: Tensor) -> Tensor:
    """Round to E2M1 with a scale per 16 entries of a row."""
    blocks = weight.unflatten(1, (-1, 16))
    scale = blocks.abs().amax(2, keepdim=True) / 6
    grid = torch.tensor(_E2M1, dtype=weight.dtype)
    nearest = torch.bucketize(blocks.abs() / scale, (grid[1:] + grid[:-1]) / 2)
    return (grid[nearest] * blocks.sign() * scale).flatten(1)


@cache
def states(dtype: torch.dtype) -> Tensor:
    """Return s_t = 0.98 s_{t-1} + x_t, [STATES, WIDTH], with a state of `dtype`."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, STATES, WIDTH, generator=generator, dtype=torch.float64)
    state = inputs.new_zeros(STATES, WIDTH)
    for x in inputs:
        state = (0.98 * state + x).to(dtype).double()
    return state / state.norm(dim=1, keepdim=True)


# The logits of an engine, from the weights of the policy.
ENGINES: dict[str, Callable[[Tensor], Tensor]] = {
    "the policy itself": lambda weight: states(torch.float64) @ weight.t(),
    "bfloat16 state": lambda weight: states(torch.bfloat16) @ weight.t(),
    "FP8 weights": lambda weight: states(torch.float64) @ _fp8(weight).t(),
    "logits 5% too large": lambda weight: 1.05 * (states(torch.float64) @ weight.t()),
    "FP4 weights": lambda weight: states(torch.float64) @ _fp4(weight).t(),
}


def run(bench: Bench) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = 3 * torch.randn(VOCAB, WIDTH, generator=generator, dtype=torch.float64)
    rewards = (torch.rand(STATES, VOCAB, generator=generator) < 0.1).double()
    for engine in ENGINES:
        for name, estimator in ESTIMATORS.items():
            result = measure(
                weight, rewards, ENGINES[engine], estimator, 20 if bench.quick else 200
            )
            note = ", ".join(f"{key} {value:.2g}" for key, value in result.items())
            shape = f"{STATES} x {VOCAB}, {RECORDED} recorded"
            bench.add(
                "score_centering",
                engine,
                OURS if estimator.centered else "weights",
                shape,
                dtype="float64",
                note=f"  {name}: {note}",
                estimator=name,
                **result,
            )


def measure(
    weight: Tensor, rewards: Tensor, engine: Callable[[Tensor], Tensor], used: Estimator, steps: int
) -> dict[str, float]:
    hidden = states(torch.float64)
    log_p, log_q = (hidden @ weight.t()).log_softmax(1), engine(weight).log_softmax(1)
    p = log_p.exp()
    advantages = rewards - (p * rewards).sum(1).mean()
    true, on_policy = moments(log_p, log_p, advantages, Estimator(None, False))
    mean, variance = moments(log_p, log_q, advantages, used)
    drift, _ = moments(log_p, log_q, torch.ones_like(advantages), used)
    trained = weight.clone()
    for _ in range(steps):
        now = (hidden @ trained.t()).log_softmax(1)
        update, _ = moments(now, engine(trained).log_softmax(1), torch.ones_like(advantages), used)
        trained += update.t() @ hidden
    last = (hidden @ trained.t()).log_softmax(1)
    return {
        "engine_kl": (log_q.exp() * (log_q - log_p)).sum(1).mean().item(),
        "drift": (drift.norm() / true.norm()).item(),
        "bias": ((mean - true).norm() / true.norm()).item(),
        "variance": (variance / on_policy).item(),
        "kl": (p * (log_p - last)).sum(1).mean().item(),
    }


def moments(
    log_p: Tensor, log_q: Tensor, advantages: Tensor, used: Estimator
) -> tuple[Tensor, Tensor]:
    """Return the mean over the engine's tokens of the gradient by the logits, and its variance.

    [STATES, VOCAB], and the sum over the logits averaged over the states. The gradient of a sampled
    token y is A_y (w_y (e_y - p) - c) with c the gradient of score_centering.
    """
    p, q = log_p.exp(), log_q.exp()
    weights = torch.ones_like(p)
    if used.bounds is not None:
        weights, _ = ImportanceBounds(*used.bounds).weights(log_p - log_q)
    center = centers(log_p, log_q, used) if used.centered else torch.zeros_like(p)
    a, w = advantages, weights
    scaled = q * a * w
    mean = scaled - p * scaled.sum(1, keepdim=True) - center * (q * a).sum(1, keepdim=True)
    # |w (e_y - p) - c|^2, summed over the logits for every y
    square = w * w * (1 - 2 * p + (p * p).sum(1, keepdim=True)) + (center * center).sum(
        1, keepdim=True
    )
    square = square - 2 * w * (center - (p * center).sum(1, keepdim=True))
    second = (q * a * a * square).sum(1)
    return mean, (second - (mean * mean).sum(1)).mean()


def centers(log_p: Tensor, log_q: Tensor, used: Estimator) -> Tensor:
    """Return the gradient of score_centering by the logits, from the recorded entries."""
    ids = log_q.topk(RECORDED).indices.sort(1).values
    logits = log_p.clone().requires_grad_()
    options: dict[str, Any] = {}
    if used.bounds is not None:
        upper, lower = used.bounds
        options = {"rollout_is": "token", "rollout_is_threshold": upper, "rollout_is_lower": lower}
    kept = logits.log_softmax(1).gather(1, ids).flatten()
    ends = torch.arange(0, ids.numel() + 1, RECORDED)
    scores = score_centering(kept, log_q.gather(1, ids).flatten(), ends, **options)
    return torch.autograd.grad(scores.sum(), logits)[0]
