"""LoRA with PEFT: apply adapters to a model, read their shards.

Hu et al. 2021, arXiv 2106.09685. PEFT's layers are injected into the unchanged model before it is
sharded; base parameters keep their names everywhere else (sync, export).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hybridengine.model.extensions import SharedFactors, mixture_extension
from hybridengine.model.parameters import free_gathered, is_finite, unwrapped_name
from hybridengine.model.stored import names_in_whole
from hybridengine.model.validation import meta_model, takes_images
from hybridengine.run.errors import ModelError
from hybridengine.sync.adapter import Adapter


def apply_lora(
    model: PreTrainedModel,
    rank: int,
    alpha: float,
    target_modules: str | Sequence[str] = "all-linear",
    adapter_path: str | None = None,
    target_parameters: Sequence[str] = (),
    share_expert_adapters: SharedFactors = "none",
) -> None:
    """Freeze `model` and add an adapter, scaled by alpha / rank, to each target; in place.

    target_modules: "all-linear" (every linear layer of the language model except the output head)
      or module names, of which the last part is enough, or PEFT's pattern of full names, which are
      those in the checkpoint's class. Call it before sharding; the model may be on the meta device.
    adapter_path: PEFT folder with the initial factors (safetensors), which a model on the meta
      device does not read; None: the update starts at zero. Adapters have the dtype of the weights
      (float32 in `load_causal_lm`).
    target_parameters: weights of fused experts to adapt, such as experts.down_proj: each expert
      gets factors of its own of `rank`, and the model the experts of the `MixtureExtension`.
    share_expert_adapters: which factors all experts of a layer have in common: none, outer (A of
      gate_up_proj and B of down_proj), or all. Files have a copy for every expert, as PEFT needs.

    Raises:
        ModelError: a rank below 1, a target that matches no module, one that is no linear layer, a
        head whose weight is tied to the embedding, target parameters that are not of experts, or an
        initial adapter of other layers or shapes.
    """
    from peft import LoraConfig, inject_adapter_in_model

    if rank < 1:
        raise ModelError(f"lora_rank: got {rank}, expected at least 1")
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    if targets == "all-linear":  # PEFT's all-linear adapts fused experts as well
        body = model.get_decoder() if takes_images(model.config) else model
        language = set(body.modules()) - {model.get_output_embeddings()}
        targets = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and module in language
        ]
    modules = [name for name, _ in model.named_modules()]
    weights = [name for name, _ in model.named_parameters()]
    outer = names_in_whole(model.config)
    full = {outer(name): name for name in [*modules, *weights]}
    if isinstance(targets, str):
        targets = [full[x] for x in map(outer, modules) if re.fullmatch(targets, x)] or targets
    else:
        targets = [full.get(target, target) for target in targets]
    target_parameters = [full.get(target, target) for target in target_parameters]
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type]  # PEFT computes alpha / r
        target_modules=targets,
        target_parameters=target_parameters or None,
        task_type="CAUSAL_LM",
    )
    for target in targets if isinstance(targets, list) else ():
        if not any(f".{name}".endswith(f".{target}") for name in modules):
            fused = next((name for name in weights if f".{name}".endswith(f".{target}")), None)
            raise ModelError(
                f"target_modules: got {target_modules!r}, but no module of the model is called "
                f"{target!r}" + (f"; name {fused} in target_parameters" if fused else "")
            )
    if target_parameters:
        mixture_extension("model.target_parameters").check_targets(model, target_parameters)
    try:
        # By the type of a mixture PEFT takes gate_proj, up_proj and down_proj for experts, as they
        # were in transformers 4, though linear layers of shared experts have these names too.
        with patch.object(model.config, "model_type", ""):
            inject_adapter_in_model(config, model, low_cpu_mem_usage=model.device.type == "meta")
    except ValueError as error:
        raise ModelError(f"target_modules: got {target_modules!r}: {error}") from None
    adapter_shards(model)
    if target_parameters:
        mixture = mixture_extension("model.target_parameters")
        mixture.use_grouped_adapters(model, share_expert_adapters)
    for name, layer in lora_layers(model):
        if (
            not _is_of_experts(layer)
            and layer.get_base_layer().weight is model.get_input_embeddings().weight
        ):
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
    target_parameters: Sequence[str] = (),
    share_expert_adapters: SharedFactors = "none",
) -> None:
    """Raise the ModelError of `apply_lora` for the causal LM of `config`; reads no weights."""
    model = meta_model(config, trust_remote_code)
    experts = target_parameters, share_expert_adapters
    apply_lora(model, rank, 1.0, target_modules, None, *experts)
    if adapter_path is not None:
        with _open_factors(model, adapter_path):
            pass


class Factor(NamedTuple):
    """A factor of an adapter, and its form in PEFT's files.

    dim: the dimension of the rank.
    copies: how often the files have it: a factor that all experts share, once for every expert.
    """

    parameter: nn.Parameter
    dim: int
    copies: int

    @property
    def stored_shape(self) -> tuple[int, ...]:
        rows, columns = self.parameter.shape
        return (rows * self.copies, columns) if self.dim == 0 else (rows, columns * self.copies)

    def stored(self, full: torch.Tensor) -> torch.Tensor:
        """Return the full factor as in a file."""
        if self.dim == 0:
            return full.repeat(self.copies, 1)
        return full.repeat_interleave(self.copies, 1)

    def read(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the full factor of a tensor in a file."""
        return stored[: self.parameter.shape[0]] if self.dim == 0 else stored[:, :: self.copies]


def peft_factors(model: PreTrainedModel) -> dict[str, Factor]:
    """Return the factors of all adapters by their name in PEFT's files."""
    factors, outer = {}, names_in_whole(model.config)
    for name, layer in lora_layers(model):
        key = layer.active_adapters[0]
        for dim, part in enumerate(("lora_A", "lora_B")):
            parameter = getattr(layer, part)[key].weight
            width = layer.r[key] * getattr(layer, "num_experts", 1)
            copies = width // parameter.shape[dim]
            stored = f"base_model.model.{outer(name)}.{part}.weight"
            factors[stored] = Factor(parameter, dim, copies)
    return factors


def _load_factors(model: PreTrainedModel, path: str) -> None:
    """Copy the factors in the PEFT folder `path` into the adapters of `model`."""
    with _open_factors(model, path) as (file, factors), torch.no_grad():
        for name, factor in factors.items():
            tensor = file.get_tensor(name)
            if not is_finite(tensor):
                raise ModelError(f"lora_adapter_path {path!r}: {name} contains NaN or infinity")
            value = factor.read(tensor)
            if not torch.equal(factor.stored(value), tensor):
                raise ModelError(
                    f"lora_adapter_path {path!r}: {name} differs between experts, but "
                    "share_expert_adapters gives all of them one; set it to none"
                )
            factor.parameter.copy_(value)


@contextmanager
def _open_factors(model: PreTrainedModel, path: str) -> Iterator[tuple[Any, dict[str, Factor]]]:
    """Yield (open safetensors file, its tensor name → factor), of equal names and shapes."""
    factors = peft_factors(model)
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
        for name, factor in factors.items():
            shape = tuple(file.get_slice(name).get_shape())
            if shape != factor.stored_shape:
                raise ModelError(
                    f"lora_adapter_path {path!r}: {name} is {list(shape)}, the model needs "
                    f"{list(factor.stored_shape)}; give the model that the adapter was trained on"
                )
        yield file, factors


def adapter_shards(model: nn.Module) -> dict[str, Adapter]:
    """Return base parameter → its adapter, whose factors are the model's own shards.

    Empty for a model without LoRA.

    Raises:
        ModelError: an adapter that is more than W + scale · B A of a linear layer or of fused
            experts (DoRA, a bias, several at once), or that is merged into its weight.
    """
    free_gathered(model)
    adapters: dict[str, Adapter] = {}
    for name, layer in lora_layers(model):
        key = layer.active_adapters[0] if len(layer.active_adapters) == 1 else None
        of_experts = _is_of_experts(layer)
        plain = (of_experts or type(layer).__name__ == "Linear") and key in layer.lora_A
        if not plain or key in layer.lora_variant or layer.lora_bias[key]:
            raise ModelError(
                f"the adapter of {name!r} is no plain LoRA of one linear layer "
                f"({type(layer).__name__}, active: {layer.active_adapters}); expected one active "
                "adapter without DoRA or bias, not on an embedding or another single parameter"
            )
        if layer.merged:
            raise ModelError(
                f"the adapter of {name!r} is merged into its weight already, so a sync or an "
                "export would add it twice; call unmerge_adapter() first"
            )
        if of_experts:
            adapter = mixture_extension("model.target_parameters").adapter_of(layer)
            adapters[unwrapped_name(f"{name}.{layer.parameter_name}")] = adapter
            continue
        left, right = layer.lora_B[key].weight.detach(), layer.lora_A[key].weight.detach()
        if layer.fan_in_fan_out:  # the weight is stored transposed
            left, right = right.t(), left.t()
        dtype = getattr(layer, "merged_in", None)  # of `use_exact_operators`
        adapters[f"{name}.weight"] = Adapter(left, right, layer.scaling[key], computed_in=dtype)
    return adapters


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


def has_experts(model: nn.Module) -> bool:
    """Return whether the model has fused experts of transformers' experts interface."""
    return any(hasattr(module, "is_transposed") for module in model.modules())


def _is_of_experts(layer: Any) -> bool:
    """Return whether PEFT's `layer` adapts one weight [E, ...] of fused experts."""
    experts = layer.get_base_layer()
    return (
        hasattr(layer, "parameter_name")
        and getattr(layer, "num_experts", 1) == getattr(experts, "num_experts", None)
        and hasattr(experts, "is_transposed")
    )


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (module name in the unadapted model, `peft.tuners.lora.LoraLayer`) of every adapter."""
    if not hasattr(model, "peft_config"):
        return
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name.replace("_checkpoint_wrapped_module.", ""), module
