"""Models with attention sinks, packed and with shared prefixes, against transformers' own forward.

transformers' eager attention of every sequence alone is the oracle, of the gradients of the sinks
too.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hybridengine.model import pack_rollouts, packed_logits
from hybridengine.model.attention import ATTENTION
from hybridengine.model.packing_check import check_packing, shared_prefix_obstacle
from hybridengine.model.validation import check_model
from tests.model.cases import (
    GRADIENTS,
    LOGITS,
    gradients,
    loss_of,
    one_by_one,
)
from tests.model.forests import group_pairs
from tests.tiny_models import SIZES

_SIZES = SIZES | {"initializer_range": 0.1, "sliding_window": 16}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SLIDING = ["sliding_attention", "full_attention"]
KINDS: dict[str, dict[str, Any]] = {
    "gpt_oss": _EXPERTS,
    "granite_swa": {"layer_types": _SLIDING},
    "granitemoe_swa": _EXPERTS | {"layer_types": _SLIDING},
    "mimo_v2_flash": {  # sinks in the layers with a window alone; values of another width
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "v_head_dim": 16,
        "layer_types": _SLIDING,
    },
}


def models(kind: str) -> tuple[Any, Any]:
    """Two models with the same random weights: packed attention, and transformers' eager."""
    config = CONFIG_MAPPING[kind](**_SIZES | KINDS[kind])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        eager = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        for name, parameter in eager.named_parameters():
            if parameter.ndim == 1:
                parameter.data += (1.0 if "sinks" in name else 0.1) * torch.randn_like(parameter)
    config = copy.deepcopy(eager.config)
    packed = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    packed.load_state_dict(eager.state_dict())
    return packed.eval(), eager


@pytest.mark.parametrize("shared", (False, True), ids=("packed", "shared"))
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_each_sequence_alone(kind: str, shared: bool) -> None:
    packed, eager = models(kind)
    pairs = group_pairs()
    batch = pack_rollouts(pairs, shared_prefix=shared)
    assert (batch.subtree_ends is not None) == shared
    logits, targets = one_by_one(eager, pairs)
    ours = packed_logits(packed, batch)
    torch.testing.assert_close(ours, logits, **LOGITS)
    expected = gradients(eager, loss_of(logits, targets))
    assert any(name.endswith("sinks") and grad.abs().min() > 0 for name, grad in expected.items())
    for name, grad in gradients(packed, loss_of(ours, batch.target_ids)).items():
        scale = expected[name].abs().max()
        torch.testing.assert_close(grad / scale, expected[name] / scale, **GRADIENTS, msg=name)


def test_sinks_matter_and_can_be_off() -> None:
    packed, _ = models("gpt_oss")
    batch = pack_rollouts(group_pairs(), shared_prefix=True)
    with torch.no_grad():
        before = packed_logits(packed, batch)
        for name, parameter in packed.named_parameters():
            if name.endswith("sinks"):
                parameter.fill_(-torch.inf)
        assert (packed_logits(packed, batch) - before).abs().max() > 0.1


def test_generation_with_a_cache_and_padding() -> None:
    packed, eager = models("gpt_oss")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, SIZES["vocab_size"], (3, 30), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :11], mask[2, :4] = 0, 0
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    ours, theirs = (
        model.generate(ids, attention_mask=mask, **options) for model in (packed, eager)
    )
    assert torch.equal(ours, theirs)


def test_the_check_before_a_run_accepts_it(tmp_path: Any) -> None:
    packed, _ = models("gpt_oss")
    packed.save_pretrained(tmp_path)
    config = check_model(str(tmp_path))
    check_packing(str(tmp_path), config)
    assert shared_prefix_obstacle(config) is None
