"""Vision-language models under FSDP2: one rank may have all the images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extras.vision.vision_models import alone, cases, save_vision
from tests.model.cases import LOGITS, assert_close_by_scale, load, loss_of
from tests.ranks import run_ranks
from tests.tensors import whole

pytestmark = pytest.mark.multirank


def reference_of(path: str, pairs, images) -> tuple[Any, torch.Tensor]:
    """transformers' model with the gradients of the summed loss, and its logits."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager")
    parts = [
        alone(model, [*prompt, *response], own)[len(prompt) - 1 : len(prompt) + len(response) - 1]
        for (prompt, response), own in zip(pairs, images, strict=True)
    ]
    logits = torch.cat(parts)
    loss_of(logits, torch.tensor([t for _, response in pairs for t in response])).backward()
    return model, logits.detach()


def step_body(rank: int, world_size: int, path: str, kind: str, options: dict) -> dict:
    from torch.distributed.fsdp import FSDPModule

    from hybridengine.model import (
        accepts_head_function,
        pack_rollouts,
        packed_log_probs,
        packed_logits,
    )
    from hybridengine.vision.formats import ImageFormat
    from hybridengine.vision.packed import SequenceImages

    model = load(path, world_size, **options)
    assert accepts_head_function(model)
    pairs, images = cases(kind)
    reference, expected = reference_of(path, pairs, images)
    of_rank = [[i for i, own in enumerate(images) if own], [1]][rank]  # rank 1: text alone
    batch = pack_rollouts(
        [pairs[i] for i in of_rank],
        parts={"images": SequenceImages([images[i] for i in of_rank], ImageFormat(model.config))},
        shared_prefix=True,
    )
    with torch.no_grad():
        log_probs, _ = packed_log_probs(model, batch)
    logits = packed_logits(model, batch)
    (loss_of(logits, batch.target_ids) * world_size).backward()
    ends = [0, *torch.tensor([len(response) for _, response in pairs]).cumsum(0).tolist()]
    rows = torch.cat([torch.arange(ends[i], ends[i + 1]) for i in of_rank])
    torch.testing.assert_close(logits, expected[rows], **LOGITS)
    chosen = logits.log_softmax(-1).gather(1, batch.target_ids[:, None])[:, 0]
    torch.testing.assert_close(log_probs, chosen, **LOGITS)
    trained = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    noise = [n for n in trained if trained[n].abs().max() < 1e-4]  # zero but for rounding
    ours = full_tensors_of_gradients(model)
    assert_close_by_scale(
        {n: x for n, x in ours.items() if n not in noise},
        {n: x for n, x in trained.items() if n not in noise},
    )
    groups = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    return {"groups": groups}


def full_tensors_of_gradients(model) -> dict[str, torch.Tensor]:
    return {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen2_vl", {}),
        ("qwen3_vl", {"enable_gradient_checkpointing": True, "forward_prefetch": True}),
        ("llava_onevision", {"enable_gradient_checkpointing": True}),
        ("gemma3", {"enable_gradient_checkpointing": True}),
    ],
)
def test_a_rank_with_images_and_a_rank_of_text(tmp_path: Path, kind: str, options: dict) -> None:
    path = save_vision(kind, tmp_path)
    groups = run_ranks(step_body, 2, path, kind, options)[0]["groups"]
    assert {"model.language_model.layers.0", "model.language_model.layers.1", ""} <= {*groups}
    assert sum("blocks" in name or "encoder.layers" in name for name in groups) == 3


def text_body(rank: int, world_size: int, path: str) -> list[torch.Tensor]:
    """Log-probs of text, of every rank's own batch and of one batch that the ranks share."""
    import torch.distributed as dist

    from hybridengine.model import pack_rollouts, packed_log_probs

    model, results = load(path, world_size), []
    for group in (None, dist.group.WORLD):
        batch = pack_rollouts(TEXT, sequence_parallel=group)
        log_probs, _ = packed_log_probs(model, batch)
        log_probs.sum().backward()
        results.append(log_probs.detach())
    assert all(p.grad is None for p in model.get_encoder(modality="image").parameters())
    return results


TEXT = [([5, 6, 7], [8, 9, 10]), ([11, 12], [13])]


def test_a_job_of_text_alone_leaves_the_tower_out(tmp_path: Path) -> None:
    path = save_vision("qwen2_vl", tmp_path)
    _, logits = reference_of(path, TEXT, [[], []])
    targets = torch.tensor([token for _, response in TEXT for token in response])
    expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    for results in run_ranks(text_body, 2, path):
        for log_probs in results:
            torch.testing.assert_close(log_probs, expected, **LOGITS)
