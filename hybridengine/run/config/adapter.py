"""What the PEFT adapter that a LoRA run starts from sets: rank, scale and adapted layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hybridengine.run.errors import ConfigError, located

_KEY = "model.lora_adapter_path"
# Entries of adapter_config.json whose adapter is more than W + (alpha / r) B A of every target.
_PLAIN: tuple[Any, ...] = ("", "none", None, False, [], {})
_NOT_PLAIN = (
    *("use_dora", "use_rslora", "use_qalora", "use_bdlora", "bias", "lora_bias", "rank_pattern"),
    *("alpha_pattern", "modules_to_save", "layers_to_transform", "exclude_modules"),
    *("trainable_token_indices", "layer_replication", "alora_invocation_tokens"),
)


def adapter_settings(path: str) -> dict[str, Any]:
    """Return native key → value of the adapter in the PEFT folder `path`; reads no weights.

    Raises ConfigError for a folder without an adapter, and for one that is no plain LoRA.
    """
    folder = Path(path).expanduser()
    file = folder / "adapter_config.json"
    try:
        config = json.loads(file.read_text())
        rank, alpha, targets = (config[name] for name in ("r", "lora_alpha", "target_modules"))
    except FileNotFoundError:
        raise ConfigError(
            f"{_KEY} {located(folder)} has no adapter_config.json; give the folder of a PEFT "
            "adapter"
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{_KEY}: {located(file)} is no PEFT LoRA: {error!r}") from None
    others = [f"{name}={config[name]}" for name in _NOT_PLAIN if config.get(name) not in _PLAIN]
    parameters = set(config.get("target_parameters") or ())
    linear = {name for name in parameters if name.endswith(".weight")}  # of a linear layer
    if linear and isinstance(targets, str):
        others.append(f"target_modules={targets} and target_parameters={sorted(linear)}")
    if (kind := config.get("peft_type", "LORA")) != "LORA":
        others.append(f"peft_type={kind}")
    if others:
        raise ConfigError(
            f"{_KEY} {str(folder)!r} has {', '.join(others)}, but only a plain LoRA can be "
            "trained on; merge it into the model (PEFT's merge_and_unload) and leave the key out"
        )
    if not isinstance(targets, str):
        targets = tuple(sorted({*(targets or ()), *(n.removesuffix(".weight") for n in linear)}))
    return {
        "model.lora_rank": rank,
        "model.lora_alpha": float(alpha),
        "model.target_modules": targets,
        "model.target_parameters": tuple(sorted(parameters - linear)),
    }
