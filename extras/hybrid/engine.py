"""What vLLM computes of models with linear attention, asked of its own classes and operators."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from hybridengine.engine.vllm.environment import prepare_environment, without_torchvision
from hybridengine.run.config.rl import RolloutConfig
from hybridengine.run.errors import ModelError

__all__ = ["check_vllm", "cpu_obstacle"]

# Of vLLM's layers with a state: what they call on a CPU. Those of no entry run on GPUs alone.
_CPU_OPERATORS = {
    "QwenGatedDeltaNetAttention": ["chunk_gated_delta_rule_cpu", "causal_conv1d_fwd_cpu"],
    "MambaMixer2": ["mamba_chunk_scan_fwd_cpu", "selective_state_update_cpu"],
    "MambaMixer": ["selective_scan_fwd", "selective_state_update_cpu"],
    "ShortConv": ["causal_conv1d_update_cpu_vec"],
}
_DELTA_NET_SIZES = ((64, 64), (128, 128))  # of keys and values on a CPU
_NO_LIMIT = (0.0, float("inf"))


def check_vllm(rollout: RolloutConfig, exact: bool, text: PretrainedConfig) -> None:
    """Raise ModelError for what vLLM does not compute as the trainer does, or not at all.

    exact: its operators are the trainer's (`hybridengine.hybrid.exact`).
    """
    _check_mamba2(text)
    if rollout.servers:  # whoever starts them chooses the rest
        return
    if rollout.enable_prefix_caching and not rollout.enable_chunked_prefill:
        raise ModelError(
            "rollout.enable_chunked_prefill is false, but vLLM caches prefixes of a model of type "
            f"{text.model_type!r} only in chunks; set it to true, or "
            "rollout.enable_prefix_caching to false"
        )
    if torch.cuda.is_available():
        return
    if (obstacle := cpu_obstacle(text)) is not None:
        raise ModelError(f"rollout.name is vllm, {obstacle}; set rollout.name=hf")
    layers = _layers(text) or ()
    if "MambaMixer2" in layers and rollout.enable_prefix_caching:
        raise ModelError(
            "rollout.enable_prefix_caching is true, but Mamba2 in vLLM on a CPU returns no states "
            "from inside a prompt, which the cache would hold; set it to false"
        )
    if rollout.engine_kwargs.vllm.get("speculative_config"):
        if exact:
            raise ModelError(
                "rollout.exact is on and rollout.engine_kwargs.vllm.speculative_config set, but "
                "linear attention of drafted tokens has no exact operator; remove one of the two"
            )
        if "QwenGatedDeltaNetAttention" not in layers:
            raise ModelError(
                "rollout.engine_kwargs.vllm.speculative_config is set, but the states of "
                f"{', '.join(layers)} after rejected drafts are not examined on a CPU; remove it"
            )
        if rollout.enable_prefix_caching:
            raise ModelError(
                "rollout.engine_kwargs.vllm.speculative_config is set and "
                "rollout.enable_prefix_caching true, but vLLM has no kernel for CPUs that copies "
                "the states of drafted tokens into the cache; set it to false"
            )
    if rollout.quantization and not rollout.enforce_eager:
        raise ModelError(
            f"rollout.quantization is {rollout.quantization} and rollout.enforce_eager false, but "
            f"with a model of type {text.model_type!r} on a CPU log-probs of a compiled engine "
            "differ from run to run; set rollout.enforce_eager to true"
        )
    if "QwenGatedDeltaNetAttention" in layers and not exact:
        _check_delta_net(rollout.dtype, text)


def cpu_obstacle(text: PretrainedConfig) -> str | None:
    """Return why vLLM's build for CPUs does not run the model of `text`; None if it does."""
    layers = _layers(text)
    if layers is None:
        return f"which has no model {_model_class(text).__name__}"
    for layer in layers:
        names = _CPU_OPERATORS.get(layer, ["any operator"])
        if missing := [name for name in names if not hasattr(torch.ops._C, name)]:
            return f"whose build for CPUs lacks {', '.join(missing)} for its layer {layer}"
    return None


def _model_class(text: PretrainedConfig) -> type:
    """Return transformers' class, by whose name vLLM knows the model."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    return model_class


def _layers(text: PretrainedConfig) -> list[str] | None:
    """Return the layers with a state of vLLM's model of `text`, by class; None: it has no model."""
    prepare_environment()
    import vllm._custom_ops  # noqa: F401, its operators
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.models import registry

    name = _model_class(text).__name__
    if name not in (known := registry.ModelRegistry.models):
        return None
    with without_torchvision():
        model_class = known[name].load_model_cls()
    parts = vars(sys.modules[model_class.__module__]).values()
    return [x.__name__ for x in parts if isinstance(x, type) and issubclass(x, MambaBase)]


def _check_mamba2(text: PretrainedConfig) -> None:
    """Raise ModelError for settings that vLLM's Mamba2 does not read as transformers' does."""
    module = sys.modules[_model_class(text).__module__]
    groups = getattr(text, "mamba_n_groups", getattr(text, "n_groups", 1))
    norms = [x for name, x in vars(module).items() if name.endswith("RMSNormGated")]
    codes = [norm.__init__.__code__ for norm in norms]
    by_group = all({"group_size", "n_groups"} & {*code.co_varnames} for code in codes)
    normed = getattr(text, "mamba_rms_norm", True)
    limit = tuple(getattr(text, "time_step_limit", None) or _NO_LIMIT)
    faults = {
        f"{groups} groups with one norm over all": groups > 1 and normed and not by_group,
        "mamba_norm_before_gate": normed and getattr(text, "mamba_norm_before_gate", False),
        f"time_step_limit {limit}": limit != _NO_LIMIT,
    }
    if found := [fault for fault, is_found in faults.items() if is_found]:
        raise ModelError(
            f"rollout.name is vllm, whose Mamba2 does not compute {', '.join(found)} of the model "
            f"of type {text.model_type!r} as transformers does; set rollout.name=hf"
        )


def _check_delta_net(dtype: str, text: PretrainedConfig) -> None:
    if dtype != "bfloat16":
        raise ModelError(
            "rollout.name is vllm, whose Gated DeltaNet on a CPU computes in bfloat16, and "
            f"rollout.dtype is {dtype}; set it to bfloat16, or rollout.name=hf"
        )
    sizes = text.linear_key_head_dim, text.linear_value_head_dim
    if sizes not in _DELTA_NET_SIZES:
        raise ModelError(
            "rollout.name is vllm, whose Gated DeltaNet on a CPU has linear_key_head_dim and "
            f"linear_value_head_dim of {_DELTA_NET_SIZES}, and they are {sizes}; set "
            "rollout.name=hf"
        )
