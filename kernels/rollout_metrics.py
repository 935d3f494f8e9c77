"""rollout_metrics: how far the rollout engine is from the training policy, in verl's metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _check as check
from ._per_token import TokenSequences, as_mask, compute_dtype, token_arguments, zero_masked
from .policy_loss.terms import MAX_LOG_RATIO, log_ratio
from .rollout_correction.reference import MAX_TERM


def rollout_metrics(
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    response_mask: Tensor | None = None,
    rollout_is: str | None = None,
    rollout_is_threshold: float = 2.0,
    rollout_is_lower: float | None = None,
) -> dict[str, Tensor]:
    """Compute verl's further metrics of a rollout correction, under verl's names.

    Means over tokens and over the sequences that have one, of this call: give it the whole batch.
    Those that add up over micro-batches are returned by `rollout_correction`.

    Args:
        old_log_probs, rollout_log_probs, cu_seqlens, response_mask: as in `rollout_correction`.
        rollout_is, rollout_is_threshold, rollout_is_lower: likewise; None leaves out the metrics of
            the weights. Without a lower bound those below 1 / threshold are counted as low.

    Returns:
        0-d float64 tensors on the device. Of perplexities (exp of minus the mean log-prob of a
        sequence): training_ppl, training_log_ppl, rollout_ppl, rollout_log_ppl, ppl_ratio,
        log_ppl_diff, log_ppl_abs_diff, log_ppl_diff_max, log_ppl_diff_min; chi2_seq. Of the
        weights: rollout_is_{mean, std, max, min, eff_sample_size, ratio_fraction_high,
        ratio_fraction_low} and, of their means per sequence, rollout_is_seq_{mean, std, max, min,
        max_deviation, fraction_high, fraction_low}. NaN where there is no token.

    Raises:
        ValueError: as `rollout_correction`.
    """
    op = "rollout_metrics"
    check.not_none(op, old_log_probs=old_log_probs, rollout_log_probs=rollout_log_probs)
    if rollout_is is not None:
        check.choice(op, "rollout_is", rollout_is, ("token", "sequence"))
    upper = check.number(op, "rollout_is_threshold", rollout_is_threshold, above=0)
    if rollout_is_lower is not None:
        check.number(op, "rollout_is_lower", rollout_is_lower, above=0)
        check.ordered(op, "rollout_is_lower", rollout_is_lower, "rollout_is_threshold", upper)
    tokens, cu_seqlens = token_arguments(
        op,
        {"old_log_probs": old_log_probs.detach(), "rollout_log_probs": rollout_log_probs.detach()},
        {"response_mask": response_mask},
        cu_seqlens,
    )
    if cu_seqlens is None:
        raise ValueError(f"{op}: old_log_probs is [T]; give cu_seqlens, or [B, L].")
    mask = as_mask(tokens.get("response_mask"), tokens["old_log_probs"])
    old, rollout = (
        zero_masked(tokens[name].to(compute_dtype(old_log_probs)), mask).double()
        for name in ("old_log_probs", "rollout_log_probs")
    )
    sequences = _Sequences(cu_seqlens, mask)
    log_rho = log_ratio(old, rollout)
    metrics = _perplexities(sequences.mean(old), sequences.mean(rollout), sequences)
    total = sequences.total(log_rho.clamp(-MAX_TERM, MAX_TERM))
    total = total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    metrics["chi2_seq"] = sequences.over(torch.expm1(2 * total))
    if rollout_is is not None:
        raw = log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        if rollout_is == "sequence":
            raw = total[sequences.ids]
        metrics |= _weight_metrics(raw.exp(), rollout_is, upper, rollout_is_lower, sequences)
    return metrics


class _Sequences:
    """Sums and means per sequence, [N + 1] with one for tokens of none, and over sequences."""

    def __init__(self, cu_seqlens: Tensor, mask: Tensor) -> None:
        self.ids, self.lengths = TokenSequences.of(cu_seqlens, mask)
        self.mask = mask
        self.valid = self.lengths > 0
        self.valid[-1] = False
        self.count = self.valid.sum()

    def total(self, values: Tensor) -> Tensor:
        sums = torch.zeros(self.lengths.shape, dtype=values.dtype, device=values.device)
        return sums.index_add(0, self.ids, zero_masked(values, self.mask))

    def mean(self, values: Tensor) -> Tensor:
        return self.total(values) / self.lengths.clamp(min=1)

    def over(self, values: Tensor) -> Tensor:
        return zero_masked(values, self.valid).sum() / self.count

    def extreme(self, values: Tensor, sign: int) -> Tensor:
        return sign * torch.where(self.valid, sign * values, -torch.inf).amax()

    def std(self, values: Tensor) -> Tensor:
        squares = zero_masked((values - self.over(values)).square(), self.valid).sum()
        return (squares / (self.count - 1).clamp(min=1)).sqrt()


def _perplexities(old: Tensor, rollout: Tensor, sequences: _Sequences) -> dict[str, Tensor]:
    """Compute the metrics of mean log-probs per sequence."""
    difference = rollout - old
    return {
        "training_ppl": sequences.over((-old).exp()),
        "training_log_ppl": sequences.over(-old),
        "rollout_ppl": sequences.over((-rollout).exp()),
        "rollout_log_ppl": sequences.over(-rollout),
        "ppl_ratio": sequences.over(difference.exp()),
        "log_ppl_diff": sequences.over(difference),
        "log_ppl_abs_diff": sequences.over(difference.abs()),
        "log_ppl_diff_max": sequences.extreme(difference, 1),
        "log_ppl_diff_min": sequences.extreme(difference, -1),
    }


def _weight_metrics(
    raw: Tensor, rollout_is: str, upper: float, lower: float | None, sequences: _Sequences
) -> dict[str, Tensor]:
    """Compute the metrics of weights per token, given before they are bounded."""
    mask, low = sequences.mask, 1 / upper if lower is None else lower
    weights = raw.clamp(max=upper)
    if lower is not None:
        weights = torch.where((raw >= lower) & (raw <= upper), raw, 0)
    count = mask.sum()

    def mean(values: Tensor) -> Tensor:
        return zero_masked(values, mask).sum(dtype=torch.float64) / count

    def extreme(sign: int) -> Tensor:
        candidates = torch.where(mask, sign * of, -torch.inf)
        return sign * torch.cat([candidates, candidates.new_full((1,), -torch.inf)]).amax()

    by_sequence = rollout_is == "sequence"
    of = raw if by_sequence else weights  # verl's extremes of sequence weights are before bounds
    fraction = (lambda x: sequences.over(sequences.mean(x))) if by_sequence else mean
    high, below = (raw > upper).double(), (raw < low).double()
    per_sequence, raw_sequence = sequences.mean(weights), sequences.mean(raw)
    average, square = mean(weights), mean(weights.square())
    return {
        "rollout_is_mean": average,
        "rollout_is_std": (square - average.square()).clamp(min=0).sqrt(),
        "rollout_is_max": extreme(1),
        "rollout_is_min": extreme(-1),
        "rollout_is_eff_sample_size": average.square() / square,
        "rollout_is_ratio_fraction_high": fraction(high),
        "rollout_is_ratio_fraction_low": fraction(below),
        "rollout_is_seq_mean": sequences.over(per_sequence),
        "rollout_is_seq_std": sequences.std(per_sequence),
        "rollout_is_seq_max": sequences.extreme(per_sequence, 1),
        "rollout_is_seq_min": sequences.extreme(per_sequence, -1),
        "rollout_is_seq_max_deviation": sequences.extreme((per_sequence - 1).abs(), 1),
        "rollout_is_seq_fraction_high": sequences.over((raw_sequence > upper).double()),
        "rollout_is_seq_fraction_low": sequences.over((raw_sequence < low).double()),
    }
