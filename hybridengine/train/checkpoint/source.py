"""What belongs to a checkpoint and is not trained: copied unchanged from where the model came from.

A checkpoint can contain tensors that transformers' model does not have, such as the layers of
multi-token prediction (MTP) that vLLM speculates with and config.json declares.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
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

from hybridengine.run.storage import note_progress

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED, _PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# Own code, vocabularies and terms of use; transformers writes the other files of a model itself.
_FILES = ("*.py", "*.model", "*.tiktoken", "tekken.json", "LICENSE*", "NOTICE*", "USE_POLICY*")


def copy_files(source: str | None, out: Path) -> None:
    """Copy files other than weights of the model `source` that are not in `out`, such as its code.

    source: path or hub name of a model; nothing is copied if it is None or not on this machine.
    """
    folder = _folder_of(source)
    if folder is None:
        return
    for file in (file for pattern in _FILES for file in folder.glob(pattern)):
        if file.is_file() and not (out / file.name).exists():
            shutil.copyfile(file, out / file.name)


def unread_bytes(model: PreTrainedModel, source: str | None) -> int:
    """Return the bytes that `copy_unread` will add."""
    unread = _unread_tensors(model, source)
    return sum(_tensor_bytes(file, names) for file, names in unread.items())


def copy_unread(model: PreTrainedModel, source: str | None, out: Path) -> None:
    """Add the tensors of the checkpoint `source` that `model` does not read, to that in `out`.

    A tensor that `model` has under another name or as a part of a fused one is read, and so is one
    that is tied to another.

    model: of which names and configuration are used; it can be on the meta device.
    source: as for `copy_files`.
    """
    added = dict[str, str]()
    for i, (file, names) in enumerate(_unread_tensors(model, source).items()):
        part, contents = f"unread-{i}.safetensors", {}
        with _opened(file) as read:
            for name in names:
                note_progress()
                contents[name] = read(name).contiguous()
            save_file(contents, out / part, metadata={"format": "pt"})
        added |= dict.fromkeys(names, part)
    if added:
        _number_files(out, added)


def _folder_of(source: str | None) -> Path | None:
    """Return the local folder of a model, a path or hub name; None if there is none."""
    if not source:
        return None
    if Path(source).is_dir():
        return Path(source)
    with suppress(OSError):  # a path that does not exist is no name of the hub
        config = cached_file(source, "config.json", local_files_only=True)
        return None if config is None else Path(config).parent
    return None


def _unread_tensors(model: PreTrainedModel, source: str | None) -> dict[Path, list[str]]:
    """Return by file the tensors of the checkpoint `source` that `model` does not read."""
    if (folder := _folder_of(source)) is None:
        return {}
    conversions = get_model_conversion_mapping(model)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    own = model.state_dict()

    def is_read(name: str) -> bool:
        # As transformers looks up a tensor: with its conversions, and as it is.
        for renaming in ((renamings, converters), ([], [])):
            if rename_source_key(name, *renaming, model.base_model_prefix, own)[0] in own:
                return True
        return False

    unread = defaultdict[Path, list[str]](list)
    for name, file in sorted(_stored_tensors(folder).items()):
        if not is_read(name):
            unread[file].append(name)
    return dict(unread)


def _number_files(out: Path, added: Mapping[str, str]) -> None:
    """Rename the weight files of `out`, and those of `added`, to the shards of one index."""
    index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
    if (out / _INDEX).is_file():
        index = json.loads((out / _INDEX).read_text())
    else:
        index["weight_map"] = dict.fromkeys(_stored_tensors(out), _WEIGHTS)
    weight_map = index["weight_map"] | dict(added)
    files = list(dict.fromkeys(weight_map.values()))
    new = {f: f"model-{i:05}-of-{len(files):05}.safetensors" for i, f in enumerate(files, 1)}
    for file in files:
        (out / file).rename(out / f"{file}.moved")
    for file, name in new.items():
        (out / f"{file}.moved").rename(out / name)
    index["weight_map"] = {name: new[file] for name, file in sorted(weight_map.items())}
    index["metadata"]["total_size"] = sum(_tensor_bytes(out / name) for name in new.values())
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
        tensors = _unpickled(file)
        yield lambda name: tensors[name].clone()  # some share memory


def _unpickled(file: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = torch.load(file, "cpu", weights_only=True, mmap=True)
    return tensors


def _tensor_bytes(file: Path, names: Collection[str] | None = None) -> int:
    """Return the bytes of tensors in a weight file, of all if `names` is None."""
    if file.suffix != ".safetensors":
        tensors = _unpickled(file)
        return sum(x.nbytes for name, x in tensors.items() if names is None or name in names)
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    entries = {name: x["data_offsets"] for name, x in header.items() if name != "__metadata__"}
    return sum(end - start for n, (start, end) in entries.items() if names is None or n in names)
