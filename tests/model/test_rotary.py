"""Rotary embeddings of which transformers takes the frequencies by the longest row of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from hybridengine.model import pack_rollouts, packed_cross_entropy, packed_logits
from hybridengine.model.attention import ATTENTION
from hybridengine.model.exact import model_obstacle
from hybridengine.model.rotary import check_rotary, fix_rotary_length
from hybridengine.run.errors import ModelError
from tests.model.cases import LOGITS, rollouts
from tests.model.rotary_configs import DYNAMIC, LIMIT, LONG_ROPE, MSCALE, ORIGINAL, tiny


def build(config: PretrainedConfig, **options: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, **options).eval()


def logits(model: Any, pairs: list, **options: Any) -> tuple[torch.Tensor, ...]:
    """Return those of each pair's response."""
    rows = packed_logits(model, pack_rollouts(pairs, **options))
    return rows.split([len(response) for _, response in pairs])


@pytest.mark.parametrize("max_model_len", [ORIGINAL, ORIGINAL + 1, 96])
@pytest.mark.parametrize("kind", ["phi3", "llama"])
def test_a_sequence_beside_a_long_one(kind: str, max_model_len: int) -> None:
    """Alone, packed in both orders, with a shared prefix: the same logits, those of one factor."""
    model = build(tiny(kind, LONG_ROPE), attn_implementation=ATTENTION)
    fix_rotary_length(model, max_model_len)
    name = "long_factor" if max_model_len > ORIGINAL else "short_factor"
    both = dict.fromkeys(("short_factor", "long_factor"), LONG_ROPE[name])
    alone = build(tiny(kind, LONG_ROPE | both), attn_implementation="eager")
    short, long = rollouts([(5, 7), (4, max_model_len - 4)])
    expected = alone(torch.tensor([short[0] + short[1]]), use_cache=False).logits[0, 4:11]
    for pairs in ([short], [short, long], [long, short]):
        torch.testing.assert_close(logits(model, pairs)[pairs.index(short)], expected, **LOGITS)
    other = (short[0], long[1][: max_model_len - 5])
    shared = logits(model, [short, other], shared_prefix=True)[0]
    torch.testing.assert_close(shared, expected, **LOGITS)


def test_the_loss_of_micro_batches() -> None:
    model = build(tiny("phi3", LONG_ROPE), attn_implementation=ATTENTION)
    pairs = rollouts([(3, 9), (2, 60), (5, 4), (20, 30)])

    def loss_of(*micro_batches: list) -> float:
        with torch.no_grad():
            parts = [packed_cross_entropy(model, pack_rollouts(m), 103) for m in micro_batches]
        return sum(part.item() for part in parts)

    together, apart = [pairs], [[pair] for pair in pairs]
    assert abs(loss_of(*together) - loss_of(*apart)) > 1e-2, "transformers' rule"
    fix_rotary_length(model, 64)
    assert abs(loss_of(*together) - loss_of(*apart)) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "smollm3", "hunyuan_v1_dense"])
def test_dynamic_ntk_stays_at_the_base_of_the_model(kind: str) -> None:
    """As in vLLM, whose tables end where the base would begin to grow."""
    rope = DYNAMIC | ({"alpha": 50.0} if kind == "hunyuan_v1_dense" else {})
    model = build(tiny(kind, rope), attn_implementation=ATTENTION)
    fix_rotary_length(model, 4 * LIMIT)
    plain = build(tiny(kind, rope), attn_implementation="eager")
    short, long = rollouts([(5, 7), (8, LIMIT - 8)])
    expected = plain(torch.tensor([short[0] + short[1]]), use_cache=False).logits[0, 4:11]
    torch.testing.assert_close(logits(model, [long, short])[1], expected, **LOGITS)


def test_an_attention_factor_that_depends_on_the_length() -> None:
    """phimoe's own code: another scale for a batch with a long row."""
    config = tiny("phimoe", LONG_ROPE | MSCALE, num_local_experts=4, num_experts_per_tok=2)
    model = build(config, attn_implementation=ATTENTION)
    short, long = rollouts([(5, 7), (8, 60)])
    before = logits(model, [short])[0]
    assert (logits(model, [short, long])[0] - before).abs().max() > 1e-2
    fix_rotary_length(model, 68)
    after = [logits(model, pairs)[0] for pairs in ([short], [short, long])]
    torch.testing.assert_close(*after, **LOGITS)
    assert (after[0] - before).abs().max() > 1e-2


def test_other_embeddings_stay_as_they_are() -> None:
    model = build(tiny("llama", {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}))
    fix_rotary_length(model, 96)
    assert "forward" not in vars(model.model.rotary_emb)
    model = build(tiny("llama", LONG_ROPE))
    fix_rotary_length(model, ORIGINAL)  # no batch of the run is longer
    assert "forward" not in vars(model.model.rotary_emb)


def test_exact_rollouts_have_no_such_tables() -> None:
    for rope in (LONG_ROPE, DYNAMIC):
        reason = model_obstacle(tiny("llama", rope))
        assert reason is not None and f"rope_type '{rope['rope_type']}'" in reason


def test_what_vllm_computes_otherwise_is_refused() -> None:
    """Of configurations alone, as a dry run does."""
    check_rotary(tiny("llama", {"rope_type": "default", "rope_theta": 1e4}), LIMIT)
    for length in (ORIGINAL, LIMIT):
        check_rotary(tiny("phi3", LONG_ROPE), length)
        for given in ({"attention_factor": 1.5}, {"factor": 16.0}):
            with pytest.raises(ModelError, match=r"vLLM.*attention_factor and factor: remove"):
                check_rotary(tiny("phi3", LONG_ROPE | given), length)
    config = tiny("phimoe", LONG_ROPE | MSCALE, num_local_experts=4)
    check_rotary(config, ORIGINAL)
    with pytest.raises(ModelError, match=r"not have the long_factor.*use sequences of up to 32"):
        check_rotary(config, ORIGINAL + 1)
