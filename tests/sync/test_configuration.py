"""Configurations of a trained model and of its engine: which differences are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridengine.run.messages import decode, encode
from hybridengine.sync.checks import (
    check_configuration,
    config_differences,
    in_words,
    plain_values,
)
from hybridengine.sync.layout import LayoutError
from tests.tiny_models import TINY, tiny_config


def test_differing_keys_are_named() -> None:
    trained = {"size": 4, "text": {"heads": 2, "tied": True}, "dtype": "float32", "only": 1}
    engine = {"size": 4, "text": {"heads": 4, "tied": False}, "dtype": "bfloat16"}
    assert in_words(config_differences(trained, engine)) == (
        " Their configurations differ in text.heads (2 in the trained model, 4 in the engine), "
        "text.tied (True in the trained model, False in the engine)."
    )
    assert in_words(config_differences(trained, trained)) == ""


def test_yarn_of_latent_attention_has_another_name_in_vllm() -> None:
    trained, engine = ({"rope": {"rope_type": name}} for name in ("yarn", "deepseek_yarn"))
    assert config_differences(trained, engine) == {}
    assert config_differences({"rope": {"rope_type": "default"}}, engine)


@pytest.mark.parametrize("kind", TINY)
def test_each_number_that_generation_computes_with_is_refused(kind: str) -> None:
    """All of these leave every shape as it is; None and lists are values, too."""
    trained = tiny_config(kind).to_dict()
    rope = dict(trained["rope_parameters"])
    scaled = {**rope, "rope_type": "yarn", "factor": 4.0}
    changes: list[dict] = [
        {"rms_norm_eps": 0.5},
        {"rope_parameters": scaled},
        {"rope_parameters": {**rope, "rope_theta": 31.0}},
        {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 999},
        {"hidden_act": "relu", "hidden_activation": "relu"},
        {"layer_types": ["other"]},
        {"sliding_window": 7},
        {"num_experts_per_tok": 77, "attn_logit_softcapping": 3.5, "rms_norm_eps": 0.5},
    ]
    for change in changes:
        known = {key: value for key, value in change.items() if key in trained}
        assert not known or config_differences(trained, {**trained, **known}), known
        if known and "layer_types" not in known:
            with pytest.raises(LayoutError, match="another function of the trained weights"):
                check_configuration(config_differences(trained, {**trained, **known}))


@pytest.mark.parametrize("kind", TINY)
def test_what_generation_does_not_compute_with_may_differ(kind: str) -> None:
    trained = tiny_config(kind).to_dict()
    harmless = {
        "dtype": "float16",
        "use_cache": False,
        "pad_token_id": 5,
        "eos_token_id": [1, 2],
        "attention_dropout": 0.5,
        "initializer_range": 9.0,
        "max_position_embeddings": 123,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.7,
        "transformers_version": "4.0",
        "tie_word_embeddings": not trained.get("tie_word_embeddings", False),
        "sliding_window": None,
        "architectures": ["Other"],
    }
    check_configuration(config_differences(trained, {**trained, **harmless}))


@pytest.mark.parametrize("kind", TINY)
def test_a_configuration_that_comes_by_a_message_is_the_same(kind: str) -> None:
    trained = tiny_config(kind).to_dict() | {"windows": (1, (2, 3)), "dtype": torch.float32}
    sent = plain_values(trained)
    assert "dtype" not in sent and sent["windows"] == [1, [2, 3]]
    arrived = decode(encode(sent), dict[str, Any], "the configuration")
    assert arrived == plain_values(arrived) == sent
    assert config_differences(trained, arrived) == {}
    arrived["rope_parameters.rope_theta"] = 31.0
    assert [*config_differences(trained, arrived)] == ["rope_parameters.rope_theta"]


def test_the_length_matters_where_rope_is_scaled_by_it() -> None:
    trained = {"rope_parameters": {"rope_type": "dynamic"}, "max_position_embeddings": 64}
    assert config_differences(trained, {**trained, "max_position_embeddings": 128})
    assert not config_differences(trained, {**trained, "rope_parameters": {"rope_type": "dynamic"}})
