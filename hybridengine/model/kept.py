"""Distributions over the vocabulary entries that truncated sampling kept (sampling replay)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeptIds:
    """The vocabulary entries that each of R tokens was sampled from, end to end.

    A token without entries was sampled from the full vocabulary.
    """

    ids: Tensor  # int32 [K], ascending for each token
    cu_kept: Tensor  # int64 [R + 1]: token r has ids[cu_kept[r]:cu_kept[r + 1]]

    @staticmethod
    def from_counts(ids: Tensor, counts: Tensor) -> KeptIds:
        """counts: [R], the number of entries of each token."""
        return KeptIds(ids, _ends(counts.long()))

    def take(self, rows: Tensor) -> KeptIds:
        """Select the entries of the tokens `rows`, int64 [r], in any order, with repeats."""
        counts = self.cu_kept.diff()[rows]
        cu_kept = _ends(counts)
        num_kept = int(cu_kept[-1])
        shift = self.cu_kept[rows] - cu_kept[:-1]
        index = torch.arange(num_kept, device=rows.device)
        index += shift.repeat_interleave(counts, output_size=num_kept)
        return KeptIds(self.ids[index], cu_kept)

    def filled(self, vocab_size: int) -> KeptIds:
        """Give tokens without entries all `vocab_size` of them."""
        counts = self.cu_kept.diff()
        if bool((counts > 0).all()):
            return self
        full = torch.arange(vocab_size, dtype=self.ids.dtype, device=self.ids.device)
        both = KeptIds(
            torch.cat([self.ids, full]), torch.cat([self.cu_kept, self.cu_kept[-1:] + vocab_size])
        )
        rows = torch.arange(counts.numel(), device=counts.device)
        return both.take(rows.where(counts > 0, counts.numel()))

    def vocab_mask(self, vocab_size: int) -> Tensor:
        """Return bool [R, vocab_size], True for the entries of each token."""
        kept = self.filled(vocab_size)
        num_tokens = kept.cu_kept.numel() - 1
        rows = torch.arange(num_tokens, device=kept.ids.device)
        mask = torch.zeros(num_tokens, vocab_size, dtype=torch.bool, device=kept.ids.device)
        mask[rows.repeat_interleave(kept.cu_kept.diff()), kept.ids.long()] = True
        return mask


def _ends(counts: Tensor) -> Tensor:
    """[R] -> [R + 1], from 0."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
