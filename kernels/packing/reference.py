"""The reference backend of packing: the specification of its two operators, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def layout_reference(mask: Tensor, capacity: int | None):
    keep = (mask != 0).reshape(-1)
    lengths = (mask != 0).sum(1)
    kept = keep.nonzero().squeeze(1)
    total, device = kept.numel(), mask.device
    rows = total if capacity is None else capacity
    if total > rows and device.type == "cpu":
        raise ValueError(
            f"pack: the mask keeps {total} tokens, but capacity is {rows}; give a larger capacity"
        )
    fits = min(total, rows)
    indices = torch.full((rows,), -1, dtype=torch.int64, device=device)
    indices[:fits] = kept[:fits]
    position_ids = torch.zeros(rows, dtype=torch.int64, device=device)
    within = (mask != 0).cumsum(1).reshape(-1) - 1
    position_ids[:fits] = within[kept[:fits]]
    inverse = torch.full((mask.numel(),), -1, dtype=torch.int64, device=device)
    inverse[kept[:fits]] = torch.arange(fits, device=device)
    cu_seqlens = torch.zeros(mask.size(0) + 1, dtype=torch.int32, device=device)
    cu_seqlens[1:] = lengths.cumsum(0).clamp(max=rows)
    num_dropped = torch.tensor(total - fits, device=device)
    longest = mask.size(1) if capacity is not None else max(lengths.tolist(), default=0)
    return cu_seqlens, position_ids, indices, inverse, num_dropped, torch.tensor(longest)


def move_reference(source, index, position_ids, leading, out_shape, fill, shift):
    if shift:
        index = torch.where(position_ids == 0, -1, index).roll(-1)
        index[-1:] = -1
    flat = source.flatten(0, leading - 1)
    out = source.new_full([index.numel(), *source.shape[leading:]], fill)
    present = index >= 0
    out[present] = flat[index[present]]
    return out.view([*out_shape, *source.shape[leading:]])
