"""What can be known of a model's weight files without reading a weight.

Headers and sizes of safetensors files show what is cut or empty; transformers' own loader, on the
meta device, shows what is missing or misshapen, whatever it renames or fuses on the way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PretrainedConfig
from transformers.utils import logging

from hybridengine.errors import ModelError

__all__ = ["check_weight_index", "check_weights"]

_LENGTH_BYTES = 8  # of the header, at the start of a safetensors file


def check_weights(
    path: str, config: PretrainedConfig, trust_remote_code: bool = False, classifier: bool = False
) -> None:
    """Check the weight files of the model in the folder `path`; reads headers only.

    classifier: it is to be a sequence classifier. A name that is no folder is left to the loader.

    Raises:
        ModelError: a file that is cut or unreadable, a tensor that is missing or has another shape.
    """
    folder = Path(path)
    if not folder.is_dir():
        return
    for file in sorted(folder.glob("*.safetensors")):
        _check_file(file)
    kind: Any = AutoModelForSequenceClassification if classifier else AutoModelForCausalLM
    with _silent():
        try:
            model, report = kind.from_pretrained(
                path,
                config=config,
                device_map="meta",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                trust_remote_code=trust_remote_code,
            )
        except Exception as error:  # torch's, pickle's and safetensors' readers raise anything
            reason = [type(error).__name__, *str(error).strip().splitlines()[:1]]
            raise ModelError(
                f"model {path!r}: its weights cannot be read ({': '.join(reason)})"
            ) from error
    named = f"model {path!r} ({type(model).__name__})"
    if wrong := sorted(report["mismatched_keys"]):
        name, stored, expected = wrong[0]
        raise ModelError(
            f"{named}: {name} is {list(stored)} in the weight files, but config.json makes it "
            f"{list(expected)} ({len(wrong)} such tensors); config and weights are of two models"
        )
    if missing := sorted(set(report["missing_keys"]) & {n for n, _ in model.named_parameters()}):
        raise ModelError(
            f"{named}: the weight files lack {missing[0]} ({len(missing)} tensors are missing); "
            "use a complete checkpoint"
        )


def check_weight_index(folder: Path) -> None:
    """Check that every weight file named in an index is there.

    Raises:
        ModelError: an index that is no JSON object with a `weight_map`, or a file that is missing.
    """
    for index in folder.glob("*.index.json"):
        try:
            files = set(json.loads(index.read_text())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(
                f"model path {str(folder)!r}: {index.name} is no index of weight files "
                f"({type(error).__name__}: {error}); copy it again"
            ) from None
        if missing := sorted(str(f) for f in files if not (folder / str(f)).is_file()):
            raise ModelError(
                f"model path {str(folder)!r} lacks {missing[0]!r} named in {index.name} "
                f"({len(missing)} of {len(files)} weight files missing); copy it again"
            )


def _check_file(file: Path) -> None:
    """The header of a safetensors file can be read, and its tensors fill the file."""
    size = file.stat().st_size
    where = f"weight file {str(file)!r}"
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES + length:
            raise ModelError(
                f"{where} has {size} bytes, less than its own header; it is empty or cut (or a "
                "pointer of Git LFS): copy it again"
            )
        try:
            header = json.loads(stream.read(length))
            tensors = [entry for name, entry in header.items() if name != "__metadata__"]
            stored = max((entry["data_offsets"][1] for entry in tensors), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(
                f"{where} is no safetensors file ({type(error).__name__}: {error}); copy it again"
            ) from None
    expected = _LENGTH_BYTES + length + stored
    if size != expected:
        raise ModelError(f"{where} has {size} bytes, expected {expected}; copy it again")


@contextmanager
def _silent() -> Iterator[None]:
    """transformers reports what it loads neither by log nor by progress bar."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
