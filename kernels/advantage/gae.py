"""gae: generalised advantage estimation, one scan over packed sequences."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from .. import _check as check
from .._backend import choose_backend, native, register_backends
from .._library import custom_op
from .._per_token import as_mask, compute_dtype, token_arguments

register_backends("gae", cpu=("cpp", "reference"), cuda=("cuda", "reference"))


def gae(
    rewards: Tensor,
    values: Tensor | None,
    cu_seqlens: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    response_mask: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantages and returns (arXiv 1506.02438, eq. 16).

    advantage_t = delta_t + gamma lam advantage_{t+1}, delta_t = r_t + gamma v_{t+1} - v_t, with
    value and advantage 0 after the end of a sequence. Masked tokens (tool output, say) are skipped:
    t + 1 is the next unmasked token.

    Args:
        rewards: [T] numbers, one per packed token, or [B, L], whose rows are the sequences;
            constants.
        values: the same shape, floating point, or None for zeros: `returns` are then the discounted
            rewards to go.
        cu_seqlens: [N + 1] int32 or int64; needed with [T]. Tokens past its end must be masked.
        gamma, lam: from 0 to 1.
        response_mask: the same shape, bool or 0/1; masked tokens get 0, and what they hold does
            not matter.
        backend: `cpp`, `cuda` or `reference`; None takes the best one. float64 rewards are always
            computed by the reference, which is serial and reads them on the host.

    Returns:
        (advantages, returns), the shape of rewards, returns = advantages + values; not whitened.
        float64 for float64 rewards, else float32; the scan is float64 inside.

    Raises:
        ValueError: shapes, dtypes or devices that do not match, gamma or lam out of range, a wrong
            cu_seqlens (CPU; on a GPU results are then wrong, but no access leaves the tensors), an
            unmasked reward that is NaN or infinite (CPU; on a GPU the tokens before it become NaN
            or infinite).
    """
    op = "gae"
    check.not_none(op, rewards=rewards)
    gamma = check.number(op, "gamma", gamma, at_least=0, at_most=1)
    lam = check.number(op, "lam", lam, at_least=0, at_most=1)
    check.same_device(op, rewards=rewards, values=values)
    check.dtype(op, "rewards", rewards, check.NUMBERS)
    dtype, shape = compute_dtype(rewards), rewards.shape
    tokens, cu_seqlens = token_arguments(
        op,
        {"rewards": rewards.detach().to(dtype), "values": values},
        {"response_mask": response_mask},
        cu_seqlens,
    )
    if cu_seqlens is None:
        raise ValueError("gae: rewards is [T]; give cu_seqlens, or [B, L].")
    backend = choose_backend(op, rewards.device, backend, rewards.dtype)
    values, mask = tokens.get("values"), tokens.get("response_mask")
    results = _gae(
        tokens["rewards"].contiguous(),
        None if values is None else values.detach().to(dtype).contiguous(),
        cu_seqlens,
        None if mask is None else mask.contiguous(),
        gamma,
        lam,
        backend,
    )
    return results[0].view(shape), results[1].view(shape)


def check_finite(op: str, rewards: Tensor, mask: Tensor) -> None:
    """Raise ValueError naming the first unmasked reward that is NaN or infinite."""
    bad = (mask & ~rewards.isfinite()).nonzero()
    if bad.numel():
        row = int(bad[0])
        raise ValueError(
            f"{op}: rewards[{row}] is {rewards[row]}; expected finite rewards: check what the "
            "reward function returned for it"
        )


def _reference(
    rewards: Tensor,
    values: Tensor | None,
    cu_seqlens: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns one token at a time, in Python floats."""
    reward, unmasked = rewards.tolist(), mask.tolist()
    value = [0.0] * len(reward) if values is None else values.tolist()
    advantages, returns = [0.0] * len(reward), [0.0] * len(reward)
    for begin, end in pairwise(cu_seqlens.tolist()):
        next_value = next_advantage = 0.0
        for t in range(end - 1, begin - 1, -1):
            if unmasked[t]:
                delta = reward[t] + gamma * next_value - value[t]
                next_value, next_advantage = value[t], delta + gamma * lam * next_advantage
                advantages[t], returns[t] = next_advantage, next_advantage + next_value
    return rewards.new_tensor(advantages), rewards.new_tensor(returns)


@custom_op("hybridengine::gae", mutates_args=())
def _gae(
    rewards: Tensor,
    values: Tensor | None,
    cu_seqlens: Tensor,
    response_mask: Tensor | None,
    gamma: float,
    lam: float,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    if backend != "reference":
        return native().gae(rewards, values, cu_seqlens, response_mask, gamma, lam)
    inside = torch.arange(rewards.numel(), device=rewards.device) < cu_seqlens[-1]
    mask = inside & as_mask(response_mask, rewards)
    check_finite("gae", rewards, mask)
    return _reference(rewards, values, cu_seqlens, mask, gamma, lam)


@_gae.register_fake
def _(rewards: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(rewards), torch.empty_like(rewards)
