"""group_advantage: the advantage of every response over the responses to the same prompt.

One launch over rewards and group ids in any order, spread to tokens in the same launch. Statistics
are float64 inside every backend.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _check as check
from .._backend import choose_backend, native, register_backends
from .._library import custom_op
from .._per_token import compute_dtype, row_cu_seqlens
from .gae import check_finite

register_backends("group_advantage", cpu=("cpp", "reference"), cuda=("cuda", "reference"))

# In the order of Estimator in csrc/advantage/estimator.h.
GROUP_ESTIMATORS = ("grpo", "mean", "rloo", "grpo_passk", "max_mean", "opo", "grpo_loo")


def group_advantage(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    estimator: str = "grpo",
    norm_by_std: bool = True,
    epsilon: float = 1e-6,
    lengths: Tensor | None = None,
    valid: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    response_mask: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Compute the advantage of every response over the responses to the same prompt.

    Args:
        rewards: [N] numbers, one per response; constants.
        group_ids: [N] int32 or int64, equal for the responses to one prompt; any values in any
            order, groups of any size.
        estimator: with r the reward and statistics over its group (std is the unbiased one; a group
            of one has mean 0 and std 1, as in verl),
            grpo         (r - mean) / (std + epsilon)        arXiv 2402.03300, section 4.1.2
            mean         r - mean (Dr. GRPO, and grpo with norm_by_std=False; arXiv 2503.20783)
            rloo         r - mean of the others              arXiv 2402.14740
            grpo_passk   the best one: (r - second best) / (std + epsilon)   arXiv 2503.19595
            max_mean     the best one: (r - mean) / (std + epsilon)
            opo          r - mean weighted by length         arXiv 2505.23585
            grpo_loo     (r - mean of the others) / (std of the others + epsilon), without the
                         division where that std is 0 (NeMo-RL's leave_one_out_baseline)
            In grpo_passk and max_mean the other responses get 0.
        norm_by_std: False leaves out the division by std + epsilon.
        epsilon: above 0.
        lengths: [N] response lengths, for opo; at least 0.
        valid: [N] bool or 0/1; responses with 0 (truncated, failed) are left out of the statistics
            and get 0, and their rewards may hold anything. None: all.
        cu_seqlens: [N + 1] int32 or int64, the tokens of each response; needs response_mask [T].
        response_mask: bool or 0/1, [T] with cu_seqlens or [N, L] without it: the result is copied
            to the tokens of each response, 0 where masked.
        backend: `cpp`, `cuda` or `reference`; None takes the best one. float64 rewards are always
            computed by the reference.

    Returns:
        [N], or the shape of response_mask if given; float64 for float64 rewards, else float32.

    Raises:
        ValueError: a reward that is NaN or infinite (CPU; on a GPU, where reading would wait for
            the device, its group becomes NaN), group_ids of another dtype, shapes or devices that
            do not match, a wrong cu_seqlens (CPU; on a GPU results are then wrong, but no access
            leaves the tensors), an unknown estimator.

    Examples:
        >>> group_advantage(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([7, 7, -1])).tolist()
        [0.7071057558059692, -0.7071057558059692, 4.999995231628418]
    """
    op = "group_advantage"
    check.not_none(op, rewards=rewards, group_ids=group_ids)
    check.choice(op, "estimator", estimator, GROUP_ESTIMATORS)
    epsilon = check.number(op, "epsilon", epsilon, above=0)
    rewards, group_ids, lengths = _check_rows(rewards, group_ids, lengths)
    if valid is not None:
        check.same_device(op, rewards=rewards, valid=valid)
        check.shape(op, "valid", valid, "N", {"N": (rewards.numel(), "rewards")})
        valid = check.mask(op, "valid", valid)
        rewards, group_ids = _set_apart(rewards, group_ids, valid)
    if estimator == "opo" and lengths is None:
        raise ValueError("group_advantage: estimator 'opo' needs lengths, one per response.")
    shape = None if response_mask is None else response_mask.shape
    cu_seqlens, response_mask = _check_spread(rewards, cu_seqlens, response_mask)
    backend = choose_backend(op, rewards.device, backend, rewards.dtype)
    if estimator == "grpo" and not norm_by_std:
        estimator = "mean"
    per_row, per_token = _group_advantage(
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
    if shape is None:
        return per_row if valid is None else torch.where(valid, per_row, 0)
    return per_token.view(shape)


def _set_apart(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return rewards and ids with the invalid responses in a group of their own, of rewards 0."""
    ordered, order = group_ids.sort()
    is_first = torch.ones_like(valid)
    is_first[1:] = ordered[1:] != ordered[:-1]
    numbers = torch.empty_like(group_ids)
    numbers[order] = is_first.cumsum(0)  # 1 for the lowest id
    return torch.where(valid, rewards, 0), torch.where(valid, numbers, 0)


def _check_rows(
    rewards: Tensor, group_ids: Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check the arguments with one entry per response and convert them to the operator's dtypes."""
    op = "group_advantage"
    check.same_device(op, rewards=rewards, group_ids=group_ids, lengths=lengths)
    check.dtype(op, "rewards", rewards, check.NUMBERS)
    group_ids = check.ids(op, "group_ids", group_ids)
    sizes: check.Sizes = {}
    check.shape(op, "rewards", rewards, "N", sizes)
    check.shape(op, "group_ids", group_ids, "N", sizes)
    rewards = rewards.detach().to(compute_dtype(rewards)).contiguous()
    if lengths is not None:
        check.dtype(op, "lengths", lengths, check.NUMBERS)
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
    """Return (cu_seqlens, response_mask [T]) of the tokens to spread to, or (None, None)."""
    op = "group_advantage"
    if response_mask is None:
        if cu_seqlens is not None:
            raise ValueError(f"{op}: cu_seqlens needs response_mask [T]; give both.")
        return None, None
    check.same_device(op, rewards=rewards, cu_seqlens=cu_seqlens, response_mask=response_mask)
    rows = rewards.numel()
    mask = check.mask(op, "response_mask", response_mask)
    if cu_seqlens is None:
        check.shape(op, "response_mask", mask, "N L", {"N": (rows, "rewards")})
        return row_cu_seqlens(mask), mask.reshape(-1)
    check.shape(op, "response_mask", mask, "T", {})
    cu_seqlens = check.cu_seqlens(op, cu_seqlens, mask.numel(), mask)
    if cu_seqlens.numel() != rows + 1:
        raise ValueError(
            f"{op}: cu_seqlens has {cu_seqlens.numel()} entries; expected {rows + 1}, one more "
            "than there are rewards."
        )
    return cu_seqlens, mask.contiguous()


def _reference(
    rewards: Tensor,
    group_ids: Tensor,
    estimator: str,
    norm_by_std: bool,
    epsilon: float,
    lengths: Tensor | None,
) -> Tensor:
    """Compute the advantages one group at a time."""
    check_finite("group_advantage", rewards, torch.ones_like(rewards, dtype=torch.bool))
    advantages = torch.zeros_like(rewards)
    for group in group_ids.unique():
        rows = (group_ids == group).nonzero().squeeze(1)
        r = rewards[rows].double()
        n = r.numel()
        mean = r.mean() if n > 1 else r.new_zeros(())
        scale = (r.std() if n > 1 else 1) + epsilon if norm_by_std else 1
        if estimator in ("grpo", "mean"):
            result = (r - mean) / (scale if estimator == "grpo" else 1)
        elif estimator == "rloo":
            result = r - (r.sum() - r) / max(n - 1, 1)
        elif estimator == "grpo_loo":
            result = _leave_one_out(r, norm_by_std, epsilon)
        elif estimator == "opo":
            assert lengths is not None
            length = lengths[rows].double()
            total = length.sum()
            result = r - ((length * r).sum() / total if n > 1 and total > 0 else 0)
        else:
            best = int(r.argmax())
            rest = torch.cat([r[:best], r[best + 1 :]])
            second = rest.max() if n > 1 else 0
            baseline = second if estimator == "grpo_passk" else mean
            result = torch.zeros_like(r)
            result[best] = (r[best] - baseline) / scale
        advantages[rows] = result.to(rewards.dtype)
    return advantages


def _leave_one_out(r: Tensor, norm_by_std: bool, epsilon: float) -> Tensor:
    """Compute grpo_loo for the rewards of one group; a group of one keeps its reward."""
    n = r.numel()
    result = r - (r.sum() - r) / max(n - 1, 1)
    if not norm_by_std or n < 3:
        return result
    d = r - r[0]
    squares = (d - d.mean()).square()
    variance = (squares.sum() - squares * (n / (n - 1))) / (n - 2)
    for i in (int(d.argmin()), int(d.argmax())):  # which can have nearly all of the squares
        others = torch.cat([r[:i], r[i + 1 :]])
        variance[i] = (others - others[0]).var()
    std = variance.clamp(min=0).sqrt()
    return torch.where(std == 0, result, result / (std + epsilon))


@custom_op("hybridengine::group_advantage", mutates_args=())
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
    """Compute the advantages per response [N] and per token [T] (empty without cu_seqlens)."""
    num_tokens = 0 if response_mask is None else response_mask.numel()
    if backend != "reference":
        options = (estimator, norm_by_std, epsilon)
        segments = (lengths, cu_seqlens, response_mask, num_tokens)
        return native().group_advantage(rewards, group_ids, *options, *segments)
    per_row = _reference(
        rewards, group_ids, GROUP_ESTIMATORS[estimator], norm_by_std, epsilon, lengths
    )
    per_token = rewards.new_zeros(num_tokens)
    if cu_seqlens is not None and response_mask is not None:
        spread = torch.repeat_interleave(per_row, cu_seqlens.diff())
        per_token[: spread.numel()] = torch.where(response_mask[: spread.numel()], spread, 0)
    return per_row, per_token


@_group_advantage.register_fake
def _(rewards: Tensor, response_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    num_tokens = 0 if response_mask is None else response_mask.numel()
    return torch.empty_like(rewards), rewards.new_empty(num_tokens)
