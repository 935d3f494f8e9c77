"""A checkpoint as a Hugging Face folder, on one CPU without any process group.

Reads our checkpoints (DCP) and verl's `model_world_size_W_rank_R.pt` shards, the latter as data
only: nothing in them is executed.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hybridengine.checkpoint.folders import CheckpointError, SavedCheckpoint, open_checkpoint
from hybridengine.checkpoint.pretrained import check_disk_space, write_pretrained
from hybridengine.checkpoint.resume import TENSORS, resume_plan
from hybridengine.errors import ModelError
from hybridengine.model.parameters import parameter_shards
from hybridengine.storage import MANIFEST, foreign_file, new_folder, read_manifest

__all__ = ["export_checkpoint"]

_ADAPTER = "adapter"  # the folder of a LoRA run's checkpoint
_SHARD = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")


def export_checkpoint(
    path: str | Path,
    out: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    trust_remote_code: bool = False,
    as_adapter: bool = False,
) -> Path:
    """Write the model of a checkpoint to `out`, and read it back to compare.

    path: a checkpoint, or a run's folder, whose newest checkpoint is taken. Returns the checkpoint.
    as_adapter: of a LoRA run, write the adapter as PEFT loads it; else it is merged into its base.

    Raises:
        CheckpointError: no complete and undamaged checkpoint there, or one that does not fit its
            own config.
        ModelError: `out` cannot be written, holds files that no export wrote, or does not read
            back as it was written.
    """
    out = _checked_out(Path(out))
    found = _locate(Path(path))
    folder = found.path if isinstance(found, SavedCheckpoint) else found
    if isinstance(found, SavedCheckpoint):
        found.verify()
    try:
        if as_adapter:
            _write_adapter(folder, out)
        else:
            _write_model(folder, out, dtype, trust_remote_code)
    except OSError as error:
        raise ModelError(f"exporting {folder} to {str(out)!r} failed: {error}") from error
    return folder


def _checked_out(out: Path) -> Path:
    """`out` as an absolute path; ModelError if writing there would delete what is not ours."""
    out = out.expanduser().resolve()
    if Path.cwd().is_relative_to(out):
        raise ModelError(
            f"output folder {str(out)!r} is, or holds, the working folder; name a new folder"
        )
    if out.exists() and not out.is_dir():
        raise ModelError(f"output folder {str(out)!r} is a file; name a new folder")
    if out.is_dir() and any(out.iterdir()):
        other = foreign_file(out)
        if other is None and "exported_from" not in read_manifest(out):
            other = MANIFEST  # of a checkpoint, or of what a run has written
        if other is not None:
            raise ModelError(
                f"output folder {str(out)!r} holds {other!r}, which no export wrote; name a new "
                "folder (only an earlier export is replaced)"
            )
    return out


def _write_adapter(folder: Path, out: Path) -> None:
    if not (folder / _ADAPTER).is_dir():
        raise CheckpointError(f"checkpoint {folder} holds no adapter: all weights were trained")
    with new_folder(out, exported_from=str(folder)) as partial:
        shutil.copytree(
            folder / _ADAPTER, partial, dirs_exist_ok=True, ignore=shutil.ignore_patterns(MANIFEST)
        )


def _write_model(folder: Path, out: Path, dtype: torch.dtype, trust_remote_code: bool) -> None:
    described = folder / "huggingface"
    if not (described / "config.json").is_file():
        raise CheckpointError(f"checkpoint {folder} has no huggingface/config.json")
    config = AutoConfig.from_pretrained(described, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    wanted = parameter_shards(model)
    check_disk_space(out, sum(tensor.numel() for tensor in wanted.values()) * dtype.itemsize)
    if any(folder.glob("model_world_size_*")):
        found = _read_verl(folder, wanted)
    elif (folder / _ADAPTER).is_dir():
        found = _merge_adapter(folder, trust_remote_code)
    else:
        found = _read_dcp(folder, wanted, dtype)
    tensors = {n: x.to(dtype) if x.is_floating_point() else x for n, x in found.items()}
    tokenizer = AutoTokenizer.from_pretrained(described, trust_remote_code=trust_remote_code)
    generation = None
    if (described / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(described)
    write_pretrained(
        type(model), config, generation, tokenizer, tensors, out, exported_from=str(folder)
    )


def _locate(path: Path) -> SavedCheckpoint | Path:
    """A checkpoint, or the newest of a run; or the folder of verl's with the tensors."""
    for candidate in (path, path / "actor"):
        if any(candidate.glob("model_world_size_*_rank_*.pt")):
            return candidate
    latest = path / "latest_checkpointed_iteration.txt"  # verl's
    if latest.is_file():
        step = latest.read_text().strip()
        if not step.isdigit():
            raise CheckpointError(f"{latest} holds {step[:40]!r}, expected the number of a step")
        return _locate(path / f"global_step_{step}")
    plan = resume_plan(path, "auto")
    if plan.skipped:
        raise CheckpointError(
            f"{plan.skipped[-1]}; to export an older one name it, as {plan.candidates[0].path}"
        )
    return plan.candidates[0] if plan.candidates else open_checkpoint(path)


def _read_dcp(
    folder: Path, wanted: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    tensors = {
        name: torch.empty(x.shape, dtype=dtype if x.is_floating_point() else x.dtype)
        for name, x in wanted.items()
    }
    saved = {f"actor/model/{name}": tensor for name, tensor in tensors.items()}
    try:
        with warnings.catch_warnings():  # "assuming the intent is to load in a single process": yes
            warnings.simplefilter("ignore", UserWarning)
            dcp.load(saved, checkpoint_id=folder / TENSORS, no_dist=True)
    except dcp.CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"checkpoint {folder} does not hold its model: {reason}") from error
    return tensors


def _merge_adapter(folder: Path, trust_remote_code: bool) -> dict[str, torch.Tensor]:
    from peft import PeftConfig, PeftModel

    path = PeftConfig.from_pretrained(str(folder / _ADAPTER)).base_model_name_or_path
    try:
        base = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"checkpoint {folder} adapts the model {path!r}, which cannot be read: {error}"
        ) from None
    return parameter_shards(PeftModel.from_pretrained(base, folder / _ADAPTER).merge_and_unload())


def _read_verl(folder: Path, wanted: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    files = {}
    for file in folder.glob("model_world_size_*_rank_*.pt"):
        world, rank = map(int, _SHARD.fullmatch(file.name).groups())
        files[rank] = file
    if sorted(files) != list(range(world)):
        raise CheckpointError(f"checkpoint {folder} has shards of ranks {sorted(files)} of {world}")
    try:
        shards = [
            torch.load(files[rank], map_location="cpu", weights_only=True, mmap=True)
            for rank in range(world)
        ]
    except (UnpicklingError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"checkpoint {folder} has a shard that is no data: {reason}"
        ) from None
    if missing := sorted(set(wanted) - set(shards[0])):
        raise CheckpointError(f"checkpoint {folder} lacks {missing[0]!r}, one of {len(missing)}")
    return {
        name: _joined(folder, name, [shard[name] for shard in shards], like.shape)
        for name, like in wanted.items()
    }


def _joined(folder: Path, name: str, parts: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """The whole tensor; parts[r] is rank r's: a DTensor, or a plain piece along dim 0."""
    first = parts[0]
    if isinstance(first, DTensor):
        mesh = first.device_mesh.mesh
        local = [part.to_local() for part in parts]
        whole = _join_mesh(local, mesh, first.placements)
    else:
        whole = first if first.shape == shape else torch.cat(parts)
    if whole.shape != shape:
        raise CheckpointError(
            f"checkpoint {folder}: {name} is {tuple(whole.shape)}, expected {tuple(shape)}"
        )
    return whole


def _join_mesh(local: list[torch.Tensor], ranks: torch.Tensor, placements) -> torch.Tensor:
    """Concatenate over each dimension of `ranks` that shards, take any where it replicates."""
    if not placements:
        return local[int(ranks)]
    placement, *inner = placements
    if not isinstance(placement, Shard):
        return _join_mesh(local, ranks[0], inner)
    return torch.cat([_join_mesh(local, part, inner) for part in ranks], dim=placement.dim)
