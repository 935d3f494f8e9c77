"""Packing and unpacking against flash-attn's algorithm: nonzero and gather, zero-fill and scatter.

`flash_attn` is its bert_padding, which installs only with CUDA; `flash_attn_algorithm` repeats it:
unpad_input once for the layout, then one gather per tensor; pad_input with zeros and scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks._baselines import flash_attn_padding
from benchmarks._bench import OURS, Bench
from hybridengine.kernels import pack, unpack


def flash_attn_unpad(tensors: list[Tensor], mask: Tensor) -> tuple[list[Tensor], Tensor]:
    indices = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    lengths = mask.sum(dim=-1, dtype=torch.int32)
    _longest = lengths.max().item()
    _cu_seqlens = F.pad(torch.cumsum(lengths, dim=0, dtype=torch.int32), (1, 0))
    return [_first_axis(x.flatten(0, 1), indices) for x in tensors], indices


def _first_axis(x: Tensor, indices: Tensor) -> Tensor:
    flat = x.reshape(x.size(0), -1)
    index = indices[:, None].expand(-1, flat.size(1))
    return torch.gather(flat, 0, index).reshape(-1, *x.shape[1:])


def flash_attn_pad(tensors: list[Tensor], indices: Tensor, batch: int, seqlen: int) -> list[Tensor]:
    results = []
    for x in tensors:
        padded = torch.zeros(batch * seqlen, *x.shape[1:], device=x.device, dtype=x.dtype)
        padded[indices] = x
        results.append(padded.view(batch, seqlen, *x.shape[1:]))
    return results


def flash_attn_pack(padding: Any, tensors: list[Tensor], mask: Tensor) -> list[Tensor]:
    wide = [x if x.dim() > 2 else x[..., None] for x in tensors]
    first, indices = padding.unpad_input(wide[0], mask)[:2]
    return [first, *(padding.index_first_axis(x.flatten(0, 1), indices) for x in wide[1:])]


def flash_attn_unpack(
    padding: Any, tensors: list[Tensor], indices: Tensor, batch: int, seqlen: int
) -> list[Tensor]:
    wide = [x if x.dim() > 1 else x[:, None] for x in tensors]
    return [padding.pad_input(x, indices, batch, seqlen) for x in wide]


def run(bench: Bench) -> None:
    batch, seqlen = (
        (16, 128) if bench.quick else (256, 4096) if bench.device.type == "cuda" else (64, 1024)
    )
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(seqlen // 8, seqlen + 1, (batch,), generator=generator)
    mask = (torch.arange(seqlen)[None] < lengths[:, None]).to(bench.device)
    for width, dtype in ((256, torch.float32), (1024, torch.bfloat16)):
        hidden = torch.randn(batch, seqlen, width, device=bench.device).to(dtype)
        compare(bench, [hidden], mask, f"{batch}x{seqlen}x{width}", dtype)
    many = [
        torch.randint(0, 1000, (batch, seqlen), device=bench.device),
        torch.randint(0, 1000, (batch, seqlen), device=bench.device),
        *(torch.randn(batch, seqlen, device=bench.device) for _ in range(5)),
        torch.rand(batch, seqlen, device=bench.device) < 0.5,
    ]
    compare(bench, many, mask, f"{batch}x{seqlen}, 8 tensors", torch.float32)


def compare(
    bench: Bench, tensors: list[Tensor], mask: Tensor, shape: str, dtype: torch.dtype
) -> None:
    packed = pack(tensors, mask)
    values, indices = list(packed.values), packed.indices
    packed_bytes = sum(value.nbytes for value in values)
    # The layout is written by the pass over the mask and read again by that over the rows.
    inverse = packed.inverse
    assert inverse is not None
    layout = sum(x.nbytes for x in (packed.indices, packed.position_ids, inverse))
    against = partial(bench.compare, "packing", shape=shape, dtype=dtype, peak="copy")
    if len(tensors) == 1:
        destination = torch.empty_like(values[0])
        copies: dict[str, Callable] = {
            "copy_ into existing memory": lambda: destination.copy_(values[0]),
            "clone (fresh memory)": values[0].clone,
        }
        against("copy", implementations=copies, bytes_moved=2 * packed_bytes)
    packs: dict[str, Callable] = {
        OURS: lambda: pack(tensors, mask),
        "flash_attn_algorithm": lambda: flash_attn_unpad(tensors, mask),
    }
    padding = flash_attn_padding() if bench.gpu is not None else None
    if padding is not None:
        packs["flash_attn"] = partial(flash_attn_pack, padding, tensors, mask)
    bytes_moved = 2 * packed_bytes + mask.nbytes + layout + indices.nbytes
    against("pack", implementations=packs, bytes_moved=bytes_moved)
    unpacks: dict[str, Callable] = {
        OURS: lambda: unpack(values, packed),
        "flash_attn_algorithm": lambda: flash_attn_pad(values, indices, *mask.shape),
    }
    if padding is not None:
        unpacks["flash_attn"] = partial(flash_attn_unpack, padding, values, indices, *mask.shape)
    bytes_moved = packed_bytes + sum(tensor.nbytes for tensor in tensors) + inverse.nbytes
    against("unpack", implementations=unpacks, bytes_moved=bytes_moved)
