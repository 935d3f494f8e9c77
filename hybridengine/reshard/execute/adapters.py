"""Low-rank adapters merged into their base weights shard by shard, as a sync packs them.

LoRA (Hu et al. 2021, arXiv 2106.09685, section 4.1): W + (alpha / r) B A. A rank forms only the
rows (or columns) it holds, as much as fits a bucket at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from hybridengine.sharding.adapter import Adapter
from hybridengine.sharding.layout import EngineLayout, identity_layout

__all__ = ["with_factors", "with_whole"]


def with_factors(layout: EngineLayout, factors: Mapping[str, torch.Tensor]) -> EngineLayout:
    """The layout of an engine that has every factor whole beside its weights."""
    own = identity_layout(
        {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in factors.items()}
    )
    return replace(
        layout,
        destinations=layout.destinations | own.destinations,
        copies=layout.copies + own.copies,
    )


def with_whole(
    adapters: Mapping[str, Adapter], arrived: dict[str, torch.Tensor]
) -> Iterator[tuple[str, Adapter]]:
    """The adapters, by parameter, made of the factors taken out of what `arrived`."""
    for name, adapter in adapters.items():
        left, right = (arrived.pop(f"{name}.{side}") for side in ("left", "right"))
        yield name, Adapter(left, right, adapter.scale)
