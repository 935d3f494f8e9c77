"""Advantages: group-relative ones from one reward per response, GAE, and whitening.

`group_advantage` is one launch over rewards and group ids, in any order, with the spread to
tokens fused in; `gae` is one scan over packed sequences; `whiten` takes its statistics from all
ranks. Statistics are kept in float64 inside every backend.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ._backend import choose_backend, native, register_backends

register_backends("group_advantage", cpu=("cpp", "reference"), cuda=("cuda", "reference"))
register_backends("gae", cpu=("cpp", "reference"), cuda=("cuda", "reference"))

# The order is that of csrc/advantage/estimator.h.
GROUP_ESTIMATORS = ("grpo", "mean", "rloo", "grpo_passk", "max_mean", "opo")


def group_advantage(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    estimator: str = "grpo",
    norm_by_std: bool = True,
    epsilon: float = 1e-6,
    lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    response_mask: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Advantage of every response over the responses to the same prompt.

    Args:
        rewards: [N] float, one per response.
        group_ids: [N] integers, equal for the responses to one prompt; any values, any order, any
            group sizes. std is the unbiased one; a response alone in its group has mean 0 and
            std 1, as in verl.
        estimator: with r the reward and all statistics over its group,
            grpo         (r - mean) / (std + epsilon)        arXiv 2402.03300, section 4.1.2
            mean         r - mean (Dr. GRPO, and grpo with norm_by_std=False; arXiv 2503.20783)
            rloo         r - mean of the others              arXiv 2402.14740
            grpo_passk   the best one: (r - second best) / (std + epsilon)   arXiv 2503.19595
            max_mean     the best one: (r - mean) / (std + epsilon)
            opo          r - mean weighted by length         arXiv 2505.23585
            In grpo_passk and max_mean the others get 0 and norm_by_std=False leaves r unscaled.
        lengths: [N] response lengths, for opo.
        cu_seqlens: [N + 1] int32; given, the result is spread to the tokens of the responses.
        response_mask: [T] bool beside cu_seqlens; masked tokens get 0. Its size sets T.

    Returns:
        [N], or [T] with cu_seqlens; float32 (the reference backend keeps float64).

    Raises:
        ValueError: a reward that is NaN or infinite (on the CPU the message names the row; on a
            GPU, where looking would wait for the device, its group becomes NaN), shapes that do
            not match, an unknown estimator.

    Example:
        >>> group_advantage(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([7, 7, -1])).tolist()
        [0.7071057558059692, -0.7071057558059692, 4.999995231628418]
    """
    if estimator not in GROUP_ESTIMATORS:
        raise ValueError(
            f"group_advantage: unknown estimator {estimator!r}; expected one of "
            f"{', '.join(GROUP_ESTIMATORS)}"
        )
    if rewards.dim() != 1 or group_ids.shape != rewards.shape:
        raise ValueError(
            f"group_advantage: rewards has shape {list(rewards.shape)} and group_ids "
            f"{list(group_ids.shape)}; expected both [N]"
        )
    if estimator == "opo" and lengths is None:
        raise ValueError("group_advantage: estimator 'opo' needs lengths, one per response")
    if cu_seqlens is not None and response_mask is None:
        raise ValueError("group_advantage: cu_seqlens needs response_mask [T] beside it")
    backend = choose_backend("group_advantage", rewards.device, backend)
    rewards = rewards.detach().contiguous()
    if backend != "reference" or not rewards.is_floating_point():
        rewards = rewards.float()
    if estimator == "grpo" and not norm_by_std:
        estimator = "mean"
    per_row, per_token = torch.ops.hybridengine.group_advantage(
        rewards,
        group_ids.long().contiguous(),
        GROUP_ESTIMATORS.index(estimator),
        norm_by_std,
        epsilon,
        None if lengths is None else lengths.to(rewards.dtype).contiguous(),
        None if cu_seqlens is None else cu_seqlens.contiguous(),
        None if response_mask is None else response_mask.bool().contiguous(),
        backend,
    )
    return per_row if cu_seqlens is None else per_token


def gae(
    rewards: Tensor,
    values: Tensor | None,
    cu_seqlens: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    response_mask: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over packed sequences (arXiv 1506.02438, eq. 16).

    advantage_t = delta_t + gamma lam advantage_{t+1}, delta_t = r_t + gamma v_{t+1} - v_t, with
    value and advantage 0 after a sequence's end. Masked tokens (tool output, say) are stepped
    over: the tokens around them are neighbours.

    Args:
        rewards: [T] float, per token.
        values: [T] float, or None for all zero: `returns` are then discounted rewards to go.
        cu_seqlens: [N + 1] int32. Tokens past cu_seqlens[-1] get 0.
        response_mask: [T] bool; masked tokens get 0.

    Returns:
        (advantages, returns), [T] float32, returns = advantages + values; not whitened.

    Raises:
        ValueError: shapes that do not match, cu_seqlens not ascending or past T (CPU), an unmasked
            reward that is NaN or infinite (the message names it; on a GPU it spreads instead to
            the tokens before it).
    """
    for name, tensor in (("values", values), ("response_mask", response_mask)):
        if tensor is not None and tensor.shape != rewards.shape:
            raise ValueError(
                f"gae: {name} has shape {list(tensor.shape)}; expected {list(rewards.shape)} "
                "like rewards"
            )
    backend = choose_backend("gae", rewards.device, backend)
    dtype = rewards.dtype if backend == "reference" else torch.float32
    return torch.ops.hybridengine.gae(
        rewards.detach().to(dtype).contiguous(),
        None if values is None else values.detach().to(dtype).contiguous(),
        cu_seqlens.contiguous(),
        None if response_mask is None else response_mask.bool().contiguous(),
        gamma,
        lam,
        backend,
    )


def whiten(
    values: Tensor,
    mask: Tensor | None = None,
    *,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """(values - mean) / sqrt(var + epsilon), the statistics taken over the unmasked of all ranks.

    The variance is the unbiased one. Where torch.distributed is initialised every rank of `group`
    must call this, also with nothing to whiten. Nothing waits for the GPU.

    Args:
        values: any shape, float.
        mask: same shape, bool; masked places get 0. None: all count.
        shift_mean: False adds the mean back.
        group: the ranks that share statistics; None is all of them.
    """
    values, mask = values.detach(), None if mask is None else mask.bool()
    kept = values if mask is None else torch.where(mask, values, 0)
    everything = torch.full((), values.numel(), dtype=torch.float64, device=values.device)
    count = everything if mask is None else mask.sum().double()
    mean = kept.sum(dtype=torch.float64) / count.clamp(min=1)
    near = mean.to(values.dtype)  # deviations from it are exact to rounding; `off` makes up for it
    off = mean - near.double()
    deviations = kept - near
    if mask is not None:
        deviations.mul_(mask)
    square = torch.linalg.vector_norm(deviations, dtype=torch.float64).square() - count * off**2
    if dist.is_available() and dist.is_initialized():
        count, mean, square = _merge(torch.stack([count, mean, square]), group)
    scale = (square.clamp(min=0) / (count - 1).clamp(min=1) + epsilon).rsqrt()
    offset = (near.double() - mean) * scale + (0 if shift_mean else mean)
    whitened = deviations.mul_(scale.to(values.dtype)).add_(offset.to(values.dtype))
    return whitened if mask is None else whitened.mul_(mask)


def _merge(local: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor]:
    """(count, mean, sum of squared deviations) of all ranks, from one gather (Chan et al. 1979)."""
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, local, group=group)
    counts, means, squares = torch.stack(parts).unbind(1)
    count = counts.sum()
    mean = (counts * means).sum() / count.clamp(min=1)
    return count, mean, squares.sum() + (counts * (means - mean).square()).sum()


@torch.library.custom_op("hybridengine::group_advantage", mutates_args=())
def _group_advantage(
    rewards: Tensor,
    group_ids: Tensor,
    estimator: int,
    norm_by_std: bool,
    epsilon: float,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    response_mask: Tensor | None,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """Advantages per response [N], and per token [T] (empty without cu_seqlens)."""
    num_tokens = 0 if cu_seqlens is None else response_mask.numel()
    if backend != "reference":
        token_mask = None if cu_seqlens is None else response_mask
        return native().group_advantage(
            rewards,
            group_ids,
            estimator,
            norm_by_std,
            epsilon,
            lengths,
            cu_seqlens,
            token_mask,
            num_tokens,
        )
    per_row = _group_reference(
        rewards, group_ids, GROUP_ESTIMATORS[estimator], norm_by_std, epsilon, lengths
    )
    per_token = rewards.new_zeros(num_tokens)
    if cu_seqlens is not None:
        spread = torch.repeat_interleave(per_row, cu_seqlens.diff())
        per_token[: spread.numel()] = torch.where(response_mask[: spread.numel()], spread, 0)
    return per_row, per_token


@_group_advantage.register_fake
def _(rewards, group_ids, estimator, norm_by_std, epsilon, lengths, cu_seqlens, mask, backend):
    num_tokens = 0 if cu_seqlens is None else mask.numel()
    return torch.empty_like(rewards), rewards.new_empty(num_tokens)


def _check_finite(op: str, rewards: Tensor, mask: Tensor) -> None:
    bad = (mask & ~rewards.isfinite()).nonzero()
    if bad.numel():
        row = int(bad[0])
        raise ValueError(
            f"{op}: rewards[{row}] is {rewards[row]}; expected finite rewards: check what the "
            "reward function returned for it"
        )


def _group_reference(rewards, group_ids, estimator, norm_by_std, epsilon, lengths):
    """The specification, a group at a time."""
    _check_finite("group_advantage", rewards, torch.ones_like(rewards, dtype=torch.bool))
    advantages = torch.zeros_like(rewards)
    for group in group_ids.unique():
        rows = (group_ids == group).nonzero().squeeze(1)
        r = rewards[rows]
        n = r.numel()
        mean = r.mean() if n > 1 else r.new_zeros(())
        scale = (r.std() if n > 1 else 1) + epsilon if norm_by_std else 1
        if estimator in ("grpo", "mean"):
            advantages[rows] = (r - mean) / (scale if estimator == "grpo" else 1)
        elif estimator == "rloo":
            advantages[rows] = r - (r.sum() - r) / max(n - 1, 1)
        elif estimator == "opo":
            total = lengths[rows].sum()
            baseline = (lengths[rows] * r).sum() / total if n > 1 and total > 0 else 0
            advantages[rows] = r - baseline
        else:
            best = int(r.argmax())
            rest = torch.cat([r[:best], r[best + 1 :]])
            second = rest.max() if n > 1 else 0
            baseline = second if estimator == "grpo_passk" else mean
            advantages[rows[best]] = (r[best] - baseline) / scale
    return advantages


@torch.library.custom_op("hybridengine::gae", mutates_args=())
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
    _check_finite("gae", rewards, inside if response_mask is None else inside & response_mask)
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        next_value = next_advantage = 0
        for t in range(end - 1, begin - 1, -1):
            if response_mask is not None and not response_mask[t]:
                continue
            value = 0 if values is None else values[t]
            delta = rewards[t] + gamma * next_value - value
            next_value, next_advantage = value, delta + gamma * lam * next_advantage
            advantages[t], returns[t] = next_advantage, next_advantage + value
    return advantages, returns


@_gae.register_fake
def _(rewards, values, cu_seqlens, response_mask, gamma, lam, backend):
    return torch.empty_like(rewards), torch.empty_like(rewards)
