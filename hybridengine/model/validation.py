"""Checks of a pretrained model from its name and files alone, before any weight is loaded."""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)
from transformers.utils import logging

from hybridengine.model.extensions import image_model_types, stateful_model_types
from hybridengine.model.stored import (
    WRAPPERS,
    check_quantization,
    check_scales,
    language_model,
    reading,
    trained_config,
)
from hybridengine.run.config.common import TrainedModelConfig
from hybridengine.run.errors import ModelError, located, reason_of

HUB_SECONDS = 8.0
# Rotary types whose limit grows by their factor. Not of dynamic NTK: vLLM has no positions beyond.
_SCALED = {"linear", "ntk"}
_FIXED_ROPE = ("default", "linear", "llama3")  # their frequencies do not depend on the length
_PACKABLE = {"full_attention", "sliding_attention"}  # layers without state between tokens
_SPARSE = re.compile(r"indexed|sparse|compressed")


_configs: dict[tuple[str, bytes, bool], PretrainedConfig] = {}


def takes_images(config: PretrainedConfig) -> bool:
    """Return whether the model of `config` is a vision-language model that can run packed."""
    return config.model_type in image_model_types()


def auto_class(config: PretrainedConfig) -> Any:
    """Return the class of transformers that loads the model of `config`, as by its config.json."""
    return AutoModelForImageTextToText if takes_images(config) else AutoModelForCausalLM


def meta_model(config: PretrainedConfig, trust_remote_code: bool = False, **options: Any) -> Any:
    """Build the model of `config` on the meta device; options: of `from_config`."""
    with torch.device("meta"):
        return auto_class(config).from_config(
            config, trust_remote_code=trust_remote_code, **options
        )


def check_model(
    path: str,
    trust_remote_code: bool = False,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    keep_vision_tower: bool = False,
) -> PretrainedConfig:
    """Return the configuration of the causal language model at `path`, a folder or a hub name.

    It is that of the model that is trained (`hybridengine.model.stored`).

    overrides: entries of the language model's part of config.json → other values.
    keep_vision_tower: also where a job of text trains the language model alone.

    Reads no weights and does not wait for the network: an unreachable hub is an error within
    seconds, unless the model is in the local cache.

    Raises:
        ModelError: the path does not exist, has no weights or none that can be dequantized, or is
            not a causal language model of text or of text and images, or cannot run packed
            (recurrent layers, attention outside AttentionInterface), or an override has no such
            entry or would change the rotary frequencies.
    """
    local = Path(path)
    if local.is_dir():
        _check_folder(local)
    elif local.exists():
        raise ModelError(f"model path {path!r} is a file; expected a folder with config.json")
    elif path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ModelError(f"model path {located(path)} does not exist; check the path")
    stored = _read_config(path, trust_remote_code)
    _override(path, stored.get_text_config(), overrides)
    check_quantization(path, stored)
    config = trained_config(stored, keep_vision_tower)
    _check_config(path, config, trust_remote_code)
    return config


def config_of(model: TrainedModelConfig) -> PretrainedConfig:
    """Return the configuration of a job's model, see `check_model`."""
    keep = model.keep_vision_tower
    return check_model(model.path, model.trust_remote_code, model.config_overrides, keep)


def read_pretrained(
    path: str,
    config: PretrainedConfig,
    trust_remote_code: bool = False,
    loader: Any = None,
    **options: Any,
) -> Any:
    """Return what transformers' `from_pretrained` returns for the model that is trained.

    config: of `check_model`.
    loader: a class of transformers; by default that of `config`.
    options: of `from_pretrained`.
    """
    with reading(path, _read_config(path, trust_remote_code), config) as arguments:
        found = (loader or auto_class(config)).from_pretrained(
            path, trust_remote_code=trust_remote_code, **arguments, **options
        )
    if options.get("dtype") is torch.float32:  # in which experts stored in MXFP4 do not come
        (found[0] if isinstance(found, tuple) else found).float()
    return found


def check_weights(
    path: str, config: PretrainedConfig, trust_remote_code: bool = False, classifier: bool = False
) -> None:
    """Check the weight files of the model in the folder `path` without reading the weights.

    The headers of safetensors files show files that are truncated or empty. transformers' own
    loader, run on the meta device, shows tensors that are missing or have the wrong shape, whatever
    it renames or fuses.

    classifier: load it as a sequence classifier. A hub name (not a folder) is not checked.

    Raises:
        ModelError: a file that is truncated or unreadable, a tensor that is missing or has another
            shape than the configuration gives it.
    """
    folder = Path(path)
    if not folder.is_dir():
        return
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):  # checks that the tensors of its header fill the file
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"weight file {str(file)!r} ({file.stat().st_size} bytes) cannot be read: {error}; "
                "it is truncated, empty or a Git LFS pointer: copy it again"
            ) from None
    check_scales(folder)
    loader = AutoModelForSequenceClassification if classifier else None
    with _silent_transformers():
        try:
            model, report = read_pretrained(
                path,
                config,
                trust_remote_code,
                loader,
                device_map="meta",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except Exception as error:  # torch, pickle and safetensors raise many types
            reason = f"{type(error).__name__}: {reason_of(error)}"
            raise ModelError(f"model {path!r}: its weights cannot be read ({reason})") from error
    described = f"model {path!r} ({type(model).__name__})"
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, expected = mismatched[0]
        raise ModelError(
            f"{described}: {name} has shape {list(stored)} in the weight files, expected "
            f"{list(expected)} from config.json ({len(mismatched)} such tensors); config.json and "
            "weights belong to different models"
        )
    parameters = {name for name, _ in model.named_parameters()}
    if missing := sorted(parameters & set(report["missing_keys"])):
        raise ModelError(
            f"{described}: the weight files lack {missing[0]} ({len(missing)} tensors missing); "
            "use a complete checkpoint"
        )


def longest_sequence(config: PretrainedConfig) -> int | None:
    """Return the number of positions that the model of `config` supports; None without a limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is None:
        return None
    factors = [r.get("factor") for r in rotary_parameters(config) if r.get("rope_type") in _SCALED]
    return int(limit * max([1.0, *filter(None, factors)]))


def head_size(config: PretrainedConfig) -> int:
    """Return the dimensions of a head of the model's attention."""
    text = config.get_text_config()
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def is_own_code(config: PretrainedConfig, trust_remote_code: bool) -> bool:
    """Return whether the model of `config` is code that comes with it, whatever its type."""
    return trust_remote_code and auto_class(config).__name__ in (
        getattr(config, "auto_map", None) or {}
    )


def carried_state(config: PretrainedConfig) -> str | None:
    """Return which layers of transformers' model carry a state along the sequence, or None."""
    layers = getattr(config.get_text_config(), "layer_types", None)
    if others := set(layers or ()) - _PACKABLE:
        reason = "read the sequence in packed order"
        if all(_SPARSE.search(kind) for kind in others):
            reason = "select or compress keys among all tokens of a batch"
        return f"its layers of type {sorted(others)} {reason}; supported are {sorted(_PACKABLE)}"
    model_class = _model_class(config)
    if model_class is not None and model_class._is_stateful and layers is None:
        return f"{model_class.__name__} carries a state along the sequence"
    return None


def packing_obstacle(config: PretrainedConfig, trust_remote_code: bool = False) -> str | None:
    """Return why the configuration or the class of a model cannot run packed; None if they can."""
    if is_own_code(config, trust_remote_code):  # seen when it is built
        layers = getattr(config.get_text_config(), "layer_types", None)
        return carried_state(config) if layers is not None else None
    if config.get_text_config().model_type in stateful_model_types():
        return None
    if (state := carried_state(config)) is not None:
        return state
    model_class = _model_class(config)
    if model_class is not None and not model_class._supports_attention_backend:
        return (
            f"{model_class.__name__} does not call its attention through transformers' "
            "AttentionInterface"
        )
    return None


def check_sequence_parallel(config: PretrainedConfig, size: int) -> None:
    """Raise ModelError if the model of `config` does not support sequence parallelism of `size`."""
    text = config.get_text_config()
    num_heads = getattr(text, "num_attention_heads", None) or text.num_heads  # of Mamba alone
    if num_heads % size:
        raise ModelError(
            f"ulysses_sequence_parallel_size is {size}, which does not divide the model's "
            f"{num_heads} attention heads; choose a divisor"
        )


def rotary_parameters(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Return the rotary parameters of `config`, of every kind of layer if they differ."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return [r for r in (rope, *rope.values()) if isinstance(r, dict)]


def long_rope_limit(config: PretrainedConfig) -> int | None:
    """Return the longest sequence with LongRoPE's short factors; None without LongRoPE."""
    longs = [r for r in rotary_parameters(config) if r.get("rope_type") == "longrope"]
    return min((r["original_max_position_embeddings"] for r in longs), default=None)


def _override(path: str, config: PretrainedConfig, overrides: Mapping[str, Any]) -> None:
    for name, value in overrides.items():
        if not hasattr(config, name):
            raise ModelError(
                f"override_config.{name}: the config.json of {path!r} has no such entry"
            )
        setattr(config, name, value)
    scaled = {r.get("rope_type") for r in rotary_parameters(config)} - {None, *_FIXED_ROPE}
    if "max_position_embeddings" in overrides and scaled:
        raise ModelError(
            f"override_config.max_position_embeddings: the rotary embedding of {path!r} "
            f"({scaled.pop()}) is scaled by it; edit config.json instead"
        )


def _read_config(path: str, trust_remote_code: bool) -> PretrainedConfig:
    """Return a copy of the configuration, which a process reads once; a folder's if it changes."""
    file = Path(path, "config.json")
    key = path, file.read_bytes() if file.is_file() else b"", trust_remote_code
    if key not in _configs:
        _configs[key] = _parse_config(path, trust_remote_code)
    return copy.deepcopy(_configs[key])


def _parse_config(path: str, trust_remote_code: bool) -> PretrainedConfig:
    outcome: list[PretrainedConfig | Exception] = []

    def read() -> None:
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
            config.get_text_config()  # raises if there are several, as of an encoder and a decoder
            outcome.append(config)
        except Exception as error:
            outcome.append(error)

    # In a thread, because no time-out of the hub client covers name resolution.
    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(None if Path(path).is_dir() else HUB_SECONDS)
    result = outcome[0] if outcome else TimeoutError(f"no answer in {HUB_SECONDS:g} s")
    if not isinstance(result, Exception):
        return result
    if Path(path).is_dir():
        raise ModelError(
            f"model {path!r}: config.json cannot be used: {reason_of(result)}"
        ) from result
    raise ModelError(
        f"model {path!r} is not a local folder in {Path.cwd()}, and the Hugging Face hub has no "
        f"such model ({reason_of(result)}); check the name, give a local folder, or download the "
        "model first"
    ) from result


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model path {str(folder)!r} has no config.json; expected a Hugging Face model folder"
        )
    for index in folder.glob("*.index.json"):
        try:
            files = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(
                f"model path {str(folder)!r}: {index.name} is not a valid index of weight files "
                f"({type(error).__name__}: {error}); copy it again"
            ) from None
        if missing := sorted(str(f) for f in files if not (folder / str(f)).is_file()):
            raise ModelError(
                f"model path {str(folder)!r} lacks {missing[0]!r} named in {index.name} "
                f"({len(missing)} of {len(files)} weight files missing); copy it again"
            )
    if not any(f for kind in ("*.safetensors", "pytorch_model*.bin") for f in folder.glob(kind)):
        raise ModelError(
            f"model path {str(folder)!r} has config.json but no weights; expected *.safetensors or "
            "pytorch_model.bin (convert a GGUF file first)"
        )


def _check_config(path: str, config: PretrainedConfig, trust_remote_code: bool) -> None:
    is_unknown = config.model_type in WRAPPERS and language_model(config) is None
    is_packable = takes_images(config) and not is_unknown
    if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING and not is_packable:
        raise ModelError(
            f"model {path!r} ({config.model_type}) also takes images, video or audio, which cannot "
            f"be packed, nor can its language model ({config.get_text_config().model_type}) alone; "
            f"use a vision-language model of a type in {list(image_model_types())}, or of "
            f"{list(WRAPPERS)} for text alone"
        )
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    model_class = _model_class(config)
    if model_class is None and not (remote and trust_remote_code):
        hint = "; set model.trust_remote_code=true to run its own code" if remote else ""
        raise ModelError(
            f"model {path!r} ({config.model_type}) is not a causal language model{hint}"
        )
    if obstacle := packing_obstacle(config, trust_remote_code):
        raise ModelError(f"model {path!r} ({config.model_type}) cannot run packed: {obstacle}")


def _model_class(config: PretrainedConfig) -> Any:
    """Return the class of transformers with the layers of `config`'s model; None: its own code.

    Of a vision-language model it is that of the language model, if that has a class of its own.
    """
    text = config.get_text_config() if takes_images(config) else config
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)] if takes_images(config) else None


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Turn off transformers' loading reports and progress bars."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
