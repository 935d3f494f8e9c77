"""Export a checkpoint of this package or of verl as a Hugging Face folder.

Runs in one process on a CPU, without a process group.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from omegaconf import OmegaConf
from torch.distributed.tensor import DTensor, Placement, Shard
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PretrainedConfig

from hybridengine.model.lora import adapter_shards, apply_lora
from hybridengine.model.parameters import parameter_shards, saved_dtypes
from hybridengine.model.stored import trained_config
from hybridengine.model.validation import (
    check_model,
    meta_model,
    read_pretrained,
    takes_images,
)
from hybridengine.run import storage
from hybridengine.run.config.settings import adapter_settings
from hybridengine.run.errors import CheckpointError, ModelError, reason_of
from hybridengine.train.checkpoint.folders import CONFIG, open_checkpoint, resume_plan
from hybridengine.train.checkpoint.pretrained import unread_bytes, write_pretrained
from hybridengine.train.checkpoint.tensors import TENSORS, MetadataReader

_ADAPTER = "adapter"  # folder of a LoRA run's checkpoint
_VERL_SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


def export_checkpoint(
    path: str | Path,
    out: str | Path,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    as_adapter: bool = False,
) -> Path:
    """Write the model of a checkpoint to `out`, then read it back and compare.

    path: a checkpoint, or a run's folder, whose newest checkpoint is taken. Return the checkpoint.
    dtype: that of the weights; None: trainer.save_dtype of the checkpoint's config.
    as_adapter: write the adapter of a LoRA run in PEFT's format; otherwise it is merged.

    Raises:
        CheckpointError: there is no complete and undamaged checkpoint, or it does not fit its own
            config.
        ModelError: `out` cannot be written, contains files that no export wrote, or does not
            load as it was written.
    """
    out = _check_out(Path(out))
    folder = _find_checkpoint(Path(path))
    try:
        if as_adapter:
            _export_adapter(folder, out)
        else:
            _export_model(folder, out, dtype, trust_remote_code)
    except OSError as error:
        raise ModelError(f"exporting {folder} to {str(out)!r} failed: {error}") from error
    return folder


def _check_out(out: Path) -> Path:
    """Return `out` as an absolute path; ModelError if an export there would delete other files."""
    out = out.expanduser().resolve()
    if Path.cwd().is_relative_to(out):
        raise ModelError(
            f"output folder {str(out)!r} is, or contains, the working directory; name a new folder"
        )
    if out.exists() and not out.is_dir():
        raise ModelError(f"output folder {str(out)!r} is a file; name a new folder")
    if out.is_dir() and any(out.iterdir()):
        foreign = storage.find_foreign_file(out)
        if foreign is None and "exported_from" not in storage.read_manifest(out):
            foreign = storage.MANIFEST  # a checkpoint, or the output of a run
        if foreign is not None:
            raise ModelError(
                f"output folder {str(out)!r} contains {foreign!r}, which no export wrote; name a "
                "new folder (only an earlier export is replaced)"
            )
    return out


def _find_checkpoint(path: Path) -> Path:
    """Return the folder of a verified checkpoint, the newest one of a run, or verl's shards."""
    if verl_folder := _find_verl_folder(path):
        return verl_folder
    plan = resume_plan(path, "auto")
    if plan.skipped:
        raise CheckpointError(
            f"{plan.skipped[-1]}; to export an older one, name it, e.g. {plan.candidates[0].path}"
        )
    if not plan.candidates and (folder := _exported(path)):
        raise CheckpointError(
            f"{str(path)!r} has no checkpoint, and needs none: {str(folder)!r} is a Hugging Face "
            "folder with the trained weights; use that (trainer.save_freq saves checkpoints)"
        )
    checkpoint = plan.candidates[0] if plan.candidates else open_checkpoint(path)
    checkpoint.verify()
    return checkpoint.path


def _exported(path: Path) -> Path | None:
    """Return the Hugging Face folder with weights that `path` is, or that its run finished with."""
    for folder in (path / "final", path):
        if (folder / "config.json").is_file() and any(folder.glob("*.safetensors")):
            return folder
    return None


def _export_adapter(folder: Path, out: Path) -> None:
    if not (folder / _ADAPTER).is_dir():
        raise CheckpointError(f"checkpoint {folder} has no adapter: all weights were trained")
    with storage.atomic_folder(out, exported_from=str(folder)) as partial:
        shutil.copytree(
            folder / _ADAPTER,
            partial,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns(storage.MANIFEST),
        )


def _export_model(
    folder: Path, out: Path, dtype: torch.dtype | None, trust_remote_code: bool
) -> None:
    hf_folder = folder / "huggingface"
    if not (hf_folder / "config.json").is_file():
        raise CheckpointError(f"checkpoint {folder} has no huggingface/config.json")
    stored: Any = AutoConfig.from_pretrained(hf_folder, trust_remote_code=trust_remote_code)
    config: Any = trained_config(stored, keep_vision_tower=takes_images(stored))
    dtype = dtype or config.dtype or torch.bfloat16
    model = meta_model(config, trust_remote_code)
    expected, dtypes, source = parameter_shards(model), saved_dtypes(model, dtype), _source(folder)
    num_bytes = sum(x.numel() * dtypes[name].itemsize for name, x in expected.items())
    storage.check_disk_space(out, num_bytes + unread_bytes(model, source))
    if any(folder.glob("model_world_size_*")):
        tensors = _read_verl(folder, expected)
    elif (folder / _ADAPTER).is_dir():
        tensors = _merge_adapter(folder, config, trust_remote_code)
    else:
        tensors = _read_dcp(folder, expected, dtypes)
    tensors = {name: x.to(dtypes[name]) for name, x in tensors.items()}
    tokenizer = AutoTokenizer.from_pretrained(hf_folder, trust_remote_code=trust_remote_code)
    if (hf_folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(hf_folder)
    write_pretrained(model, tokenizer, tensors, out, dtype, source, exported_from=str(folder))


def _source(folder: Path) -> str | None:
    """Return path or hub name of the model that the run of a checkpoint trained, if it says so."""
    if not (file := folder / CONFIG).is_file():
        return None
    return OmegaConf.select(OmegaConf.load(file), "model.path")


def _read_dcp(
    folder: Path, expected: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.Tensor]:
    tensors = {name: torch.empty(x.shape, dtype=dtypes[name]) for name, x in expected.items()}
    saved = {f"actor/model/{name}": tensor for name, tensor in tensors.items()}
    try:
        with warnings.catch_warnings():  # "assuming the intent is to load in a single process"
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(saved, storage_reader=MetadataReader(folder / TENSORS), no_dist=True)
    except dcp.CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise CheckpointError(
            f"checkpoint {folder} does not contain its model: {reason}"
        ) from error
    return tensors


def _merge_adapter(
    folder: Path, trained: PretrainedConfig, trust_remote_code: bool
) -> dict[str, torch.Tensor]:
    adapter = str(folder / _ADAPTER)
    path = json.loads((folder / _ADAPTER / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ]
    try:
        is_whole = takes_images(trained)
        config = check_model(path, trust_remote_code, keep_vision_tower=is_whole)
        base = read_pretrained(path, config, trust_remote_code, dtype=torch.float32)
    except (OSError, ValueError, ModelError) as error:
        raise CheckpointError(
            f"checkpoint {folder} is an adapter of the model {path!r}, which cannot be read: "
            f"{error}"
        ) from None
    given = {key.removeprefix("model."): x for key, x in adapter_settings(adapter).items()}
    rank, alpha, modules = given["lora_rank"], given["lora_alpha"], given["target_modules"]
    apply_lora(base, rank, alpha, modules, adapter, given["target_parameters"])
    adapters = adapter_shards(base)
    return {
        name: adapters[name].merge_full(x) if name in adapters else x
        for name, x in parameter_shards(base).items()
    }


def _find_verl_folder(path: Path) -> Path | None:
    """Return the folder with verl's shards: `path`, its `actor`, or that of its latest step."""
    for candidate in (path, path / "actor"):
        if any(_VERL_SHARD.fullmatch(f.name) for f in candidate.glob("model_world_size_*.pt")):
            return candidate
    latest = path / "latest_checkpointed_iteration.txt"
    if not latest.is_file():
        return None
    step = latest.read_text().strip()
    if not step.isdigit():
        raise CheckpointError(f"{latest} contains {step[:40]!r}, expected the number of a step")
    return _find_verl_folder(path / f"global_step_{step}")


def _read_verl(folder: Path, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the full tensors with the names and shapes of `expected`; execute no code of a file.

    Raises:
        CheckpointError: a shard is missing or cannot be loaded with `weights_only`, or a tensor is
            missing or has another shape.
    """
    files, world_size = {}, 0
    for file in folder.iterdir():
        if match := _VERL_SHARD.fullmatch(file.name):
            world_size, rank = map(int, match.groups())
            files[rank] = file
    if sorted(files) != list(range(world_size)):
        raise CheckpointError(
            f"checkpoint {folder} has shards of ranks {sorted(files)}, expected {world_size}"
        )
    try:
        shards = [
            torch.load(files[rank], map_location="cpu", weights_only=True, mmap=True)
            for rank in range(world_size)
        ]
    except (UnpicklingError, RuntimeError) as error:
        raise CheckpointError(
            f"checkpoint {folder} has a shard that cannot be read: {reason_of(error)}"
        ) from None
    if missing := sorted(set(expected) - set(shards[0])):
        raise CheckpointError(f"checkpoint {folder} lacks {missing[0]!r}, one of {len(missing)}")
    tensors = {}
    for name, like in expected.items():
        full = _concatenate([shard[name] for shard in shards], like.shape)
        if full.shape != like.shape:
            raise CheckpointError(
                f"checkpoint {folder}: {name} is {tuple(full.shape)}, expected {tuple(like.shape)}"
            )
        tensors[name] = full
    return tensors


def _concatenate(shards: Sequence[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """Join one tensor's shards by rank: DTensors, or plain shards of dim 0 (or replicas)."""
    first = shards[0]
    if isinstance(first, DTensor):
        local = [shard.to_local() for shard in shards if isinstance(shard, DTensor)]
        return _join_mesh(local, first.device_mesh.mesh, first.placements)
    return first if first.shape == shape else torch.cat(list(shards))


def _join_mesh(
    local: Sequence[torch.Tensor], ranks: torch.Tensor, placements: Sequence[Placement]
) -> torch.Tensor:
    """Concatenate along each mesh dimension that shards; take the first where it replicates."""
    if not placements:
        return local[int(ranks)]
    placement, *inner = placements
    if not isinstance(placement, Shard):
        return _join_mesh(local, ranks[0], inner)
    return torch.cat([_join_mesh(local, part, inner) for part in ranks], dim=placement.dim)
