"""Score centering from logits: the recorded entries of a chunk of rows, and their gradients.

With c_v the factor of log p_v in C (policy_loss/centering.py), a = weight * advantage and δ the
indicator of the row's token y, the term a C adds a (c_v - p_v Σ c) to the gradient of z_v. The row
kernels write g' (δ_v - p_v) with g' = g + a Σ c. What is left is a c_v at the recorded entries and
-a Σ c at y: no further pass over the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _check as check
from .._per_token import row_index, segment_reduce
from ..logprob.options import RowOptions
from ..policy_loss.centering import RolloutSupport, centering_factors, expected_log_probs
from ..policy_loss.importance import ImportanceBounds
from .gradients import LogitEntries, sum_over_ranks


def check_support(
    op: str, support: RolloutSupport, token_ids: Tensor, options: RowOptions, width: int
) -> RolloutSupport:
    """Check the recorded entries of all tokens. width: of this rank's slice of the vocabulary."""
    if not isinstance(support, RolloutSupport):
        raise TypeError(f"{op}: score_centering is {support!r}; expected a RolloutSupport.")
    ids, ends, log_probs = support
    check.same_device(op, token_ids=token_ids, kept_ids=ids, rollout_log_probs=log_probs)
    sizes: check.Sizes = {"N": (token_ids.numel() + 1, "token_ids, T + 1")}
    check.shape(op, "kept_ids", ids, "K", sizes)
    check.shape(op, "log_probs of score_centering", log_probs, "K", sizes)
    check.shape(op, "cu_kept", ends, "N", sizes)
    check.floats(op, rollout_log_probs=log_probs)
    ends = check.cu_seqlens(op, ends, ids.shape[0], name="cu_kept")
    ids = check.ids(op, "kept_ids", ids)
    if check.readable(ids):
        vocab = width if options.vocab_range is None else int(options.vocab_range[1])
        outside = ((ids < 0) | (ids >= vocab)).nonzero()
        if outside.numel():
            k = int(outside[0])
            raise IndexError(
                f"{op}: kept_ids[{k}] is {int(ids[k])}, outside the vocabulary of {vocab}; "
                f"expected 0 <= id < {vocab}."
            )
    return RolloutSupport(ids, ends, log_probs.detach())


def importance_options(op: str, loss_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `score_centering` for the importance weights of a loss."""
    if loss_arguments.get("rollout_is_weights") is not None:
        raise ValueError(
            f"{op}: rollout_is_weights and score_centering are given; expected "
            "rollout_log_probs: centering needs the weights of the other entries, too."
        )
    names = ("rollout_is_threshold", "rollout_is_lower")
    bounds = {name: loss_arguments[name] for name in names if name in loss_arguments}
    has_weights = loss_arguments.get("rollout_log_probs") is not None
    return {"rollout_is": "token" if has_weights else None, **bounds}


class Centering(NamedTuple):
    """The recorded entries of all tokens, and what their gradients are multiplied by."""

    support: RolloutSupport
    scale: Tensor  # [T], weight * advantage, 0 where masked
    mask: Tensor  # bool [T]
    bounds: ImportanceBounds | None  # of the importance weights per token; None: no weights

    def of_rows(
        self,
        logits: Tensor,
        rows: slice | Tensor,
        token_ids: Tensor,
        options: RowOptions,
        row_results: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, LogitEntries]:
        """Compute C, what its gradient adds to grad_log_probs, and what is left of its gradient.

        Args:
            logits: [r, V], of the rows `rows`.
            token_ids, options, row_results: of these rows; the latter as `rows_forward` returns.
        """
        device = logits.device
        tokens, begin, end = self.entries_of(rows)
        ids, log_q = (x[begin:end] for x in (self.support.kept_ids, self.support.log_probs))
        ends = (self.support.cu_kept[tokens.start : tokens.stop + 1] - begin).to(device)
        token = row_index(ends, ids.shape[0])  # counted from tokens.start
        index = torch.arange(logits.shape[0], device=device)
        chosen = (rows if isinstance(rows, Tensor) else index + rows.start) - tokens.start
        row = torch.full((tokens.stop - tokens.start,), -1, device=device)
        row[chosen] = index
        row = row[token]
        used, row = self.mask[tokens][token] & (row >= 0), row.clamp(min=0)

        labels = torch.where(self.mask[rows], token_ids, 0)
        both, of_both = torch.cat([ids, labels]), torch.cat([row, index])
        log_p, slope = _log_probs(logits, of_both, both, options, row_results)
        log_p, log_q = (torch.where(used, x, -torch.inf) for x in (log_p[: ids.shape[0]], log_q))
        mass, factors = centering_factors(log_p, log_q, ends, token, self.bounds)
        scores = expected_log_probs(mass, log_p, ends)[chosen]
        scale = self.scale[rows].double()
        added = scale * segment_reduce(factors, ends, "sum")[chosen]
        values = torch.cat([scale[row] * factors, -added])
        values = torch.where(values != 0, values * slope, 0).float()
        local, _ = _local_ids(both, options, logits.shape[1])
        entries = LogitEntries(of_both, local, values)
        return scores.to(logits.dtype), added.to(logits.dtype), entries

    def entries_of(self, rows: slice | Tensor) -> tuple[slice, int, int]:
        """Return the tokens, and the first and last of their entries, that contain the rows.

        All of them where the host would have to wait for the numbers.
        """
        ends = self.support.cu_kept
        if isinstance(rows, slice):
            tokens = rows
        elif check.readable(rows):
            tokens = slice(int(rows[0]), int(rows[-1]) + 1)
        else:
            tokens = slice(0, ends.numel() - 1)
        if not check.readable(ends):
            return slice(0, ends.numel() - 1), 0, self.support.kept_ids.shape[0]
        return tokens, int(ends[tokens.start]), int(ends[tokens.stop])


def _local_ids(ids: Tensor, options: RowOptions, width: int) -> tuple[Tensor, Tensor]:
    """Return the columns of `ids` in this rank's slice of the vocabulary, and which are in it."""
    local = ids.long() if options.vocab_range is None else ids.long() - options.vocab_range[0]
    own = (local >= 0) & (local < width)
    return torch.where(own, local, 0), own


def _log_probs(
    logits: Tensor, row: Tensor, ids: Tensor, options: RowOptions, row_results: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Compute log p and d z / d logit of entries, float64 [K]; the latter 0 on other ranks.

    row, ids: [K]; the entry k is in row[k] of `logits`.
    """
    local, own = _local_ids(ids, options, logits.shape[1])
    x = logits[row, local].double()
    slope = torch.where(own, options.logit_scale, 0.0).double()
    if options.softcap:
        x = options.softcap * torch.tanh(x * options.logit_scale / options.softcap)
        slope = slope * (1.0 - (x / options.softcap).square())
    if options.vocab_mask is not None:
        x = torch.where(options.vocab_mask[row, local], x, -torch.inf)
    if options.group:
        x = sum_over_ranks(torch.where(own, x, 0.0), options.group)
    factor: float | Tensor = options.factor
    temperature: float | Tensor = options.temperature
    if options.temperatures is not None:
        assert isinstance(factor, Tensor)
        factor, temperature = factor.double()[row], options.temperatures.double()[row]
    row_max, log_sum = row_results[2].double()[row].unbind(1)
    return (x - row_max) * factor - log_sum, slope / temperature
