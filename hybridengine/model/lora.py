"""LoRA with PEFT: apply adapters to a model, read their shards.

Hu et al. 2021, arXiv 2106.09685. PEFT's layers are injected into the unchanged model before it is
sharded; base parameters keep their names everywhere else (sync, export).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hybridengine.errors import ModelError
from hybridengine.model.parameters import is_finite
from hybridengine.sharding.adapter import Adapter


def apply_lora(
    model: PreTrainedModel,
    rank: int,
    alpha: float,
    target_modules: str | Sequence[str] = "all-linear",
    adapter_path: str | None = None,
) -> None:
    """Freeze `model` and add an adapter, scaled by alpha / rank, to each target; in place.

    target_modules: "all-linear" (every linear layer except the output head) or module names, of
      which the last part is enough. Call it before sharding; the model may be on the meta device.
    adapter_path: PEFT folder with the initial factors (safetensors), which a model on the meta
      device does not read; None: the update starts at zero. Adapters have the dtype of the weights
      (float32 in `load_causal_lm`).

    Raises:
        ModelError: a rank below 1, a target that matches no module, one that is no linear layer, a
        head whose weight is tied to the embedding, or an initial adapter of other layers or shapes.
    """
    from peft import LoraConfig, inject_adapter_in_model

    if rank < 1:
        raise ModelError(f"lora_rank: got {rank}, expected at least 1")
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    if targets == "all-linear":  # PEFT's all-linear adapts fused experts as well
        linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
        targets = [n for n, m in linear.items() if m is not model.get_output_embeddings()]
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # PEFT computes alpha / r
        target_modules=targets,
        task_type="CAUSAL_LM",
    )
    # Fused experts are parameters; PEFT adapts them too, and `adapter_shards` below refuses that.
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    for target in targets if isinstance(targets, list) else ():
        if not any(f".{name}".endswith(f".{target}") for name in names):
            raise ModelError(
                f"target_modules: got {target_modules!r}, but no module of the model is called "
                f"{target!r}"
            )
    try:
        inject_adapter_in_model(config, model, low_cpu_mem_usage=model.device.type == "meta")
    except ValueError as error:
        raise ModelError(f"target_modules: got {target_modules!r}: {error}") from None
    adapter_shards(model)
    for name, layer in lora_layers(model):
        if layer.get_base_layer().weight is model.get_input_embeddings().weight:
            raise ModelError(
                f"target_modules: {name!r} is, or shares its weight with, the embedding, which an "
                "adapter of a linear layer does not change; remove it"
            )
    if adapter_path is not None and model.device.type != "meta":
        _load_factors(model, adapter_path)


def check_lora(
    config: PretrainedConfig,
    rank: int,
    target_modules: str | Sequence[str],
    adapter_path: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Raise the ModelError of `apply_lora` for the causal LM of `config`; reads no weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    apply_lora(model, rank, 1.0, target_modules)
    if adapter_path is not None:
        with _open_factors(model, adapter_path):
            pass


def _load_factors(model: nn.Module, path: str) -> None:
    """Copy the factors in the PEFT folder `path` into the adapters of `model`."""
    with _open_factors(model, path) as (file, factors), torch.no_grad():
        for name, parameter in factors.items():
            tensor = file.get_tensor(name)
            if not is_finite(tensor):
                raise ModelError(f"lora_adapter_path {path!r}: {name} contains NaN or infinity")
            parameter.copy_(tensor)


@contextmanager
def _open_factors(model: nn.Module, path: str) -> Iterator[tuple[Any, dict[str, nn.Parameter]]]:
    """Yield (open safetensors file, its tensor name → parameter), of equal names and shapes."""
    factors = {
        f"base_model.model.{name}.{part}.weight": getattr(layer, part)["default"].weight
        for name, layer in lora_layers(model)
        for part in ("lora_A", "lora_B")
    }
    file_path = Path(path) / "adapter_model.safetensors"
    try:
        file = safe_open(file_path, "pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"lora_adapter_path {path!r}: adapter_model.safetensors cannot be read ({error}); "
            "save the adapter with safe_serialization=True"
        ) from None
    with file:
        names = set(file.keys())
        if other := sorted(names ^ factors.keys()):
            where = "the adapter" if other[0] in names else "the model with target_modules"
            raise ModelError(
                f"lora_adapter_path {path!r} has {len(names)} factors, and the model with "
                f"target_modules has {len(factors)}: {other[0]!r} is in {where} only; leave "
                "target_modules out, and give the model that the adapter was trained on"
            )
        for name, parameter in factors.items():
            shape = tuple(file.get_slice(name).get_shape())
            if shape != parameter.shape:
                raise ModelError(
                    f"lora_adapter_path {path!r}: {name} is {list(shape)}, the model needs "
                    f"{list(parameter.shape)}; give the model that the adapter was trained on"
                )
        yield file, factors


def adapter_shards(model: nn.Module) -> dict[str, Adapter]:
    """Return base parameter → its adapter, whose factors are the model's own shards.

    Empty for a model without LoRA.

    Raises:
        ModelError: an adapter that is more than W + scale · B A (DoRA, a bias, several at once), or
            that is merged into its weight.
    """
    adapters: dict[str, Adapter] = {}
    for name, layer in lora_layers(model):
        key = layer.active_adapters[0] if len(layer.active_adapters) == 1 else None
        plain = type(layer).__name__ == "Linear" and key in layer.lora_A
        if not plain or key in layer.lora_variant or layer.lora_bias[key]:
            raise ModelError(
                f"the adapter of {name!r} is no plain LoRA of one linear layer "
                f"({type(layer).__name__}, active: {layer.active_adapters}); expected one active "
                "adapter without DoRA or bias, on neither fused experts nor an embedding"
            )
        if layer.merged:
            raise ModelError(
                f"the adapter of {name!r} is merged into its weight already, so a sync or an "
                "export would add it twice; call unmerge_adapter() first"
            )
        left, right = layer.lora_B[key].weight.detach(), layer.lora_A[key].weight.detach()
        if layer.fan_in_fan_out:  # the weight is stored transposed
            left, right = right.t(), left.t()
        adapters[f"{name}.weight"] = Adapter(left, right, layer.scaling[key])
    return adapters


def columns_of(name: str) -> str:
    """Return the parameter, by its name without adapters, whose columns parameter `name` has."""
    return name.replace(".base_layer.", ".").replace(".lora_A.default.", ".")


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[nn.Module]:
    """Let the model compute without its adapters: the reference policy of a LoRA run."""
    layers = [layer for _, layer in lora_layers(model)]
    for layer in layers:  # enable_adapters() would set requires_grad, which FSDP2 reads only once
        layer._disable_adapters = True
    try:
        yield model
    finally:
        for layer in layers:
            layer._disable_adapters = False


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (module name in the unadapted model, `peft.tuners.lora.LoraLayer`) of every adapter."""
    if not hasattr(model, "peft_config"):
        return
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name.replace("_checkpoint_wrapped_module.", ""), module
