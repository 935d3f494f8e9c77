"""Write a sharded model as a Hugging Face folder that transformers and vLLM load."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import (
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hybridengine.errors import ModelError
from hybridengine.model.lora import adapter_shards, save_adapter
from hybridengine.model.parameters import name_as_checkpoint, original_class, parameter_shards
from hybridengine.runtime.rank_zero import run_on_rank0
from hybridengine.sharding.adapter import Adapter
from hybridengine.storage import new_folder

__all__ = [
    "check_disk_space",
    "save_description",
    "save_pretrained",
    "write_pretrained",
]


def check_disk_space(out_dir: str | Path, num_bytes: int) -> None:
    """Raise ModelError if `out_dir` cannot be written or its disk has not `num_bytes` free."""
    folder = Path(out_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ModelError(f"output folder {str(out_dir)!r}: {str(folder)!r} is no writable folder")
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ModelError(
            f"output folder {str(out_dir)!r} has {_readable(free)} free where "
            f"{_readable(num_bytes)} are needed; free some space or choose another folder"
        )


def _readable(num_bytes: int) -> str:
    """In the largest unit of which it has at least one: 1000 bytes, 12.3 MiB, 1.5 GiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"


def save_pretrained(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out_dir: str | Path,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write weights (in `dtype`), config, generation config and tokenizer; all ranks call.

    Adapters are merged into what they adapt. Parameters are gathered one at a time in `dtype` and
    kept by rank 0 alone, in CPU memory. The folder appears under its name when it is complete and
    read back, replacing what was there.

    Raises:
        ModelError: on every rank, if rank 0 cannot write; nothing that looks whole is left.
    """
    out = Path(out_dir).absolute()
    stored = parameter_shards(model)
    num_bytes = sum(tensor.numel() for tensor in stored.values()) * dtype.itemsize
    doing = f"saving the model to {str(out)!r}"
    run_on_rank0(lambda: check_disk_space(out, num_bytes), doing)
    state_dict = _gather(stored, adapter_shards(model), dtype)
    run_on_rank0(
        lambda: write_pretrained(
            original_class(model), model.config, _generation(model), tokenizer, state_dict, out
        ),
        doing,
    )


def _save_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out_dir: str | Path
) -> None:
    """All that `save_pretrained` writes but the weights; all ranks call."""

    def write() -> None:
        model.config.save_pretrained(out_dir)
        if (generation := _generation(model)) is not None:
            generation.save_pretrained(out_dir)
        tokenizer.save_pretrained(out_dir)

    run_on_rank0(write, f"saving the model's configuration to {str(out_dir)!r}")


def save_description(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, weights: bool
) -> None:
    """What makes a checkpoint in `folder` one of this model: `huggingface`, with `weights` or
    without, and `adapter` if it has one; all ranks call."""
    (save_pretrained if weights else _save_config)(model, tokenizer, folder / "huggingface")
    if hasattr(model, "peft_config"):
        save_adapter(model, folder / "adapter")


def _generation(model: PreTrainedModel) -> GenerationConfig | None:
    return model.generation_config if model.can_generate() else None


@torch.no_grad()
def _gather(
    stored: dict[str, DTensor | torch.Tensor], adapters: dict[str, Adapter], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Whole tensors on rank 0's CPU; empty elsewhere."""
    whole = {}
    for name, tensor in stored.items():
        if name in adapters:
            tensor = adapters[name].merge_whole(tensor).to(dtype)
        elif tensor.is_floating_point():
            tensor = tensor.to(dtype)  # before the gather: half the bytes
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if dist.get_rank() == 0:
            whole[name] = tensor.cpu()
    return whole


def write_pretrained(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    generation: GenerationConfig | None,
    tokenizer: PreTrainedTokenizerBase,
    state_dict: Mapping[str, torch.Tensor],
    out: Path,
    **origin: str,
) -> None:
    """Write full tensors, named as `parameter_shards` names them, and read them back to compare.

    origin: kept in the folder's manifest, see `storage.seal`.

    Raises:
        ModelError: what transformers loads from the folder is not what was written; nothing is
            left then.
    """
    dtype = next(x.dtype for x in state_dict.values() if x.is_floating_point())
    with torch.device("meta"):
        skeleton = model_class(copy.deepcopy(config)).to(dtype)
    if generation is not None:
        skeleton.generation_config = generation
    name_as_checkpoint(skeleton)
    with new_folder(out, **origin) as partial:
        skeleton.save_pretrained(partial, state_dict=dict(state_dict))
        tokenizer.save_pretrained(partial)
        _compare(model_class, partial, state_dict, dtype)


def _compare(
    model_class: type[PreTrainedModel],
    folder: Path,
    written: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> None:
    model, report = model_class.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    loaded = parameter_shards(model)
    wrong = {name for name, x in loaded.items() if not torch.equal(x, written[name].to(x.dtype))}
    if found := sorted(wrong | set(report["missing_keys"]) | (set(written) - set(loaded))):
        raise ModelError(
            f"the written model does not read back: {len(found)} tensors, such as {found[0]!r}, "
            "are missing, differ or are not finite"
        )
