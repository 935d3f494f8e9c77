"""How the configurations of the trained model and of the engine differ, and what that means."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from hybridengine.sync.layout import LayoutError

# Ends of keys that change neither the weights nor what generation computes from them.
_INCIDENTAL = (
    "_token_id",
    "dtype",
    "version",
    "name_or_path",
    "use_cache",
    "architectures",
    "model_type",
    "attn_implementation",
    "dropout",
    "drop",
    "initializer_range",
    "initializer_factor",
    "init_std",
    "loss_coef",
    "jitter_noise",
    "output_router_logits",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "gradient_checkpointing",
    "problem_type",
    "pretraining_tp",
)
_DESCRIPTIVE = ("id2label", "label2id", "task_specific_params", "auto_map", "quantization_config")
# Where the weights fit, the engine has what it needs: vLLM unties a head that the checkpoint has.
_OF_THE_WEIGHTS = ("tie_word_embeddings",)
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")
_SCALED_BY_LENGTH = ("dynamic", "longrope")  # types of RoPE


def config_differences(trained: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, str]:
    """Return key → values in words, of common configuration keys whose values differ.

    Keys that change neither the weights nor what generation computes are left out. None is a value
    only where it turns something off in the trained model: elsewhere it stands for a default.
    """
    ours, theirs = plain_values(trained), plain_values(engine)
    by_length = any(
        key.endswith("rope_type") and value in _SCALED_BY_LENGTH for key, value in ours.items()
    )
    incidental = _INCIDENTAL if by_length else _INCIDENTAL + _LENGTHS
    return {
        key: f"{value} in the trained model, {theirs[key]} in the engine"
        for key, value in ours.items()
        if not key.endswith(incidental)
        and theirs.get(key, value) != value
        and (theirs[key] is not None or key.endswith("softcapping"))
        and (value is not None or key.endswith(("softcapping", "sliding_window")))
    }


def in_words(differences: Mapping[str, str]) -> str:
    """Return a sentence about `config_differences`, "" where there are none."""
    named = ", ".join(f"{key} ({values})" for key, values in list(differences.items())[:5])
    return f" Their configurations differ in {named}." if named else ""


def check_configuration(differences: Mapping[str, str]) -> None:
    """Raise LayoutError if engine and trained model compute differently from equal weights.

    differences: `config_differences` of models whose weights fit.
    """
    if wrong := {k: v for k, v in differences.items() if not k.endswith(_OF_THE_WEIGHTS)}:
        raise LayoutError(
            "the engine would compute another function of the trained weights, although their "
            f"shapes fit.{in_words(wrong)} Build both from one configuration."
        )


def plain_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return path → value as JSON has it, for a message; what JSON cannot hold is left out."""
    values = {}
    for path, value in _flatten(config):
        with suppress(TypeError):
            values[path] = json.loads(json.dumps(value))
    return values


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if key in _DESCRIPTIVE:
            continue
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
