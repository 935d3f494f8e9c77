"""What the trainer decides for every model type of transformers, on a tiny random checkpoint.

Types are those that transformers lists for causal language models and for image-text-to-text. A
checkpoint goes the way of a job's: configuration, weights, packed against alone, choices; then a
forward and a backward pass of a packed batch on the model as jobs load it.
"""

from __future__ import annotations

import copy
import resource
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from hybridengine.run.config import load_config
from hybridengine.run.errors import ConfigError, ModelError
from tests.architectures.catalogue import CATALOGUE
from tests.extras.vision.vision_models import VISION, vision_config
from tests.tiny_models import SIZES

__all__ = ["Answer", "ask", "model_types"]

_MAX_PARAMETERS = 50_000_000
_LAYERS = dict(num_hidden_layers=2)
_MIXTURE = dict(
    **dict(num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4),
    **dict(num_experts_per_tok=2, moe_topk=2, moe_k=2, n_group=1, topk_group=1),
    **dict(moe_intermediate_size=64, shared_expert_intermediate_size=64, n_shared_experts=1),
)
_LATENT = dict(
    **dict(q_lora_rank=48, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32),
    **dict(v_head_dim=32, num_key_value_heads=4),
)
_TOWER = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
# From the smallest on, as sizes may depend on each other.
_CHANGES: tuple[dict[str, Any], ...] = (
    SIZES | _MIXTURE,
    SIZES | _MIXTURE | _LATENT,
    SIZES,
    {k: x for k, x in SIZES.items() if k != "head_dim"} | _MIXTURE,
    {"vocab_size": SIZES["vocab_size"], **_LAYERS},
    _LAYERS,
    {},
)
# What has no default, none that runs, or none that is published.
_CODEC = dict(text_encoder={"model_type": "t5"}, audio_encoder={"model_type": "encodec"})
_ROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 6, 6])
_PARTS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)
    },
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "musicgen": _CODEC | {"decoder": {}},
    "musicgen_melody": _CODEC | {"decoder": {}},
    "vision-encoder-decoder": dict(encoder={"model_type": "vit"}, decoder={"model_type": "gpt2"}),
    "xmod": dict(is_decoder=True, default_language="en_XX"),
}
# As transformers saves kimi_k25, and as it is published.
_RENAMED = "language_model.model.blocks", "language_model.model.layers"


@dataclass(frozen=True)
class Answer:
    """What the trainer does with a type.

    refusal: its sentence; "" if it trains.
    trained: the type of the model that is trained, a language model's of a wrapper.
    unshared: why sequences do not share the computation of a prefix; "" if they do.
    exact: the value of rollout.exact from which on log-probs are exact, "auto" or "on"; "": none.
    peak_mib, cpu_s: of the process that has asked.
    """

    kind: str
    refusal: str = ""
    trained: str = ""
    unshared: str = ""
    exact: str = ""
    peak_mib: int = 0
    cpu_s: float = 0.0


def model_types() -> list[str]:
    """Return the types that transformers lists, in alphabetical order."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def ask(rank: int, world_size: int, kind: str, folder: str) -> Answer:
    """Return what the trainer decides for a type (the body of a world of one rank).

    Where the trainer says that a forward fails, sizes may be to blame: the next ones are tried.
    """
    answer = Answer(kind, "transformers cannot build a model of it from its configuration alone")
    for i, config in enumerate(_configs(kind)):
        answer = _decide(kind, config, Path(folder, str(i)))
        if "its forward fails" not in answer.refusal:
            break
    used = resource.getrusage(resource.RUSAGE_SELF)
    return replace(answer, peak_mib=used.ru_maxrss >> 10, cpu_s=used.ru_utime + used.ru_stime)


def _configs(kind: str) -> Iterator[PretrainedConfig]:
    """Yield configurations of a type, small ones first."""
    if kind in VISION:
        yield vision_config(kind)
    if (given := _tiny(kind)) is not None:
        yield AutoConfig.for_model(kind, **given)
    for changes in _CHANGES:
        parts = copy.deepcopy(_PARTS.get(kind, {}))
        try:
            config = AutoConfig.for_model(kind, **parts, **changes)
            if (text := getattr(config, "text_config", None)) is not None:
                config = _wrapper(kind, text.model_type, changes)
        except Exception:  # of any type: sizes that do not go together
            continue
        yield config


def _tiny(kind: str) -> dict[str, Any] | None:
    """Return the settings of a type in the catalogue, the first if there are several."""
    found = [entry for entry in CATALOGUE.values() if entry.model_type == kind]
    return found[0].overrides | found[0].sub_configs if found else None


def _wrapper(kind: str, text_type: str, changes: dict[str, Any]) -> PretrainedConfig:
    text = _tiny(text_type) or changes if changes else {}
    parts = {"text_config": {"model_type": text_type, **text}}
    default = AutoConfig.for_model(kind)
    if changes and (vision := getattr(default, "vision_config", None)) is not None:
        parts["vision_config"] = {"model_type": vision.model_type, **_TOWER}
    return AutoConfig.for_model(kind, **parts)


def _decide(kind: str, config: PretrainedConfig, folder: Path) -> Answer:
    """Let the trainer decide as it does before and while it loads a model."""
    from hybridengine.model.packing_check import check_packing
    from hybridengine.model.validation import check_model, check_weights
    from hybridengine.train.choices import Machine, decide

    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    weights, path = folder / "model.safetensors", str(folder)
    weights.touch()
    try:
        model = check_model(path)
        check_packing(path, model)
        weights.unlink()
        _save_weights(config, folder)
        check_weights(path, model)
        _train(path)
        machine, found = Machine(0, fast_bfloat16=False, has_vllm=True), {}
        for exact in ("auto", "on"):
            job = [f"model.path={path}", "data.train_files=rows.jsonl", f"rollout.exact={exact}"]
            try:
                found[exact] = decide(load_config(None, job), model, machine)
            except ConfigError:
                break
    except ModelError as error:
        return Answer(kind, str(error).replace(path, "m"))
    chosen = found["auto"]
    exact = "auto" if chosen.exact else "on" if "on" in found else ""
    unshared = "" if chosen.prefix else chosen.reasons["prefix"]
    return Answer(kind, "", model.model_type, unshared, exact)


def _save_weights(config: PretrainedConfig, folder: Path) -> None:
    """Write random weights, biases and norms among them."""
    has_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    auto: Any = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    with torch.device("meta"):
        size = sum(x.numel() for x in auto.from_config(copy.deepcopy(config)).parameters())
    assert size <= _MAX_PARAMETERS, f"{config.model_type}: {size:,} parameters are not tiny"
    torch.manual_seed(0)
    model = auto.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {name.replace(*_RENAMED): x for name, x in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def _train(path: str) -> None:
    """Compute the gradients of a packed batch on the model as jobs load it."""
    from hybridengine.model import pack_rollouts, packed_log_probs, sharding_mesh
    from tests.loading import load_sharded
    from tests.tensors import whole

    model = load_sharded(path, sharding_mesh("cpu", 1), torch.float32)
    pairs = [([5, 6, 7], [8, 9, 10, 11]), ([12, 13], [14, 15])]
    log_probs, _ = packed_log_probs(model, pack_rollouts(pairs))
    log_probs.sum().backward()
    norm = sum(whole(x.grad).square().sum() for x in model.parameters() if x.grad is not None)
    assert log_probs.isfinite().all() and 0 < norm < float("inf"), (log_probs, norm)
