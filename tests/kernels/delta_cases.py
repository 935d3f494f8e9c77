"""Changes of a table's slices, and gaps between changed elements."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from hybridengine.kernels._backend import requested_backend
from hybridengine.kernels.delta import ChangeTable
from tests.kernels.copy_cases import row

GAPS = st.builds(
    lambda small, special, start: (
        start + torch.tensor([*small, *special], dtype=torch.int64).add(1).cumsum(0) - 1,
        start,
    ),
    st.lists(st.integers(0, 70_000), max_size=20),
    st.lists(st.sampled_from([0, 1, 254, 255, 256, 510, 65_535, 65_536, 1 << 24, 1 << 33])),
    st.sampled_from([0, 7, 1 << 40]),
)
Drawn = list[tuple]  # of `slices`


def positions_of(kind: str, size: int, share: float) -> torch.Tensor:
    generator = np.random.default_rng(3)
    count = max(1, round(size * share))
    if kind == "uniform":
        return torch.from_numpy(np.sort(generator.choice(size, count, replace=False)))
    if kind == "regular":
        return torch.arange(count) * (size // count)
    start = size - 3 * count  # crowded at the end, after one long gap
    return torch.from_numpy(start + np.sort(generator.choice(3 * count, count, replace=False)))


def changes_of(
    drawn: Drawn, share: float, wide: bool
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Return a table, two tensors before and after some elements change, and their changes."""
    rows, place = [], 0
    for i, (size, src_stride, dst_stride, offset, gap) in enumerate(drawn):
        rows.append(row(i % 2, 0, offset, place + gap, size, src_stride, dst_stride))
        if i % 3 == 2 and len(size) < 4:  # repeats its elements
            rows[-1] = row(
                i % 2,
                0,
                offset,
                place + gap,
                [2, *size],
                [0, *src_stride],
                [torch.Size(size).numel(), *dst_stride],
            )
            place += torch.Size(size).numel()
        place += gap + torch.Size(size).numel()
    table = torch.tensor(rows, dtype=torch.int64).reshape(-1, 16)
    generator = torch.Generator().manual_seed(place)
    before = [torch.randn(20_000, generator=generator).bfloat16() for _ in range(2)]
    after, indices, values = [t.clone() for t in before], [], []
    for tensor in after:
        chosen = (torch.rand(len(tensor), generator=generator) < share).nonzero()[:, 0]
        tensor[chosen] += 1
        indices.append(chosen if wide else chosen.int())
        values.append(tensor[chosen])
    return table, [*before, *after], indices, values


def reference_table(table: torch.Tensor, device: str = "cpu") -> ChangeTable:
    with requested_backend("reference"):
        return ChangeTable(table, torch.device(device))
