"""What belongs to a checkpoint and is not trained: copied unchanged from where the model came from.

A checkpoint can contain tensors that transformers' model does not have, such as the layers of
multi-token prediction (MTP) that vLLM speculates with and config.json declares.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.utils.hub import cached_file

from hybridengine.model.parameters import meta_copy
from hybridengine.writes import note_progress

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED, _PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# Own code, vocabularies and terms of use; transformers writes the other files of a model itself.
_FILES = ("*.py", "*.model", "*.tiktoken", "tekken.json", "LICENSE*", "NOTICE*", "USE_POLICY*")


def source_folder(name: str | None) -> Path | None:
    """Return the local folder of a model, given by its path or hub name; None if there is none."""
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    config = cached_file(
        name,
        "config.json",
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if config is None else Path(config).parent


def unread_tensors(model: PreTrainedModel, folder: Path) -> dict[Path, list[str]]:
    """Return the tensors in the weight files of `folder` that `model` does not read, by file.

    A tensor that `model` has under another name, or as a part of a fused one, is read, and so is
    one that is tied to another.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    own = model.state_dict()

    def is_read(name: str) -> bool:
        for renaming in ((renamings, converters), ([], [])):
            if rename_source_key(name, *renaming, model.base_model_prefix, own)[0] in own:
                return True
        return False

    unread = defaultdict[Path, list[str]](list)
    for name, file in sorted(_stored_tensors(folder).items()):
        if not is_read(name):
            unread[file].append(name)
    return dict(unread)


def source_bytes(model: PreTrainedModel, source: str | None) -> int:
    """Return the bytes of the tensors of `source` (path or hub name) that `model` does not read."""
    if (folder := source_folder(source)) is None:
        return 0
    total = 0
    for file, names in unread_tensors(meta_copy(model, torch.bfloat16), folder).items():
        with _opened(file) as tensors:
            total += sum(tensors(name).nbytes for name in names)
    return total


def copy_source(folder: Path, unread: Mapping[Path, Sequence[str]], out: Path) -> None:
    """Add tensors of the model in `folder`, unchanged, and its other files to the model in `out`.

    unread: see `unread_tensors`.
    """
    for pattern in _FILES:
        for file in folder.glob(pattern):
            if file.is_file() and not (out / file.name).exists():
                shutil.copyfile(file, out / file.name)
    added, written = dict[str, str](), _stored_tensors(out).keys()
    for i, (file, unread_names) in enumerate(unread.items()):
        names = [name for name in unread_names if name not in written]
        part = f"unread-{i}.safetensors"
        with _opened(file) as tensors:
            contents = {}
            for name in names:
                note_progress()
                contents[name] = tensors(name).contiguous()
            save_file(contents, out / part, metadata={"format": "pt"})
        added |= dict.fromkeys(names, part)
    if added:
        _number_files(out, added)


def _number_files(out: Path, added: Mapping[str, str]) -> None:
    """Rename the weight files of `out`, and those of `added`, to the shards of one index."""
    index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
    if (out / _INDEX).is_file():
        index = json.loads((out / _INDEX).read_text())
    else:
        index["weight_map"] = dict.fromkeys(_stored_tensors(out), _WEIGHTS)
    weight_map = {name: str(file) for name, file in index["weight_map"].items()} | dict(added)
    files = list(dict.fromkeys(weight_map.values()))
    new = {f: f"model-{i:05}-of-{len(files):05}.safetensors" for i, f in enumerate(files, 1)}
    for file in files:
        (out / file).rename(out / f"{file}.moved")
    for file, name in new.items():
        (out / f"{file}.moved").rename(out / name)
    sizes = [file.stat().st_size for file in map(out.joinpath, new.values())]
    index["metadata"]["total_size"] = sum(sizes)
    index["weight_map"] = {name: new[file] for name, file in sorted(weight_map.items())}
    (out / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _stored_tensors(folder: Path) -> dict[str, Path]:
    """Return the tensors in the weight files that transformers reads in `folder`, with the file."""
    for single, index in ((_WEIGHTS, _INDEX), (_PICKLED, _PICKLED_INDEX)):
        if (file := folder / single).is_file():
            if single == _WEIGHTS:
                with safe_open(file, "pt") as opened:
                    return dict.fromkeys(opened.keys(), file)
            return dict.fromkeys(_unpickled(file), file)
        if (folder / index).is_file():
            names = json.loads((folder / index).read_text())["weight_map"]
            return {name: folder / file for name, file in names.items()}
    return {}


@contextmanager
def _opened(file: Path) -> Iterator[Callable[[str], torch.Tensor]]:
    """Give the function that reads a tensor of a weight file by its name."""
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as opened:
            yield opened.get_tensor
    else:
        yield _unpickled(file).__getitem__


def _unpickled(file: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = torch.load(file, "cpu", weights_only=True, mmap=True)
    return tensors
