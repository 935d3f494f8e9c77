"""The reference backends of packing, the specification of its two operators, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def layout_reference(
    mask: Tensor, capacity: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute (cu_seqlens, position_ids, indices, inverse, num_dropped, max_seqlen)."""
    is_token, device = mask != 0, mask.device
    lengths = is_token.sum(1)
    tokens = is_token.reshape(-1).nonzero().squeeze(1)
    total = tokens.numel()
    rows = total if capacity is None else capacity
    if total > rows and device.type == "cpu":
        raise ValueError(
            f"pack: the mask has {total} tokens, but capacity is {rows}; give a larger capacity"
        )
    tokens = tokens[:rows]
    fits = tokens.numel()
    indices = torch.full((rows,), -1, dtype=torch.int64, device=device)
    indices[:fits] = tokens
    position_ids = torch.zeros(rows, dtype=torch.int64, device=device)
    position_ids[:fits] = (is_token.cumsum(1).reshape(-1) - 1)[tokens]
    inverse = torch.full((mask.numel(),), -1, dtype=torch.int64, device=device)
    inverse[tokens] = torch.arange(fits, device=device)
    cu_seqlens = torch.zeros(mask.size(0) + 1, dtype=torch.int32, device=device)
    cu_seqlens[1:] = lengths.cumsum(0).clamp(max=rows)
    num_dropped = torch.tensor(total - fits, device=device)
    max_seqlen = mask.size(1) if capacity is not None else max(lengths.tolist(), default=0)
    return cu_seqlens, position_ids, indices, inverse, num_dropped, torch.tensor(max_seqlen)


def move_reference(
    source: Tensor,
    index: Tensor,
    position_ids: Tensor | None,
    leading: int,
    out_shape: Sequence[int],
    fill: float,
    shift: int,
) -> Tensor:
    """Compute out.flatten()[t] = source.flatten()[index[t]], `fill` where index[t] is -1."""
    if shift:
        assert position_ids is not None
        index = torch.where(position_ids == 0, -1, index).roll(-1)
        index[-1:] = -1
    rows = source.flatten(0, leading - 1)
    out = source.new_full([index.numel(), *source.shape[leading:]], fill)
    has_source = index >= 0
    out[has_source] = rows[index[has_source]]
    return out.view([*out_shape, *source.shape[leading:]])
