"""Advantages: group-relative ones from one reward per response, GAE, and whitening.

`group_advantage` is one launch over rewards and group ids, in any order, with the spread to
tokens fused in; `gae` is one scan over packed sequences; `whiten` takes its statistics from all
ranks. Statistics are kept in float64 inside every backend.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _check as check
from .._backend import choose_backend, native, register_backends
from ..policy_loss.aggregation import as_mask, check_given, compute_dtype, row_ends, token_arguments
from .reference import check_finite, gae_reference, group_reference

register_backends("group_advantage", cpu=("cpp", "reference"), cuda=("cuda", "reference"))
register_backends("gae", cpu=("cpp", "reference"), cuda=("cuda", "reference"))

# The order is that of csrc/advantage/estimator.h.
GROUP_ESTIMATORS = ("grpo", "mean", "rloo", "grpo_passk", "max_mean", "opo")

_NUMBERS = (
    *check.FLOATS, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


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
    """Compute the advantage of every response over the responses to the same prompt.

    Args:
        rewards: [N] numbers, one per response; constants.
        group_ids: [N] int32 or int64, equal for the responses to one prompt; any values, negative
            ones too, any order, any group sizes. std is the unbiased one; a response alone in its
            group has mean 0 and std 1, as in verl.
        estimator: with r the reward and all statistics over its group,
            grpo         (r - mean) / (std + epsilon)        arXiv 2402.03300, section 4.1.2
            mean         r - mean (Dr. GRPO, and grpo with norm_by_std=False; arXiv 2503.20783)
            rloo         r - mean of the others              arXiv 2402.14740
            grpo_passk   the best one: (r - second best) / (std + epsilon)   arXiv 2503.19595
            max_mean     the best one: (r - mean) / (std + epsilon)
            opo          r - mean weighted by length         arXiv 2505.23585
            In grpo_passk and max_mean the others get 0 and norm_by_std=False leaves r unscaled.
        epsilon: above 0.
        lengths: [N] response lengths, for opo; not negative.
        cu_seqlens: [N + 1] int32 or int64; given, the result is spread to the tokens of the
            responses.
        response_mask: bool or 0/1, [T] beside cu_seqlens, or [N, L] without it: the result is
            spread to its tokens, masked ones get 0.
        backend: `cpp`, `cuda` or `reference`; None takes the best one. float64 rewards are always
            computed by the reference.

    Returns:
        [N], or spread the shape of response_mask; float64 for float64 rewards, else float32.
        Statistics are kept in float64.

    Raises:
        ValueError: a reward that is NaN or infinite (on the CPU the message names the row; on a
            GPU, where looking would wait for the device, its group becomes NaN), group_ids of
            another dtype, shapes or devices that do not match, cu_seqlens that does not fit (CPU;
            on a GPU it is trusted, but never followed out of the tensors), an unknown estimator.

    Example:
        >>> group_advantage(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([7, 7, -1])).tolist()
        [0.7071057558059692, -0.7071057558059692, 4.999995231628418]
    """
    op = "group_advantage"
    check_given(op, rewards=rewards, group_ids=group_ids)
    check.choice(op, "estimator", estimator, GROUP_ESTIMATORS)
    epsilon = check.number(op, "epsilon", epsilon, above=0)
    rewards, group_ids, lengths = _check_rows(rewards, group_ids, lengths)
    if estimator == "opo" and lengths is None:
        raise ValueError("group_advantage: estimator 'opo' needs lengths, one per response.")
    shape = None if response_mask is None else response_mask.shape
    cu_seqlens, response_mask = _check_spread(rewards, cu_seqlens, response_mask)
    backend = choose_backend(op, rewards.device, backend)
    if rewards.dtype == torch.float64:
        backend = "reference"
    if estimator == "grpo" and not norm_by_std:
        estimator = "mean"
    per_row, per_token = torch.ops.hybridengine.group_advantage(
        rewards,
        group_ids,
        GROUP_ESTIMATORS.index(estimator),
        norm_by_std,
        epsilon,
        lengths,
        cu_seqlens,
        response_mask,
        backend,
    )
    return per_row if shape is None else per_token.view(shape)


def _check_rows(
    rewards: Tensor, group_ids: Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What has one entry per response: checked, contiguous, in the dtypes of the operator."""
    op = "group_advantage"
    check.same_device(op, rewards=rewards, group_ids=group_ids, lengths=lengths)
    check.dtype(op, "rewards", rewards, _NUMBERS)
    group_ids = check.ids(op, "group_ids", group_ids)
    sizes: check.Sizes = {}
    check.shape(op, "rewards", rewards, "N", sizes)
    check.shape(op, "group_ids", group_ids, "N", sizes)
    rewards = rewards.detach().to(compute_dtype(rewards)).contiguous()
    if lengths is not None:
        check.dtype(op, "lengths", lengths, _NUMBERS)
        check.shape(op, "lengths", lengths, "N", sizes)
        lengths = lengths.detach().to(rewards.dtype).contiguous()
        if check.readable(lengths) and not bool(((lengths >= 0) & lengths.isfinite()).all()):
            raise ValueError(
                f"{op}: lengths has an entry that is not a length; expected 0 or more."
            )
    return rewards, group_ids.contiguous(), lengths


def _check_spread(
    rewards: Tensor, cu_seqlens: Tensor | None, response_mask: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """cu_seqlens and response_mask [T] to spread to, or neither."""
    op = "group_advantage"
    if response_mask is None:
        if cu_seqlens is not None:
            raise ValueError(f"{op}: cu_seqlens needs response_mask [T] beside it.")
        return None, None
    check.same_device(op, rewards=rewards, cu_seqlens=cu_seqlens, response_mask=response_mask)
    rows = rewards.numel()
    mask = check.mask(op, "response_mask", response_mask)
    if cu_seqlens is None:
        check.shape(op, "response_mask", mask, "N L", {"N": (rows, "rewards")})
        return row_ends(mask), mask.reshape(-1)
    check.shape(op, "response_mask", mask, "T", {})
    cu_seqlens = check.cu_seqlens(op, cu_seqlens, mask.numel(), mask)
    if cu_seqlens.numel() != rows + 1:
        raise ValueError(
            f"{op}: cu_seqlens has {cu_seqlens.numel()} entries; expected {rows + 1}, one more "
            "than there are rewards."
        )
    return cu_seqlens, mask.contiguous()


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
    """Compute generalised advantages over packed sequences (arXiv 1506.02438, eq. 16).

    advantage_t = delta_t + gamma lam advantage_{t+1}, delta_t = r_t + gamma v_{t+1} - v_t, with
    value and advantage 0 after a sequence's end. Masked tokens (tool output, say) are stepped
    over: the tokens around them are neighbours.

    Args:
        rewards: [T] numbers, one per packed token, or [B, L], whose rows are the sequences;
            constants.
        values: the same shape, floating point, or None for all zero: `returns` are then discounted
            rewards to go.
        cu_seqlens: [N + 1] int32 or int64; needed beside [T]. Tokens past its end must be masked.
        gamma, lam: from 0 to 1.
        response_mask: the same shape, bool or 0/1; masked tokens get 0, and what they hold does
            not matter.
        backend: `cpp`, `cuda` or `reference`; None takes the best one. float64 rewards are always
            computed by the reference, which is serial and reads them on the host.

    Returns:
        (advantages, returns), the shape of rewards, returns = advantages + values; not whitened.
        float64 for float64 rewards, else float32; the scan is float64 inside.

    Raises:
        ValueError: shapes, dtypes or devices that do not match, gamma or lam out of range,
            cu_seqlens that does not fit (CPU; on a GPU it is trusted, but never followed out of the
            tensors), an unmasked reward that is NaN or infinite (the message names it; on a GPU it
            spreads instead to the tokens before it).
    """
    op = "gae"
    check_given(op, rewards=rewards)
    gamma = check.number(op, "gamma", gamma, at_least=0, at_most=1)
    lam = check.number(op, "lam", lam, at_least=0, at_most=1)
    check.same_device(op, rewards=rewards, values=values)
    check.dtype(op, "rewards", rewards, _NUMBERS)
    dtype, shape = compute_dtype(rewards), rewards.shape
    tokens, cu_seqlens = token_arguments(
        op,
        {"rewards": rewards.detach().to(dtype), "values": values},
        {"response_mask": response_mask},
        cu_seqlens,
    )
    if cu_seqlens is None:
        raise ValueError("gae: rewards is [T]; give cu_seqlens, or [B, L].")
    backend = choose_backend(op, rewards.device, backend)
    if dtype == torch.float64:
        backend = "reference"
    values, mask = tokens["values"], tokens["response_mask"]
    results = torch.ops.hybridengine.gae(
        tokens["rewards"].contiguous(),
        None if values is None else values.detach().to(dtype).contiguous(),
        cu_seqlens,
        None if mask is None else mask.contiguous(),
        gamma,
        lam,
        backend,
    )
    return results[0].view(shape), results[1].view(shape)


def whiten(
    values: Tensor,
    mask: Tensor | None = None,
    *,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Compute (values - mean) / sqrt(var + epsilon), statistics over the unmasked of all ranks.

    The variance is the unbiased one. Where torch.distributed is initialised every rank of `group`
    must call this, also with nothing to whiten. Nothing waits for the GPU.

    Args:
        values: any shape, floating point; constants.
        mask: the same shape, bool or 0/1; masked entries get 0, and what they hold does not matter.
            None: all count.
        shift_mean: False adds the mean back.
        epsilon: above 0.
        group: the ranks that share statistics; None is all of them.

    Returns:
        The shape and dtype of values.

    Raises:
        ValueError: shapes, dtypes or devices that do not match, an epsilon that is not above 0.
    """
    op = "whiten"
    check_given(op, values=values)
    check.same_device(op, values=values, mask=mask)
    check.floats(op, values=values)
    epsilon = check.number(op, "epsilon", epsilon, above=0)
    if mask is not None and mask.shape != values.shape:
        raise ValueError(
            f"whiten: mask has shape {list(mask.shape)}; expected {list(values.shape)} like values."
        )
    values, mask = values.detach(), None if mask is None else check.mask(op, "mask", mask)
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
    per_row = group_reference(
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
    mask = inside & as_mask(response_mask, rewards)
    check_finite("gae", rewards, mask)
    return gae_reference(rewards, values, cu_seqlens, mask, gamma, lam)


@_gae.register_fake
def _(rewards, values, cu_seqlens, response_mask, gamma, lam, backend):
    return torch.empty_like(rewards), torch.empty_like(rewards)
