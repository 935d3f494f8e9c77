"""Models with linear attention as the trainer has them: sharded, with adapters, compiled."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from hybridengine.compile import compile_layers
from hybridengine.model import pack_rollouts, packed_logits
from hybridengine.model.lora import apply_lora
from tests.extras.hybrid.hybrid_models import TYPES, hybrid_models
from tests.model.cases import (
    GRADIENTS,
    LOGITS,
    assert_close_by_scale,
    full_tensors,
    load,
    loss_of,
    one_by_one,
    pairs_of_rank,
    rollouts,
    single_process_model,
)
from tests.model.forests import group_pairs
from tests.ranks import run_ranks

PAIRS = rollouts([(5, 7), (1, 1), (20, 30), (3, 9), (4, 0)])


def sharded_body(rank: int, world_size: int, path: str) -> None:
    model = load(path, world_size, enable_gradient_checkpointing=True)
    reference, pairs = single_process_model(path), [*group_pairs(), *PAIRS]
    own = pairs_of_rank(pairs, rank, world_size)
    batch = pack_rollouts(own, shared_prefix=True)
    logits = packed_logits(model, batch)
    (loss_of(logits, batch.target_ids) * world_size).backward()
    torch.testing.assert_close(logits.detach(), one_by_one(reference, own)[0].detach(), **LOGITS)
    loss_of(*one_by_one(reference, pairs)).backward()
    assert_close_by_scale(
        full_tensors(model, lambda p: p.grad), {n: p.grad for n, p in reference.named_parameters()}
    )


@pytest.mark.multirank
@pytest.mark.parametrize("kind", ["qwen3_5_text", "nemotron_h"])
def test_ranks_equal_one_process(tmp_path: Path, kind: str) -> None:
    hybrid_models(kind)[1].save_pretrained(tmp_path)
    run_ranks(sharded_body, 2, str(tmp_path))


@pytest.mark.parametrize("kind", ["qwen3_next", "jamba", "falcon_h1"])
def test_adapters(kind):
    results, batch = [], pack_rollouts(group_pairs(), shared_prefix=True)
    for model in hybrid_models(kind):
        torch.manual_seed(0)
        apply_lora(model, 4, 8.0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(std=0.1)
        packed = not results
        logits = packed_logits(model, batch) if packed else one_by_one(model, group_pairs())[0]
        loss_of(logits, batch.target_ids).backward()
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append((logits.detach(), grads))
    (logits, ours), (expected, theirs) = results
    torch.testing.assert_close(logits, expected, **LOGITS)
    assert any("in_proj" in name for name in ours)
    assert_close_by_scale(ours, theirs)


@pytest.mark.parametrize(
    "kind", [pytest.param("qwen3_5_text", marks=pytest.mark.exhaustive), "mamba2"]
)
def test_compiled_layers(kind):
    model, own = hybrid_models(kind)
    compile_layers((model.model if kind == "qwen3_5_text" else model.backbone).layers)
    for pairs, shared_prefix in ((PAIRS, False), (group_pairs(), True), (PAIRS[:2], False)):
        batch = pack_rollouts(pairs, shared_prefix=shared_prefix)
        model.zero_grad()
        own.zero_grad()
        logits, (expected, targets) = packed_logits(model, batch), one_by_one(own, pairs)
        torch.testing.assert_close(logits, expected, **LOGITS)
        for x in (logits, expected):
            loss_of(x, targets).backward()
        theirs = dict(own.named_parameters())
        for name, parameter in model.named_parameters():
            scale = theirs[name].grad.abs().max().clamp(min=1e-3)
            got, wanted = parameter.grad / scale, theirs[name].grad / scale
            torch.testing.assert_close(got, wanted, **GRADIENTS, msg=name)


@pytest.mark.parametrize("kind", TYPES)
def test_bfloat16_is_as_exact_as_transformers(kind):
    """Against float32. The median: where rounding selects other experts, errors are large."""
    model, own = hybrid_models(kind)
    expected, targets = one_by_one(own, PAIRS)
    rounded, _ = one_by_one(copy.deepcopy(own).bfloat16(), PAIRS)
    logits = packed_logits(model.bfloat16(), pack_rollouts(PAIRS))
    ours, theirs = ((x.float() - expected).abs().median() for x in (logits, rounded))
    assert ours <= 1.25 * theirs
    loss_of(logits, targets).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
