"""Tensors, and elements of them that change."""

from __future__ import annotations

import math

import torch

from hybridengine.kernels import change_mask
from hybridengine.kernels.changes import mark_

HOSTILE = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-41, -1e-41, 3e38])


def drawn(sizes, share, device="cpu", dtype=torch.bfloat16):
    """Sources, and for each one which elements changed."""
    generator = torch.Generator().manual_seed(sum(sizes))
    sources = [torch.randn(n, generator=generator).to(dtype).to(device) for n in sizes]
    changed = [(torch.rand(n, generator=generator) < share).to(device) for n in sizes]
    return sources, changed


def out_of_date(size, dtype, sent_dtype, share):
    """A tensor, what was sent of it, and which elements of that are out of date."""
    generator = torch.Generator().manual_seed(size)
    current = torch.randn(size, generator=generator).to(dtype)
    current[: len(HOSTILE)] = HOSTILE[:size].to(dtype)
    sent = current.to(sent_dtype, copy=True)
    changed = torch.rand(size, generator=generator) < share
    sent.view(torch.int16)[changed] ^= 1
    return current, sent, changed


def masks_of(changed):
    masks = [change_mask(one) for one in changed]
    for mask, one in zip(masks, changed, strict=True):
        mark_(mask, one)
    return masks
