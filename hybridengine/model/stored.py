"""Checkpoints as they are published: quantized, or a language model inside a vision-language model.

A run knows the model that it trains: without quantization and, for a job of text on a model whose
images cannot be packed, the language model alone. Its engine and its checkpoints know that model,
too; `final/` is what the published checkpoint is, in 16 bits or more.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils.hub import cached_file

from hybridengine.run.errors import ModelError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED, _PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_METHODS = ("fp8", "mxfp4")
_PARTS = re.compile(r"_(scale_inv|scales|blocks)$")  # of a quantized weight, as names end
# Whose language model computes what the whole computes without images (compared in tests).
WRAPPERS = ("qwen3_5", "qwen3_5_moe", "gemma4", "mistral3", "kimi_k25")
_EMBEDDING = re.compile(r"^((?:model\.)?language_model\.(?:model\.)?)embed_tokens\.weight$")


def trained_config(config: PretrainedConfig, keep_vision_tower: bool = False) -> PretrainedConfig:
    """Return the configuration of the model that a run trains, from that of the checkpoint."""
    text = None if keep_vision_tower else language_model(config)
    if text is not None:
        text = copy.deepcopy(text)
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
        text.architectures = [model_class.__name__]
        text.dtype = text.dtype or config.dtype
        text.tie_word_embeddings = config.tie_word_embeddings  # that of the whole is read
        text.name_or_path = config.name_or_path
        config = text
    if hasattr(config, "quantization_config"):
        config = copy.deepcopy(config)
        del config.quantization_config
    return config


def language_model(config: PretrainedConfig) -> PretrainedConfig | None:
    """Return the configuration of the language model that is trained alone; None: all is."""
    text = config.get_text_config()
    is_wrapper = config.model_type in WRAPPERS and type(text) in MODEL_FOR_CAUSAL_LM_MAPPING
    return text if is_wrapper else None


def stored_quantization(config: PretrainedConfig) -> dict[str, Any] | None:
    """Return how the weights of a checkpoint are quantized; None: they are not."""
    for part in (config, config.get_text_config()):
        if (stored := getattr(part, "quantization_config", None)) is not None:
            return stored if isinstance(stored, dict) else dict(stored.to_dict())
    return None


def check_quantization(path: str, config: PretrainedConfig) -> None:
    """Raise ModelError if the weights at `path` cannot be dequantized as they are read."""
    if (stored := stored_quantization(config)) is None:
        return
    method = given = stored.get("quant_method")
    is_read = method in _METHODS
    if method == "fp8":
        blocks = stored.get("weight_block_size")
        given = f"fp8 with weight_block_size {blocks}" if blocks else "fp8 with one scale a tensor"
        sizes = blocks if isinstance(blocks, list | tuple) else ()
        is_read = len(sizes) == 2 and all(isinstance(n, int) and n > 0 for n in sizes)
    if not is_read:
        raise ModelError(
            f"model {path!r} is quantized ({given}), which cannot be dequantized as it is read; "
            "use its weights in 16 bits, in fp8 with weight_block_size, or in mxfp4"
        )


def check_scales(folder: Path) -> None:
    """Raise ModelError unless each weight in FP8 in `folder` has a scale per block.

    transformers reads a weight without scales as it is, and takes the blocks from their number.
    """
    quantization = folder_quantization(folder)
    if quantization is None or quantization.get("quant_method") != "fp8":
        return
    shapes, weights = dict[str, list[int]](), list[str]()
    for file in {file for file in stored_tensors(folder).values() if file.suffix != ".bin"}:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # it has no other iterator
                part = tensors.get_slice(name)
                shapes[name] = list(part.get_shape())
                weights += [name] if part.get_dtype() in ("F8_E4M3", "F8_E5M2") else []
    for name in weights:
        *rest, rows, columns = shapes[name]
        blocks = zip((rows, columns), quantization["weight_block_size"], strict=True)
        expected = [*rest, *(-(-n // size) for n, size in blocks)]
        scales = [f"{name}_scale_inv", f"{name.removesuffix('weight')}scale"]
        found = next((shapes[scale] for scale in scales if scale in shapes), None)
        if found != expected:
            has = "no scales" if found is None else f"scales of shape {found}"
            raise ModelError(
                f"model {str(folder)!r}: {name} is in FP8 and has {has}, expected {expected} from "
                "weight_block_size; copy weights and config.json of one checkpoint"
            )


@contextmanager
def reading(
    path: str, stored: PretrainedConfig, config: PretrainedConfig
) -> Iterator[dict[str, Any]]:
    """Yield the arguments with which `from_pretrained` reads the model of `config` from `path`.

    stored: the configuration of the checkpoint; config: its `trained_config`.
    """
    arguments: dict[str, Any] = {"config": config}
    if names := inner_names(path, config):
        arguments["key_mapping"] = names
    if (quantization := stored_quantization(stored)) is None:
        yield arguments
        return
    config = copy.deepcopy(config)
    config.quantization_config = {**quantization, "dequantize": True}
    with patch.object(Fp8Dequantize, "_dequantize_one", _dequantize_blocks):
        yield arguments | {"config": config}


def inner_names(path: str | None, config: PretrainedConfig) -> dict[str, str]:
    """Return patterns of names in a checkpoint → names of its language model, trained alone.

    config: of the model that is trained.
    Raises:
        ModelError: the checkpoint has no embedding where language models have it.
    """
    folder = folder_of(path)
    if folder is None or not _is_inner(config, folder):
        return {}
    names = stored_tensors(folder)
    prefixes = [found[1] for name in names if (found := _EMBEDDING.match(name))]
    if len(prefixes) != 1:
        raise ModelError(
            f"model {path!r}: {len(prefixes)} of its tensors are named "
            "…language_model.…embed_tokens.weight, expected one: its language model cannot be told "
            "from the rest; save the language model alone"
        )
    heads = [name for name in names if name.endswith("language_model.lm_head.weight")]
    moved = {f"^{name.removesuffix('weight')}": "lm_head." for name in heads}
    return {f"^{prefixes[0]}": "model."} | moved


def names_in_whole(config: PretrainedConfig) -> Callable[[str], str]:
    """Return a function: name of a trained module → its name in the class of the checkpoint."""
    folder = folder_of(config.name_or_path)
    if folder is None or not _is_inner(config, folder):
        return lambda name: name
    return lambda name: re.sub(r"^model\.", "model.language_model.", name)


def _is_inner(config: PretrainedConfig, folder: Path) -> bool:
    """Whether the model of `config` is the language model of the checkpoint in `folder` alone."""
    kind = stored_entries(folder).get("model_type")
    return kind in WRAPPERS and config.model_type != kind


def stored_entries(folder: Path) -> dict[str, Any]:
    """Return the entries of config.json; none without one, as in a folder that is no model's."""
    if not (file := folder / "config.json").is_file():
        return {}
    entries: dict[str, Any] = json.loads(file.read_text())
    return entries


def folder_quantization(folder: Path) -> dict[str, Any] | None:
    """Return how the weights of the checkpoint in `folder` are quantized; None: they are not."""
    entries = stored_entries(folder)
    for part in (entries, entries.get("text_config") or {}):
        if (stored := part.get("quantization_config")) is not None:
            return dict(stored)
    return None


def restore_config(config: PretrainedConfig, source: Path, out: Path) -> None:
    """Replace the language model's config.json in `out` by that of the whole in `source`.

    config: of the language model as it was trained.
    """
    whole: Any = AutoConfig.from_pretrained(source)
    text = whole.get_text_config()
    name = next(name for name, part in vars(whole).items() if part is text)
    trained = copy.deepcopy(config)
    trained.architectures = text.architectures
    trained.tie_word_embeddings, trained.name_or_path = text.tie_word_embeddings, ""
    setattr(whole, name, trained)
    whole.dtype = config.dtype
    for part in (whole, trained):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    whole.save_pretrained(out)


def weight_of(name: str, quantization: Mapping[str, Any] | None) -> str:
    """Return the name of the weight that a tensor of a quantized checkpoint is a part of."""
    return name if quantization is None else _PARTS.sub("", name)


def dequantize(weight: Tensor, scales: Tensor, block_size: Iterable[int]) -> Tensor:
    """Return `weight` [..., N, K] in FP8, with a scale per block, in float32.

    scales: [..., ceil(N / block_size[0]), ceil(K / block_size[1])]; the last blocks may be cut.
    """
    if scales.dtype == torch.uint8:  # exponents
        scales = scales.view(torch.float8_e8m0fnu)
    for dim, size in zip((-2, -1), block_size, strict=True):
        scales = scales.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
    return weight.float() * scales.float()


def folder_of(source: str | None) -> Path | None:
    """Return the local folder of a model, a path or hub name; None if there is none."""
    if not source:
        return None
    if Path(source).is_dir():
        return Path(source)
    try:
        config = cached_file(source, "config.json", local_files_only=True)
    except OSError:  # a path that does not exist is no name of the hub
        return None
    return None if config is None else Path(config).parent


def stored_tensors(folder: Path) -> dict[str, Path]:
    """Return the tensors in the weight files that transformers reads in `folder`, with the file."""
    for single, index in ((WEIGHTS, INDEX), (_PICKLED, _PICKLED_INDEX)):
        if (file := folder / single).is_file():
            return dict.fromkeys(_names(file), file)
        if (folder / index).is_file():
            names = json.loads((folder / index).read_text())["weight_map"]
            return {name: folder / file for name, file in names.items()}
    return {}


def _names(file: Path) -> list[str]:
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as tensors:
            return list(tensors.keys())
    return list(torch.load(file, "cpu", weights_only=True, mmap=True))


_dequantize_any = Fp8Dequantize._dequantize_one


def _dequantize_blocks(
    op: Fp8Dequantize, weight: Tensor, scales: Tensor, output_dtype: torch.dtype | None = None
) -> Tensor:
    """As transformers, which takes the last block of a dimension to be as long as the others."""
    block_size = op.hf_quantizer.quantization_config.weight_block_size
    grid = [-(-n // size) for n, size in zip(weight.shape[-2:], block_size, strict=True)]
    if list(scales.shape[-2:]) != grid:  # of other blocks, as experts in FP4
        return _dequantize_any(op, weight, scales, output_dtype)
    return dequantize(weight, scales, block_size).to(output_dtype or torch.bfloat16)
