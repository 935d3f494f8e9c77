"""Shared prefixes on sharded models: Ulysses, LoRA, values, checkpointing, the fused head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.model.cases import LOGITS, assert_close_by_scale, load
from tests.model.forests import group_pairs
from tests.ranks import run_ranks
from tests.tensors import whole
from tests.tiny_models import save_tiny


def weighted(*rows: torch.Tensor) -> torch.Tensor:
    """A loss that weighs every row differently, so that an exchanged row shows."""
    weight = torch.linspace(-1, 2, rows[0].shape[0])
    return sum((weight.roll(i) * row).sum() for i, row in enumerate(rows))


def body(rank: int, world_size: int, path: str, kind: str) -> int:
    """Compare one tree-packed batch, split over all ranks, with plain packing on every rank."""
    import torch.distributed as dist

    from hybridengine.model import (
        apply_lora,
        pack_rollouts,
        packed_log_probs,
        packed_values,
    )

    model = load(
        path,
        world_size,
        enable_gradient_checkpointing=True,
        value_head=kind == "critic",
        adapt=(lambda m: apply_lora(m, 3, 5.0, "all-linear")) if kind == "lora" else None,
    )
    with torch.no_grad():  # a new value head and new adapters are zero
        for name, parameter in model.named_parameters():
            if "lora_B" in name or kind == "critic":
                parameter.add_(0.01)

    def run(batch, scale: float):
        model.zero_grad()  # before the forward, after which FSDP2's root shows gathered weights
        if kind == "critic":
            rows = (packed_values(model, batch),)
        else:
            rows = packed_log_probs(model, batch)
        (weighted(*rows) * scale).backward()  # FSDP2 averages
        trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        return [row.detach() for row in rows], {n: whole(g) for n, g in trained.items()}

    pairs = group_pairs()
    group = dist.group.WORLD
    expected, expected_gradients = run(pack_rollouts(pairs), 1.0)
    for shared in (
        pack_rollouts(pairs, shared_prefix=True),
        pack_rollouts(pairs, sequence_parallel=group, shared_prefix=True),
    ):
        assert shared.subtree_ends is not None and shared.saved.tokens > 50
        rows, grads = run(shared, 1.0 if shared.shard is None else world_size)
        for ours, theirs in zip(rows, expected, strict=True):
            torch.testing.assert_close(ours, theirs, **LOGITS)
        assert_close_by_scale(grads, expected_gradients)
    return shared.subtree_ends.shape[0]


@pytest.mark.multirank
@pytest.mark.parametrize("world_size", [2, 4])
def test_trees_over_sequence_parallel_ranks(tmp_path: Path, world_size: int) -> None:
    """gemma2 has windows, soft-caps and a pair of heads; the padding is a tree of its own."""
    for kind in ("gemma2", "lora", "critic", "qwen3_moe"):
        if world_size == 2 or kind == "gemma2":
            path = save_tiny("llama" if kind in ("lora", "critic") else kind, tmp_path / kind)
            padded = run_ranks(body, world_size, path, kind)
            assert padded[0] % world_size == 0
