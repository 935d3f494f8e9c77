"""Distributions over the vocabulary entries that truncated sampling kept (sampling replay)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeptIds:
    """The vocabulary entries that each of R tokens was sampled from, end to end.

    A token without entries was sampled from the full vocabulary. The ends are on the CPU: sizes of
    results are known without waiting for a device.
    """

    ids: Tensor  # int32 [K], ascending for each token
    cu_kept: Tensor  # int64 [R + 1], on the CPU: token r has ids[cu_kept[r]:cu_kept[r + 1]]

    @staticmethod
    def from_counts(ids: Tensor, counts: Tensor) -> KeptIds:
        """counts: [R] on the CPU, the number of entries of each token."""
        return KeptIds(ids, _ends(counts.long()))

    def take(self, rows: Tensor) -> KeptIds:
        """Select the entries of the tokens `rows`, int64 [r] on the CPU, in any order."""
        counts = self.cu_kept.diff()[rows]
        cu_kept = _ends(counts)
        shift = self.cu_kept[rows] - cu_kept[:-1]
        index = self._per_entry(shift, counts)
        index += torch.arange(index.numel(), device=index.device)
        return KeptIds(self.ids[index], cu_kept)

    def filled(self, vocab_size: int) -> KeptIds:
        """Give tokens without entries all `vocab_size` of them."""
        counts = self.cu_kept.diff()
        if (counts > 0).all():
            return self
        full = torch.arange(vocab_size, dtype=self.ids.dtype, device=self.ids.device)
        both = KeptIds(
            torch.cat([self.ids, full]), torch.cat([self.cu_kept, self.cu_kept[-1:] + vocab_size])
        )
        rows = torch.arange(counts.numel())
        return both.take(rows.where(counts > 0, counts.numel()))

    def vocab_mask(self, vocab_size: int) -> Tensor:
        """Return bool [R, vocab_size], True for the entries of each token."""
        kept = self.filled(vocab_size)
        num_tokens = kept.cu_kept.numel() - 1
        mask = torch.zeros(num_tokens, vocab_size, dtype=torch.bool, device=kept.ids.device)
        rows = kept._per_entry(torch.arange(num_tokens), kept.cu_kept.diff())
        mask[rows, kept.ids.long()] = True
        return mask

    def _per_entry(self, per_token: Tensor, counts: Tensor) -> Tensor:
        """Repeat a number per token for each of its entries, on the device: [R] -> [K]."""
        size, device = int(counts.sum()), self.ids.device
        return per_token.to(device).repeat_interleave(counts.to(device), output_size=size)


def _ends(counts: Tensor) -> Tensor:
    """[R] -> [R + 1], from 0."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
