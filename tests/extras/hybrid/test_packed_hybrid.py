"""A packed batch of a model with a state along the sequence equals each sequence alone."""

from __future__ import annotations

import pytest
import torch

from hybridengine.hybrid.layers import MODEL_TYPES
from hybridengine.model import pack_rollouts, packed_logits
from hybridengine.model.packing_check import check_packing, shared_prefix_obstacle
from hybridengine.moe.experts import EXPERTS
from hybridengine.moe.router_replay import RouterReplay, SequenceRoutes
from tests.extras.hybrid.hybrid_models import TYPES, hybrid_config, hybrid_models
from tests.model.cases import (
    GRADIENTS,
    LOGITS,
    gradients,
    loss_of,
    one_by_one,
    rollouts,
)
from tests.model.forests import group_pairs

MIXTURES = (
    *("qwen3_next", "qwen3_5_moe_text", "lfm2_moe", "nemotron_h", "granitemoehybrid"),
    *("minimax", "kimi_linear"),
)
PAIRS = rollouts([(5, 7), (1, 1), (20, 50), (3, 9), (60, 2), (4, 0), (1, 2)])


def test_every_type_is_tested():
    assert set(TYPES) == set(MODEL_TYPES)


def assert_equal(ours, theirs):
    model, logits, targets = ours
    own, expected = theirs
    torch.testing.assert_close(logits, expected, **LOGITS)
    expected_gradients = gradients(own, loss_of(expected, targets))
    for name, gradient in gradients(model, loss_of(logits, targets)).items():
        scale = expected_gradients[name].abs().max().clamp(min=1e-3)
        torch.testing.assert_close(
            gradient / scale, expected_gradients[name] / scale, **GRADIENTS, msg=name
        )


@pytest.mark.parametrize("shared_prefix", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_packed_equals_each_sequence_alone(kind, shared_prefix):
    model, own = hybrid_models(kind)
    pairs = group_pairs() if shared_prefix else PAIRS
    batch = pack_rollouts(pairs, shared_prefix=shared_prefix)
    assert (batch.subtree_ends is not None) == shared_prefix
    expected, targets = one_by_one(own, pairs)
    assert_equal((model, packed_logits(model, batch), targets), (own, expected))


@pytest.mark.parametrize("kind", MIXTURES)
def test_replayed_experts(kind):
    """Experts that the routers do not take; with checkpointed layers and grouped products."""
    models, pairs = hybrid_models(kind), group_pairs()
    model, own = models
    model.set_experts_implementation(EXPERTS)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    replay, of_own = map(RouterReplay, models)
    natural, targets = one_by_one(own, pairs)
    routes, logits = [], []
    for prompt, response in pairs:
        with of_own.record(len(prompt + response)) as call:
            own(input_ids=torch.tensor([prompt + response]), use_cache=False)
        routes.append(torch.where(call.routes < 0, -1, (call.routes + 1) % 4))
        with of_own.replay(routes[-1]):
            logits.append(one_by_one(own, [(prompt, response)])[0])
    parts = {"routes": SequenceRoutes(routes)}
    batch = pack_rollouts(pairs, shared_prefix=True, parts=parts)
    expected = torch.cat(logits)
    assert not torch.allclose(expected, natural, atol=1e-2)
    assert_equal((model, packed_logits(model, batch), targets), (own, expected))
    assert replay.pop_counts().tokens == len(batch.input_ids)


@pytest.mark.parametrize("kind", TYPES)
def test_the_small_copy_shows_no_leak(kind):
    """Two sequences in both orders, and with a shared prefix."""
    check_packing(kind, hybrid_config(kind))
    assert shared_prefix_obstacle(hybrid_config(kind)) is None


@pytest.mark.parametrize("kind", ["qwen3_5_text", "jamba", "lfm2", "mamba2"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(kind, reentrant):
    """A layer that is computed again in the backward gets the segments of its batch."""
    model, own = hybrid_models(kind)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    batches = [pack_rollouts(pairs, shared_prefix=True) for pairs in (group_pairs(), PAIRS)]
    losses = [loss_of(packed_logits(model, batch), batch.target_ids) for batch in batches]
    pairs = [*group_pairs(), *PAIRS]
    expected = gradients(own, loss_of(*one_by_one(own, pairs)))
    for name, gradient in gradients(model, sum(losses)).items():
        scale = expected[name].abs().max().clamp(min=1e-3)
        torch.testing.assert_close(gradient / scale, expected[name] / scale, **GRADIENTS, msg=name)
