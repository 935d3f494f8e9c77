"""Sequences in a paged cache, and what `tree_attention` gives their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridengine.kernels import paged_attention, tree_attention, write_kv_cache


@dataclass
class Sequences:
    lengths: list[int]
    qkv: list[Tensor]  # [T, H, D], [T, H_kv, D], [T, H_kv, D_v]
    sinks: Tensor | None = None  # [H]

    @classmethod
    def random(
        cls,
        lengths: list[int],
        heads: tuple[int, int] = (6, 2),
        dims: tuple[int, int] = (32, 32),
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        sinks: bool = False,
    ) -> Sequences:
        generator = torch.Generator().manual_seed(seed)
        shapes = (heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])
        tokens = sum(lengths)
        draw = [torch.randn(tokens, *shape, generator=generator).to(dtype) for shape in shapes]
        drawn = torch.randn(heads[0], generator=generator) * 3 if sinks else None
        return cls(lengths, draw, drawn)

    def to(self, device: str) -> Sequences:
        sinks = None if self.sinks is None else self.sinks.to(device)
        return Sequences(self.lengths, [x.to(device) for x in self.qkv], sinks)

    def rows(self, sequence: int) -> slice:
        begin = sum(self.lengths[:sequence])
        return slice(begin, begin + self.lengths[sequence])


def packed(case: Sequences, window_size: int | None = None, **options: Any) -> Tensor:
    """The trainer's attention, of all sequences in one row."""
    lengths, device = torch.tensor(case.lengths), case.qkv[0].device
    ends = lengths.cumsum(0).repeat_interleave(lengths).to(device)
    positions = torch.cat([torch.arange(length) for length in case.lengths]).to(device)
    options = {"window_size": window_size, "batch_invariant": True, **options}
    return tree_attention(*case.qkv, ends, positions, sinks=case.sinks, **options)


class Cache:
    """A cache of NaN, in which sequences take blocks at random as they grow."""

    def __init__(
        self, case: Sequences, block_size: int = 16, seed: int = 0, fill: float = torch.nan
    ):
        self._case, self._size = case, block_size
        self.cached = [0] * len(case.lengths)
        most = max(-(-length // block_size) for length in case.lengths)
        count = len(case.lengths) * most
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        _, key, value = case.qkv
        self._device = key.device
        self.table = order.int().view(-1, most).to(self._device)
        width = key.shape[2] + value.shape[2]
        shape = (count, key.shape[1], block_size, width)
        self.kv = torch.full(shape, fill, dtype=key.dtype, device=self._device)

    def step(self, chunks: dict[int, int], **options: Any) -> dict[int, Tensor]:
        """Write the next tokens of sequences, `chunks`: number by sequence; attend with them.

        Returns the result of each sequence.
        """
        backend = options.get("backend")
        rows, slots, lengths = [], [], []
        for sequence, count in chunks.items():
            begin = self._case.rows(sequence).start + self.cached[sequence]
            rows.append(torch.arange(begin, begin + count))
            cached = self.cached[sequence]
            positions = torch.arange(cached, cached + count, device=self._device)
            blocks = self.table[sequence][positions // self._size].long()
            slots.append(blocks * self._size + positions % self._size)
            self.cached[sequence] += count
            lengths.append(self.cached[sequence])
        query, key, value = (x[torch.cat(rows)] for x in self._case.qkv)
        write_kv_cache(key, value, self.kv, torch.cat(slots), backend=backend)
        counts = list(chunks.values())
        out = paged_attention(
            query,
            self.kv,
            self.table[list(chunks)],
            torch.tensor([0, *counts]).cumsum(0).int().to(self._device),
            torch.tensor(lengths).int().to(self._device),
            sinks=self._case.sinks,
            **options,
        )
        return dict(zip(chunks, out.split(counts), strict=True))

    def run(self, seed: int, longest: int, **options: Any) -> Tensor:
        """Attend with all tokens, in chunks of up to `longest` tokens of a random batch a step."""
        draw = torch.Generator().manual_seed(seed)
        outs: list[list[Tensor]] = [[] for _ in self._case.lengths]
        while left := [i for i, n in enumerate(self._case.lengths) if self.cached[i] < n]:
            chosen = [i for i in left if torch.rand(1, generator=draw) < 0.7] or left[:1]
            chunks = {}
            for i in reversed(chosen):
                size = int(torch.randint(1, longest + 1, (1,), generator=draw))
                chunks[i] = min(size, self._case.lengths[i] - self.cached[i])
            for i, out in self.step(chunks, **options).items():
                outs[i].append(out)
        return torch.cat([x for sequence in outs for x in sequence])
