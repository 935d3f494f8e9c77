"""Write a sharded model as a Hugging Face folder that transformers and vLLM load."""

from __future__ import annotations

import copy
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hybridengine.model.errors import ModelError
from hybridengine.model.parameters import original_class, stored_tensors
from hybridengine.model.rank_zero import run_on_rank0

__all__ = ["check_disk_space", "save_pretrained"]


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
            f"output folder {str(out_dir)!r} has {free / 2**30:.2f} GiB free where "
            f"{num_bytes / 2**30:.2f} GiB are needed; free some space or choose another folder"
        )


def save_pretrained(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out_dir: str | Path,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write weights (in `dtype`), config, generation config and tokenizer; all ranks call.

    Parameters are gathered one at a time in `dtype` and kept by rank 0 alone, in CPU memory. The
    folder appears under its name when it is complete, replacing what was there.

    Raises:
        ModelError: on every rank, if rank 0 cannot write; nothing that looks whole is left.
    """
    out = Path(out_dir).absolute()
    stored = stored_tensors(model)
    num_bytes = sum(tensor.numel() for tensor in stored.values()) * dtype.itemsize
    doing = f"saving the model to {str(out)!r}"
    run_on_rank0(lambda: check_disk_space(out, num_bytes), doing)
    state_dict = _gather(stored, dtype)
    run_on_rank0(lambda: _write(model, tokenizer, state_dict, out, dtype), doing)


@torch.no_grad()
def _gather(
    stored: dict[str, DTensor | torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Whole tensors on rank 0's CPU; empty elsewhere."""
    whole = {}
    for name, tensor in stored.items():
        if tensor.is_floating_point():
            tensor = tensor.to(dtype)  # before the gather: half the bytes
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if dist.get_rank() == 0:
            whole[name] = tensor.cpu()
    return whole


def _write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state_dict: dict[str, torch.Tensor],
    out: Path,
    dtype: torch.dtype,
) -> None:
    partial = out.with_name(f".{out.name}.partial")
    replaced = out.with_name(f".{out.name}.replaced")
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    with torch.device("meta"):
        skeleton = original_class(model)(copy.deepcopy(model.config)).to(dtype)
    if model.can_generate():
        skeleton.generation_config = model.generation_config
    try:
        partial.mkdir(parents=True)
        skeleton.save_pretrained(partial, state_dict=state_dict)
        tokenizer.save_pretrained(partial)
        if out.exists():
            out.rename(replaced)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)
