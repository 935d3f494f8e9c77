"""Value heads: one value per position, equal to the classifier's if it is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.loading import load_sharded
from tests.ranks import RankFailure, run_ranks
from tests.tensors import part, whole
from tests.tiny_models import save_classifier, save_tiny, tiny_config

pytestmark = pytest.mark.multirank

SEQUENCES = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14, 15]]


def values_body(rank: int, world_size: int, path: str, head: torch.Tensor | None):
    """Values at every position but the first of each sequence, and their gradient in the head."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    from hybridengine.model import pack_rollouts, packed_values

    mesh = init_device_mesh("cpu", (world_size,))
    model = load_sharded(path, mesh, torch.float32, value_head=True)
    weight = model.get_output_embeddings().weight
    if head is not None:
        with torch.no_grad():
            part(weight).copy_(part(distribute_tensor(head, mesh)))
    batch = pack_rollouts([(ids[:1], ids[1:]) for ids in SEQUENCES])
    values = packed_values(model, batch)
    values.sum().backward()
    gradient = whole(model.get_output_embeddings().weight.grad)
    last = replace(batch, logit_positions=batch.cu_seqlens[1:].long() - 1)
    at_end = packed_values(model, last)
    return values.detach(), at_end.detach(), gradient


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_a_causal_lm_gets_a_linear_head(tmp_path, kind):
    """Against transformers' own hidden states; gemma2 has a soft-cap, values have none."""
    path = save_tiny(kind, tmp_path)
    head = torch.randn(1, tiny_config(kind).hidden_size, generator=torch.Generator().manual_seed(1))
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    base = model.get_decoder()
    hidden = [base(torch.tensor([ids])).last_hidden_state[0].detach() for ids in SEQUENCES]
    wanted = torch.cat([(h[:-1] @ head[0]) for h in hidden])
    gradient = torch.cat([h[:-1] for h in hidden]).sum(0)[None]
    for world_size in (1, 2):
        for values, _, got in run_ranks(values_body, world_size, path, head):
            torch.testing.assert_close(values, wanted, rtol=1e-4, atol=1e-4)  # float32, two layers
            torch.testing.assert_close(got, gradient, rtol=1e-4, atol=1e-4)


def test_a_new_head_returns_zeros(tmp_path):
    [(values, at_end, gradient)] = run_ranks(values_body, 1, save_tiny("llama", tmp_path), None)
    assert values.eq(0).all() and at_end.eq(0).all() and gradient.abs().sum() > 0


def test_a_sequence_classifier_keeps_its_head(tmp_path):
    path = save_classifier("llama", tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    wanted = [model(torch.tensor([ids])).logits[0, 0].item() for ids in SEQUENCES]
    for _, at_end, _ in run_ranks(values_body, 2, path, None):
        assert at_end.tolist() == pytest.approx(wanted, abs=1e-5)


def test_several_labels_are_refused(tmp_path):
    with pytest.raises(RankFailure, match="has 3 labels; a reward or value model has one"):
        run_ranks(values_body, 1, save_classifier("llama", tmp_path, labels=3), None)
