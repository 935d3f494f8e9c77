"""A prefix computed once for all sequences that share it: the same results and gradients."""

from __future__ import annotations

from dataclasses import replace
from types import MethodType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridengine.kernels.linear.chunks import Chunks
from hybridengine.model import (
    forward,
    pack_batch,
    pack_rollouts,
    packed_log_probs,
    packed_logits,
    packed_policy_loss,
    use_exact_operators,
)
from hybridengine.model.head import patch_head
from tests.model.cases import GRADIENTS, LOGITS, gradients, models, one_by_one
from tests.model.forests import forests, group_pairs

FLOAT64 = dict(rtol=1e-10, atol=1e-10)
KINDS = ["llama", "qwen2_one_kv_head", "gemma2"]  # gemma2: window and soft-caps


@pytest.fixture(scope="module")
def float64_models():
    """Models that compute in float64 throughout: transformers' norms round to float32 inside."""
    by_kind = {kind: models(kind)[0].double() for kind in KINDS}
    for model in by_kind.values():
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = MethodType(rms_norm, module)
    return by_kind


def rms_norm(self, x):
    eps = getattr(self, "variance_epsilon", None) or self.eps
    offset = float(type(self).__name__.startswith("Gemma"))
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (offset + self.weight)


def weighted_log_probs(logits, targets):
    """A loss that weighs every row differently, so that an exchanged row shows."""
    log_probs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    weights = torch.linspace(-1, 2, log_probs.shape[0], dtype=log_probs.dtype)
    return log_probs, (weights * log_probs).sum()


def assert_equal_gradients(ours, theirs, **tolerance):
    for name, expected in theirs.items():
        scale = expected.abs().max().clamp(min=1e-3)  # some are zero but for rounding
        torch.testing.assert_close(ours[name] / scale, expected / scale, **tolerance, msg=name)


@pytest.mark.parametrize("kind", KINDS)
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(sequences=forests(), data=st.data())
def test_random_forests_equal_sequences_one_by_one(float64_models, kind, sequences, data):
    model = float64_models[kind]
    pairs = []
    for sequence in sequences:  # equal prefixes may be prompt here and response there
        cut = data.draw(st.integers(1, len(sequence)))
        pairs.append((sequence[:cut], sequence[cut:]))
    batch = pack_rollouts(pairs, shared_prefix=True)
    expected, targets = one_by_one(model, pairs)
    assert torch.equal(batch.target_ids, targets.long())
    ours, our_loss = weighted_log_probs(packed_logits(model, batch), batch.target_ids)
    theirs, their_loss = weighted_log_probs(expected, batch.target_ids)
    torch.testing.assert_close(ours, theirs, **FLOAT64)
    assert_equal_gradients(gradients(model, our_loss), gradients(model, their_loss), **FLOAT64)


def results(model, batch):
    log_probs, entropy = packed_log_probs(model, batch)
    weights = torch.linspace(-1, 2, log_probs.shape[0])
    loss = (weights * log_probs).sum() + 0.1 * (weights.flip(0) * entropy).sum()
    return log_probs.detach(), entropy.detach(), gradients(model, loss)


@pytest.mark.parametrize(
    ("kind", "checkpointing"), [("llama", False), ("gemma2", True), ("qwen3_moe", True)]
)
def test_fused_head_and_checkpointing_equal_plain_packing(kind, checkpointing):
    packed, _ = models(kind)
    patch_head(packed)
    if checkpointing:
        packed.gradient_checkpointing_enable({"use_reentrant": False})
        packed.train()
    pairs = group_pairs()
    plain, shared = (pack_rollouts(pairs, shared_prefix=share) for share in (False, True))
    assert torch.equal(plain.target_ids, shared.target_ids)
    expected, got = results(packed, plain), results(packed, shared)
    for ours, theirs in zip(got[:2], expected[:2], strict=True):
        torch.testing.assert_close(ours, theirs, **LOGITS)
    assert_equal_gradients(got[2], expected[2], **GRADIENTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_computes_a_hidden_state_once(dtype, monkeypatch):
    """Exact: loss, log-probs and entropy keep their bits; gradients are as close as rounding."""
    model, _ = models("llama")
    model.to(dtype)
    patch_head(model)
    use_exact_operators(model, {})
    batch, computed = pack_rollouts(group_pairs(), shared_prefix=True), []
    rows, logits = len(batch.target_ids), Chunks.logits

    def counted(chunks, rows, offset=0):
        out = logits(chunks, rows, offset)
        computed.append(len(out))
        return out

    monkeypatch.setattr(Chunks, "logits", counted)
    advantages = torch.linspace(-1, 2, rows).where(torch.arange(rows) % 3 > 0, 0)
    active = advantages.nonzero().squeeze(1)
    outcomes = []
    options = {"old_log_probs": None, "advantages": advantages, "cu_seqlens": batch.cu_rows}
    for shares in (False, True):
        monkeypatch.setattr(forward, "shares_rows", lambda device, shares=shares: shares)
        of_head, of_active = results(model, batch), replace(batch, active_rows=active)
        loss, *others, metrics = packed_policy_loss(model, of_active, 0.7, **options)
        values = [*of_head[:2], loss.detach(), *others, *metrics.values()]
        outcomes.append((values, of_head[2], gradients(model, loss), sum(computed)))
        computed.clear()
    (expected, *their_gradients, of_all), (got, *our_gradients, of_distinct) = outcomes
    assert all(map(torch.equal, got, expected))
    tolerance = GRADIENTS if dtype == torch.float32 else {"rtol": 2**-5, "atol": 2**-5}
    for ours, theirs in zip(our_gradients, their_gradients, strict=True):
        assert_equal_gradients(ours, theirs, **tolerance)
    assert len(batch.distinct_positions[0]) < 0.8 * rows
    assert of_distinct < 0.8 * of_all


def test_layout_of_a_group():
    pairs = [([5, 6], [7, 8]), ([9], [5]), ([5, 6], [7, 9, 4]), ([5, 6], []), ([5, 6], [3, 1])]
    batch = pack_rollouts(pairs, shared_prefix=True)
    assert batch.input_ids.tolist() == [5, 6, 7, 9, 3, 9], "no last token: no row depends on it"
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 2, 0]
    assert batch.subtree_ends.tolist() == [5, 5, 4, 4, 5, 6]
    assert batch.cu_seqlens.tolist() == [0, 5, 6] and batch.max_seqlen == 5
    assert batch.logit_positions.tolist() == [1, 2, 5, 1, 2, 3, 1, 4], "in the order of the pairs"
    once, index = batch.distinct_positions
    assert once.tolist() == [1, 2, 3, 4, 5] and index.tolist() == [0, 1, 4, 0, 1, 2, 0, 3]
    last = replace(batch, logit_positions=batch.cu_seqlens[1:].long() - 1)
    assert last.distinct_positions is None, "of the batch's own positions"
    assert batch.target_ids.tolist() == [7, 8, 5, 7, 9, 4, 3, 1]
    assert torch.equal(batch.tree_position_ids, batch.position_ids)
    # Saved: 8 and 5; 5 6 7 and 4 of the third sequence, 5 6 of the fourth, 5 6 and 1 of the fifth,
    # which see 4 and 2; 1, 2, 3 and 5; 1, 2; 1, 2 and 4 keys.
    assert batch.saved == (11, 27)


def test_rows_follow_the_loss_mask_of_their_sequence():
    """SFT on several answers: equal tokens are trained on in one sequence and not in another."""
    sequences = [[5, 6, 7, 8, 2], [5, 6, 7, 9], [5, 6, 7, 8], [4, 5]]
    masks = [[0, 0, 1, 1, 0], [0, 0, 0, 1], [0, 1, 0, 1], [0, 0]]
    batch = pack_batch(sequences, masks, shared_prefix=True)
    assert batch.input_ids.tolist() == [5, 6, 7, 4]
    assert batch.logit_positions.tolist() == [1, 2, 2, 0, 2]
    assert batch.target_ids.tolist() == [7, 8, 9, 6, 8]


def test_nothing_shared_is_plain_packing_up_to_the_last_row():
    pairs = [([5, 6], [7, 8]), ([9], [5]), ([4], [])]
    shared = pack_rollouts(pairs, shared_prefix=True)
    plain = pack_batch([[5, 6, 7], [9], [4]], [[0, 0, 1], [0], [0]])
    assert shared.subtree_ends is None and shared.saved == (2, 6)
    assert shared.max_seqlen == plain.max_seqlen
    for name in ("input_ids", "position_ids", "cu_seqlens"):
        assert torch.equal(getattr(plain, name), getattr(shared, name)), name
    assert shared.logit_positions.tolist() == [1, 2, 3] and shared.target_ids.tolist() == [7, 8, 5]
    assert pack_batch([], [], shared_prefix=True).input_ids.numel() == 0
