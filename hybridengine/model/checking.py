"""What can be known about a model from its name alone, before any rank starts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hybridengine.errors import ModelError
from hybridengine.model.weight_files import check_weight_index

__all__ = ["check_model", "longest_sequence"]

_HUB_SECONDS = 8.0
_SCALED = {"linear", "dynamic", "ntk"}  # rotary types whose limit grows by their factor
_PACKABLE = {"full_attention", "sliding_attention"}  # layers without state between tokens


def check_model(path: str, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration of the causal language model at `path`, a folder or a hub name.

    Reads no weights and waits for no network: an unreachable hub is an error within seconds, unless
    the model is in the local cache.

    Raises:
        ModelError: the path does not exist, holds no weights or no causal language model, or one
            that cannot run packed (recurrent layers, attention outside AttentionInterface).
    """
    local = Path(path)
    if local.is_dir():
        _check_folder(local)
    elif local.exists():
        raise ModelError(f"model path {path!r} is a file; expected a folder with config.json")
    elif path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ModelError(f"model {path!r} is no folder here; check the path")
    config = _read_config(path, trust_remote_code)
    _check_config(path, config, trust_remote_code)
    return config


def longest_sequence(config: PretrainedConfig) -> int | None:
    """How many positions the model of `config` was made for, in tokens; None without a limit."""
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if limit is None:
        return None
    rotary: Any = getattr(text, "rope_parameters", None) or {}
    kinds = [kind for kind in (rotary, *rotary.values()) if isinstance(kind, dict)]
    factors = [kind.get("factor") for kind in kinds if kind.get("rope_type") in _SCALED]
    return int(limit * max([1.0, *(factor for factor in factors if factor)]))


def _read_config(path: str, trust_remote_code: bool) -> PretrainedConfig:
    outcome: list[PretrainedConfig | Exception] = []

    def read() -> None:
        try:
            outcome.append(AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code))
        except Exception as error:
            outcome.append(error)

    # A thread bounds what a time-out cannot: name resolution of the hub.
    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    reading.join(None if Path(path).is_dir() else _HUB_SECONDS)
    found = outcome[0] if outcome else TimeoutError(f"no answer in {_HUB_SECONDS:g} s")
    if not isinstance(found, Exception):
        return found
    if Path(path).is_dir():
        raise ModelError(f"model {path!r}: config.json cannot be used: {found}") from found
    raise ModelError(
        f"model {path!r} is no folder here, and the Hugging Face hub gives no such model "
        f"({found}); check the name, give a local folder, or download the model first"
    ) from found


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model path {str(folder)!r} has no config.json; expected a Hugging Face model folder"
        )
    check_weight_index(folder)
    if not any(f for kind in ("*.safetensors", "pytorch_model*.bin") for f in folder.glob(kind)):
        raise ModelError(
            f"model path {str(folder)!r} has config.json but no weights; expected *.safetensors or "
            "pytorch_model.bin (a GGUF file has to be converted first)"
        )


def _check_config(path: str, config: PretrainedConfig, trust_remote_code: bool) -> None:
    remote = "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not (remote and trust_remote_code):
        hint = "; set trust_remote_code to run its own code" if remote else ""
        raise ModelError(f"model {path!r} ({config.model_type}) is no causal language model{hint}")
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"model {path!r} is quantized; training needs the unquantized weights")
    layers = set(getattr(config.get_text_config(), "layer_types", None) or ()) - _PACKABLE
    if layers:
        raise ModelError(
            f"model {path!r} ({config.model_type}) has layers of type {sorted(layers)}, which "
            f"cannot run packed; supported are {sorted(_PACKABLE)}"
        )
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        if model_class._is_stateful or not model_class._supports_attention_backend:
            raise ModelError(
                f"model {path!r} ({model_class.__name__}) does not call its attention through "
                "transformers' AttentionInterface and cannot run packed"
            )
