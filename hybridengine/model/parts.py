"""Parts of a packed batch: values that some layers, or the head, read beside the tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Part:
    """Values for the tokens, or for the result rows, of a packed batch.

    A part follows its batch while it is packed: `share`, `pad`, `finish`, `local`, `to`. Values
    with an entry per token override `share`, `pad` and `local`. In the forward pass of the batch,
    the model gets `arguments` inside of `context`.
    """

    def distinct_ids(self, input_ids: Tensor) -> Tensor:
        """Return token ids [T], other ones where equal tokens differ in this part."""
        return input_ids

    def share(self, token_index: Tensor, num_tokens: int) -> Part:
        """Return the part of a batch whose common prefixes are packed once.

        token_index: int32 [T], of each token among `num_tokens` packed ones.
        """
        return self

    def filler(self) -> tuple[int, int] | None:
        """Return (token id, number) of tokens of no sequence that the part needs; None: none."""
        return None

    def pad(self, padding: int) -> Part:
        """Append values for `padding` tokens of no sequence."""
        return self

    def finish(self, cu_seqlens: Tensor, subtree_ends: Tensor | None) -> Part:
        """Compute what depends on the packed sequences, after `share` and `pad`."""
        return self

    def local(self, tokens: slice, rows: Tensor) -> Part:
        """Return the values of a rank that has these of the batch's tokens and result rows."""
        return self

    def as_dummy(self) -> Part | None:
        """Return the part of a batch that counts for nothing; None: it has none."""
        return self

    def to(self, device: torch.device | str) -> Part:
        """Move the tensors that the model reads."""
        return self

    def arguments(self, position_ids: Tensor) -> Mapping[str, Any]:
        """Return keyword arguments of the model; position_ids: int64 [1, T]."""
        return {}

    def context(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return what is open while `model` computes the batch."""
        return nullcontext()


class PartSource(Protocol):
    """Values for sequences from which `pack_rollouts` and `pack_batch` make a part."""

    def select(self, sequences: Sequence[int], rows: Tensor) -> PartSource:
        """Select the values of some sequences, whose result rows are `rows`."""

    def place(self, input_ids: Tensor, cu_seqlens: Tensor) -> Part:
        """Return the part of sequences that are end to end in input_ids [T]."""


@dataclass(frozen=True)
class KeptIds(Part):
    """The vocabulary entries that truncated sampling kept for each of R tokens, end to end.

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

    def select(self, sequences: Sequence[int], rows: Tensor) -> KeptIds:
        return self.take(rows)

    def place(self, input_ids: Tensor, cu_seqlens: Tensor) -> KeptIds:
        return self

    def local(self, tokens: slice, rows: Tensor) -> KeptIds:
        return self.take(rows)

    def to(self, device: torch.device | str) -> KeptIds:
        return KeptIds(self.ids.to(device), self.cu_kept)

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
