"""LoRA by PEFT: a frozen base, trainable low-rank adapters, and what leaves the trainer of them.

Hu et al. 2021, arXiv 2106.09685. The layers are PEFT's, put into the unchanged model before it is
sharded; base parameters keep their names everywhere else (sync, export).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.pytorch_utils import Conv1D

from hybridengine.errors import ModelError
from hybridengine.runtime.rank_zero import run_on_rank0
from hybridengine.sharding.adapter import Adapter, gathered
from hybridengine.storage import new_folder

__all__ = [
    "adapter_shards",
    "adapters_disabled",
    "apply_lora",
    "check_target_modules",
    "columns_of",
    "save_adapter",
]


def apply_lora(
    model: nn.Module, rank: int, alpha: float, target_modules: str | Sequence[str] = "all-linear"
) -> None:
    """Freeze `model` and put an adapter, scaled by alpha / rank, on each target; in place.

    target_modules: "all-linear" (every linear layer but the output head) or module names, of which
    the last part is enough. Call it before sharding, on the meta device too; the update begins at
    zero. Adapters have the dtype of the weights, which is float32 in `load_causal_lm`.

    Raises:
        ModelError: a rank below 1, a target that no module has, one that is no linear layer, or a
        head whose weight is tied to the embedding.
    """
    from peft import LoraConfig, inject_adapter_in_model

    if rank < 1:
        raise ModelError(f"lora_rank: got {rank}, expected at least 1")
    targets = target_modules if isinstance(target_modules, str) else list(target_modules)
    if targets == "all-linear":  # PEFT would take fused experts as well
        linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
        targets = [n for n, m in linear.items() if m is not model.get_output_embeddings()]
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=targets, task_type="CAUSAL_LM", lora_dropout=0.0
    )
    on_meta = any(p.is_meta for p in model.parameters())
    # Fused experts are parameters, which PEFT adapts as well and `adapter_shards` then refuses.
    names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
    for target in targets if isinstance(targets, list) else ():
        if not any(f".{name}".endswith(f".{target}") for name in names):
            raise ModelError(
                f"target_modules: got {target_modules!r}, but no module of the model is called "
                f"{target!r}"
            )
    try:
        inject_adapter_in_model(config, model, low_cpu_mem_usage=on_meta)
    except ValueError as error:
        raise ModelError(f"target_modules: got {target_modules!r}: {error}") from None
    adapter_shards(model)
    for name, layer in _layers(model):
        if layer.get_base_layer().weight is model.get_input_embeddings().weight:
            raise ModelError(
                f"target_modules: {name!r} is, or shares its weight with, the embedding, which an "
                "adapter of a linear layer cannot follow; leave it out"
            )


def check_target_modules(
    config: PretrainedConfig,
    target_modules: str | Sequence[str],
    trust_remote_code: bool = False,
) -> None:
    """Raise ModelError where `apply_lora` would, for the causal LM of `config`; without weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    apply_lora(model, 1, 1.0, target_modules)


def adapter_shards(model: nn.Module) -> dict[str, Adapter]:
    """Base parameter's name → its adapter, of live shards; empty for a model without LoRA.

    Raises:
        ModelError: an adapter that is more than W + scale · B A (DoRA, a bias, several at once), or
            that is merged into its weight.
    """
    adapters = {}
    for name, layer in _layers(model):
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
    """The parameter, as named without adapters, whose columns the parameter `name` has."""
    return name.replace(".base_layer.", ".").replace(".lora_A.default.", ".")


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, the model (given) computes as its frozen base: the reference of a LoRA run."""
    layers = [layer for _, layer in _layers(model)]
    for layer in layers:  # enable_adapters() would set requires_grad, which FSDP2 reads only once
        layer._disable_adapters = True
    try:
        yield model
    finally:
        for layer in layers:
            layer._disable_adapters = False


@torch.no_grad()
def save_adapter(model: nn.Module, out_dir: str | Path) -> None:
    """Write the adapter, float32, as a folder that `peft.PeftModel.from_pretrained` loads.

    The folder appears under its name when it is complete, see `storage.new_folder`.

    All ranks call. Raises ModelError on every rank if rank 0 cannot write.
    """
    import json

    from safetensors.torch import save_file

    kept = {}
    for name, layer in _layers(model):
        for part in ("lora_A", "lora_B"):
            whole = gathered(getattr(layer, part)[layer.active_adapters[0]].weight.detach())
            if dist.get_rank() == 0:
                kept[f"base_model.model.{name}.{part}.weight"] = whole.cpu().contiguous()

    (config,) = model.peft_config.values()
    described = config.to_dict() | {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "target_modules": sorted(name for name, _ in _layers(model)),
        "base_model_name_or_path": _base_name(model.config.name_or_path),
        "inference_mode": True,
    }

    def write() -> None:
        with new_folder(Path(out_dir).absolute()) as out:
            save_file(kept, out / "adapter_model.safetensors", metadata={"format": "pt"})
            text = json.dumps(described, indent=2, sort_keys=True, default=str)
            (out / "adapter_config.json").write_text(text)

    run_on_rank0(write, f"saving the adapter to {str(out_dir)!r}")


def _base_name(name: str) -> str:
    """A folder's absolute path, so that the adapter is used from anywhere; a hub name as it is."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name of the module it stands for, PEFT's layer)."""
    if not hasattr(model, "peft_config"):
        return
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name.replace("_checkpoint_wrapped_module.", ""), module
