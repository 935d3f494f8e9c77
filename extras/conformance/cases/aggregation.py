"""One number from many tokens: micro-batches, ranks, masks with holes, rejected responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from hybridengine.conformance.case import Case, with_gradient

Split = Sequence[Sequence[Sequence[int]]]  # rank -> micro-batch -> rows

MASK = torch.tensor(
    [[1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 1, 0], [1, 1, 1, 0, 0, 0]]
).bool()
_generator = torch.Generator().manual_seed(57)


def _normal(scale: float) -> Tensor:
    return scale * torch.randn(4, 6, generator=_generator, dtype=torch.float64)


OLD = -1.5 + _normal(0.4)
NEW = OLD + _normal(0.3)
REF = OLD + _normal(0.4)
ADVANTAGES = torch.tensor([1.2, -0.7, 0.4, -1.5], dtype=torch.float64)
BATCH: dict[str, Any] = {"log_probs": NEW, "old": OLD, "advantages": ADVANTAGES, "mask": MASK}
ONE: Split = (((0, 1, 2, 3),),)


@dataclass(frozen=True)
class PolicyLoss:
    """The inputs of the operation `policy_loss`; tensors are [B, L], `advantages` [B].

    split: the rows of each micro-batch of each rank.
    low, high: the ratio is clipped to [1 - low, 1 + high].
    dual_clip: for advantages below 0 the loss is at most -dual_clip A.
    max_length: the constant of `seq-mean-token-sum-norm`.
    ref, kl_coef, kl_times_ratio: a k3 term against `ref`, times the ratio if asked.
    weights: of the rollout engine's samples, on the policy term.
    """

    log_probs: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    aggregation: str
    split: Split = ONE
    mode: str = "ppo"
    low: float = 0.2
    high: float = 0.2
    dual_clip: float | None = None
    max_length: int | None = None
    ref: Tensor | None = None
    kl_coef: float = 0.0
    kl_times_ratio: bool = False
    weights: Tensor | None = None

    def rows(self, rows: Sequence[int]) -> Self:
        """Return these rows, in float32."""
        given = {name: x[list(rows)] for name, x in vars(self).items() if isinstance(x, Tensor)}
        part: Any = {n: x if n == "mask" else x.float() for n, x in given.items()}
        return replace(self, **part)

    def over_ranks(
        self, loss: Callable[[Tensor, Self], Tensor], combine: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return [loss, gradient]: micro-batches add up, `combine` makes one of the ranks' losses.

        loss: of the log-probs and the other inputs of a micro-batch.
        """

        def total(x: Tensor) -> Tensor:
            parts = [[loss(x[list(r)], self.rows(r)) for r in rank] for rank in self.split]
            return combine(torch.stack([torch.stack(rank).sum() for rank in parts]))

        return with_gradient(total, self.log_probs.float())


def aggregate(
    terms: Tensor, mask: Tensor, aggregation: str, max_length: int | None = None
) -> Tensor:
    """The loss of a batch from its terms [B, L]; sequences without a token do not count."""
    terms, lengths = terms.where(mask, 0), mask.sum(1)
    num_seqs = (lengths > 0).sum()
    if aggregation == "token-mean":
        return terms.sum() / mask.sum()
    if aggregation == "seq-mean-token-sum":
        return terms.sum() / num_seqs
    if aggregation == "seq-mean-token-mean":
        return (terms.sum(1) / lengths.clamp(min=1)).sum() / num_seqs
    assert aggregation == "seq-mean-token-sum-norm" and max_length is not None
    return terms.sum() / (num_seqs * max_length)


def ppo(log_probs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """-min(r A, clip(r) A), [B, L]."""
    ratio, a = (log_probs - old).exp(), advantages[:, None]
    return -torch.min(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def _clipped(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    aggregation: str,
    split: Split = ONE,
    max_length: int | None = None,
) -> Tensor:
    return with_gradient(
        lambda x: aggregate(ppo(x, old, advantages, 0.2, 0.2), mask, aggregation, max_length),
        log_probs,
    )


def _mean_of_parts(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    aggregation: str,
    split: Split,
    max_length: int | None = None,
) -> Tensor:
    """Every micro-batch divides by its own count; the parts are averaged."""
    parts = [rows for rank in split for rows in rank]

    def loss(x: Tensor) -> Tensor:
        terms = ppo(x, old, advantages, 0.2, 0.2)
        each = [aggregate(terms[p], mask[p], aggregation, max_length) for p in map(list, parts)]
        return torch.stack(each).mean()

    return with_gradient(loss, log_probs)


def _sum_not_mean(log_probs: Tensor, split: Split, **inputs: Any) -> Tensor:
    """The gradient of a global mean, divided once more by the number of ranks."""
    return _clipped(log_probs, **inputs) / len(split)


def _with_rejected(
    log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, aggregation: str
) -> Tensor:
    """All rows are counted, those without a token too."""
    good = _clipped(log_probs, old, advantages, mask, aggregation)
    return good * (mask.any(1).sum() / len(mask))


def _one_per_rejected(
    log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, aggregation: str
) -> Tensor:
    good = _clipped(log_probs, old, advantages, mask, aggregation)
    return good * (mask.sum() / mask.sum(1).clamp(min=1).sum())


def _unmasked(
    log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, aggregation: str
) -> Tensor:
    """The numerator has all tokens."""
    return with_gradient(lambda x: ppo(x, old, advantages, 0.2, 0.2).sum() / mask.sum(), log_probs)


def _as_prefix(
    log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, aggregation: str
) -> Tensor:
    """A mask with holes is taken for a length."""
    prefix = torch.arange(mask.shape[1]) < mask.sum(1)[:, None]
    return _clipped(log_probs, old, advantages, prefix, aggregation)


def _over_width(
    log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, **options: Any
) -> Tensor:
    """Dr. GRPO's constant is the width to which this batch was padded."""
    return _clipped(log_probs, old, advantages, mask, **options | {"max_length": mask.shape[1]})


def _no_seq_mean(
    log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, **options: Any
) -> Tensor:
    return _clipped(log_probs, old, advantages, mask, **options) * len(mask)


def _multiplied(
    log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, aggregation: str
) -> Tensor:
    """inf * 0 in float32."""
    ratio = (log_probs - old).float().exp()
    loss = (-ratio * advantages.float()[:, None] * mask).sum() / mask.sum()
    return loss.double().expand(1 + log_probs.numel())


def _value(
    values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float, split: Split = ONE
) -> Tensor:
    def loss(v: Tensor) -> Tensor:
        clipped = old + (v - old).clamp(-clip, clip)
        terms = torch.max((v - returns).square(), (clipped - returns).square()) / 2
        return aggregate(terms, mask, "token-mean")

    return with_gradient(loss, values)


def _value_parts(
    values: Tensor, old: Tensor, returns: Tensor, mask: Tensor, clip: float, split: Split
) -> Tensor:
    """The sum of micro-batches that divide by their own counts."""
    out = torch.zeros(1 + values.numel(), dtype=torch.float64)
    for rows in (list(rows) for rank in split for rows in rank):
        part = torch.zeros_like(mask)
        part[rows] = mask[rows]
        out += _value(values, old, returns, part, clip)
    return out


_TWO: Split = [[[0, 1], [2, 3]]]
_RANKS: Split = [[[0, 1]], [[2, 3]]]
_UNEVEN: Split = [[[0], [1]], [[2], [3]]]
_REJECTED = MASK & torch.tensor([1, 0, 1, 1]).bool()[:, None]
_FAR = OLD.clone()
_FAR[2, 3] -= 200  # a masked token between unmasked ones

CASES = (
    Case(
        "token-mean does not depend on micro-batches",
        "policy_loss",
        {**BATCH, "aggregation": "token-mean", "split": _TWO},
        _clipped,
        _mean_of_parts,
        "https://github.com/verl-project/verl/issues/5625",
        "Every micro-batch divided by its own number of tokens and was weighted by its rows.",
    ),
    Case(
        "token-mean does not depend on the split over ranks",
        "policy_loss",
        {**BATCH, "aggregation": "token-mean", "split": _RANKS},
        _clipped,
        _mean_of_parts,
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/2562",
        "Ranks divided by their own numbers of tokens, and their gradients were averaged.",
    ),
    Case(
        "averaging over ranks does not shrink a global mean",
        "policy_loss",
        {**BATCH, "aggregation": "token-mean", "split": _UNEVEN},
        _clipped,
        _sum_not_mean,
        "https://github.com/verl-project/verl-SpeCo/pull/29",
        "The loss had the global denominator, and DDP's average divided by the ranks once more.",
    ),
    Case(
        "seq-mean-token-mean does not depend on ranks and micro-batches",
        "policy_loss",
        {**BATCH, "aggregation": "seq-mean-token-mean", "split": _UNEVEN},
        _clipped,
        _sum_not_mean,
        "https://github.com/verl-project/verl/pull/906",
        "Accumulation was right for one aggregation mode only.",
    ),
    Case(
        "Dr. GRPO divides by a constant, not by the width of the batch",
        "policy_loss",
        {**BATCH, "aggregation": "seq-mean-token-sum-norm", "max_length": 16},
        _clipped,
        _over_width,
        "https://github.com/verl-project/verl/pull/5366",
        "The divisor was the width to which a batch was padded.",
    ),
    Case(
        "Dr. GRPO takes the mean over sequences",
        "policy_loss",
        {**BATCH, "aggregation": "seq-mean-token-sum-norm", "max_length": 6, "split": _TWO},
        _clipped,
        _no_seq_mean,
        "https://github.com/verl-project/verl/issues/3741",
        "The sum over the rows of a micro-batch made the loss grow with its size.",
    ),
    Case(
        "seq-mean-token-sum is not divided by lengths",
        "policy_loss",
        {**BATCH, "aggregation": "seq-mean-token-sum"},
        _clipped,
        lambda **inputs: _clipped(**inputs | {"aggregation": "seq-mean-token-mean"}),
        "https://github.com/verl-project/verl/issues/1233",
        "The documentation divided both sequence modes by the lengths.",
    ),
    Case(
        "a rejected response is not in the mean over sequences",
        "policy_loss",
        {**BATCH, "mask": _REJECTED, "aggregation": "seq-mean-token-mean"},
        _clipped,
        _with_rejected,
        "https://github.com/verl-project/verl/pull/3915",
        "Responses without a token left were in the denominator, so that rejection shrank the "
        "gradient.",
        {
            "trl": "`grpo` is documented as a mean over all completions of the batch",
            "verl": "agg_loss divides by the documented `global_batch_size`, all rows of the batch",
            "liger": "it is documented as TRL's loss, whose `grpo` counts all rows",
        },
    ),
    Case(
        "a rejected response is not in the mean over tokens",
        "policy_loss",
        {**BATCH, "mask": _REJECTED, "aggregation": "token-mean"},
        _clipped,
        _one_per_rejected,
        "https://github.com/radixark/miles/pull/2796",
        "Every fully masked response added 1 to the number of tokens.",
    ),
    Case(
        "masked tokens are in no numerator",
        "policy_loss",
        {**BATCH, "aggregation": "token-mean"},
        _clipped,
        _unmasked,
        "https://github.com/alibaba/ROLL/pull/444",
        "The sum ran over all tokens, the count over unmasked ones.",
    ),
    Case(
        "a mask may have holes",
        "policy_loss",
        {**BATCH, "aggregation": "seq-mean-token-mean"},
        _clipped,
        _as_prefix,
        "https://github.com/huggingface/trl/pull/4975",
        "One of two paths of a loss ignored the mask of tool output inside completions.",
    ),
    Case(
        "a masked token with a ratio that overflows does not matter",
        "policy_loss",
        {**BATCH, "old": _FAR, "aggregation": "token-mean"},
        _clipped,
        _multiplied,
        "https://github.com/NVIDIA-NeMo/RL/pull/4120",
        "A log-ratio of 200 at a masked token is infinite in float32, and inf times 0 is NaN.",
    ),
    Case(
        "the value loss does not depend on micro-batches",
        "value_loss",
        {"values": NEW, "old": OLD, "returns": REF, "mask": MASK, "clip": 0.2, "split": _TWO},
        _value,
        _value_parts,
        "https://github.com/verl-project/verl/pull/6957",
        "The critic's gradient grew with the number of micro-batches; the actor's did not.",
    ),
)
