"""Write a model as a Hugging Face folder for transformers and vLLM, and its adapter for PEFT.

What belongs to a checkpoint and is not trained is copied from where the model came from: files, and
tensors that transformers' model does not have, such as the layers of multi-token prediction (MTP)
that vLLM speculates with and config.json declares.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils.hub import cached_file
from transformers.utils.logging import set_tqdm_hook

from hybridengine.model.lora import adapter_shards, has_experts, peft_factors
from hybridengine.model.parameters import (
    meta_copy,
    parameter_shards,
    saved_dtypes,
    use_checkpoint_names,
)
from hybridengine.model.shared_parameters import full_base
from hybridengine.model.stored import (
    INDEX,
    WEIGHTS,
    dequantize,
    folder_of,
    folder_quantization,
    inner_names,
    names_in_whole,
    restore_config,
    stored_tensors,
    weight_of,
)
from hybridengine.run.errors import ModelError
from hybridengine.run.messages import run_on_rank0
from hybridengine.run.storage import atomic_folder, check_disk_space, note_progress, writing_to
from hybridengine.sync.shards import full_tensor

_PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)
# Own code, vocabularies and terms of use; transformers writes the other files of a model itself.
_FILES = ("*.py", "*.model", "*.tiktoken", "tekken.json", "LICENSE*", "NOTICE*", "USE_POLICY*")
_RENAMED_BY_PEFT = tuple(f".{n}.weight" for n in ("gate_proj", "up_proj", "down_proj", "gate"))


def save_pretrained(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out_dir: str | Path,
    dtype: torch.dtype,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write weights (in `dtype`), config, generation config and tokenizer; collective.

    What transformers keeps in float32 stays in it. Tensors and files of the model's checkpoint that
    it does not read are copied. Adapters are merged. The folder is read back and compared before it
    takes its name, and replaces an existing one.

    group: in which the other ranks wait for the write, see `TensorFiles.group`; None: the
    default group, whose timeout limits the write.

    Raises:
        ModelError: on every rank, if rank 0 cannot write; no incomplete folder is left.
    """
    out = Path(out_dir).absolute()
    dtypes = saved_dtypes(model, dtype)
    sizes = {name: tensor.numel() for name, tensor in parameter_shards(model).items()}
    num_bytes = sum(size * dtypes[name].itemsize for name, size in sizes.items())
    doing, source = f"saving the model to {str(out)!r}", model.config.name_or_path

    run_on_rank0(
        lambda: check_disk_space(out, num_bytes + unread_bytes(meta_copy(model, dtype), source)),
        doing,
        group,
    )
    state_dict = _full_state_dict(model, dtypes)
    run_on_rank0(
        lambda: write_pretrained(model, tokenizer, state_dict, out, dtype, source), doing, group
    )


def save_model_files(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    dtype: torch.dtype,
    weights: bool,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write `huggingface/` and, with LoRA, `adapter/` into a checkpoint's `folder`; collective.

    dtype: the dtype of the weights, and of a later export of the checkpoint.
    weights: write the full weights as well as config and tokenizer.
    group: see `save_pretrained`.
    """
    hf_folder = folder / "huggingface"

    def save_configs() -> None:
        config = copy.deepcopy(model.config)
        config.dtype = dtype
        with writing_to(hf_folder):
            config.save_pretrained(hf_folder)
            if model.can_generate():
                model.generation_config.save_pretrained(hf_folder)
            save_tokenizer(tokenizer, hf_folder)
            copy_files(model.config.name_or_path, hf_folder)

    if weights:
        save_pretrained(model, tokenizer, hf_folder, dtype, group=group)
    else:
        doing = f"saving the model's configuration to {str(hf_folder)!r}"
        run_on_rank0(save_configs, doing, group)
    if hasattr(model, "peft_config"):
        save_adapter(model, tokenizer, folder / "adapter", group)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save the tokenizer, and the files of the image processor beside which it was loaded.

    The tokenizer's chat template, of chat_template.jinja, is the processor's too.
    """
    tokenizer.save_pretrained(folder)
    if not tokenizer.name_or_path:  # made in memory
        return
    for name in _PROCESSOR_FILES:
        file = cached_file(
            tokenizer.name_or_path,
            name,
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if file is None:
            continue
        text = Path(file).read_text()
        settings = json.loads(text)
        if tokenizer.chat_template and settings.pop("chat_template", None):  # of the model before
            text = json.dumps(settings, indent=2) if settings else ""
        if text:
            (folder / name).write_text(text)


@torch.no_grad()
def _full_state_dict(
    model: PreTrainedModel, dtypes: Mapping[str, torch.dtype]
) -> dict[str, torch.Tensor]:
    """Gather full tensors in `dtypes`, one at a time, to the CPU of rank 0; empty elsewhere.

    `get_model_state_dict(full_state_dict=True, cpu_offload=True)` gathers float32: twice the
    traffic, and twice the memory on rank 0.
    """
    adapters, state_dict = adapter_shards(model), {}
    for name, tensor in parameter_shards(model).items():
        with full_base(model, name):
            if name in adapters:
                # A base in the engine's dtype would round the sum before `dtypes` do.
                tensor = adapters[name].merge_full(tensor.float()).to(dtypes[name])
            else:
                tensor = tensor.to(dtypes[name])  # before the gather
            full = full_tensor(tensor)
            if dist.get_rank() == 0:
                state_dict[name] = full.to("cpu", copy=full is tensor)  # no view of the engine's
    return state_dict


def write_pretrained(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state_dict: Mapping[str, torch.Tensor],
    out: Path,
    dtype: torch.dtype,
    source: str | None,
    **origin: str,
) -> None:
    """Write full tensors, named as by `parameter_shards`, then read them back and compare.

    model: gives the class and the configs only.
    state_dict: in the dtypes of `saved_dtypes(model, dtype)`.
    source: path or hub name of the model that was trained, whose other tensors and files are
      copied; None, or one that is not there: none are.
    origin: further entries of the folder's manifest, see `storage.write_manifest`.

    Raises:
        ModelError: transformers loads other values than were written; no folder is left.
    """
    skeleton = meta_copy(model, dtype)
    if model.can_generate():
        skeleton.generation_config = model.generation_config
    use_checkpoint_names(skeleton)
    outer = _outer_names(skeleton, source)
    conversions = list[Any](skeleton._weight_conversions or [])  # type: ignore[arg-type]
    skeleton._weight_conversions = [*outer, *conversions] or None  # type: ignore[assignment]
    with atomic_folder(out, **origin) as partial:
        skeleton.save_pretrained(partial, state_dict=dict(state_dict))
        if outer and (folder := folder_of(source)) is not None:
            restore_config(skeleton.config, folder, partial)
        save_tokenizer(tokenizer, partial)
        copy_unread(skeleton, source, partial)
        copy_files(source, partial)
        _compare(skeleton, partial, state_dict, dtype)


def _compare(
    skeleton: PreTrainedModel,
    folder: Path,
    written: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> None:
    before, renamed = set_tqdm_hook(_note_loaded), inner_names(str(folder), skeleton.config)
    inner: Any = {"config": skeleton.config, "key_mapping": renamed} if renamed else {}
    model_class: Any = type(skeleton)
    try:
        model, report = model_class.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, **inner
        )
    finally:
        set_tqdm_hook(before)
    loaded, wrong = parameter_shards(model), set()
    for name, x in loaded.items():
        note_progress()
        if x.dtype != written[name].dtype or not torch.equal(x, written[name]):
            wrong.add(name)
    if names := sorted(wrong | set(report["missing_keys"]) | (set(written) - set(loaded))):
        raise ModelError(
            f"the saved model differs from the model in memory: {len(names)} tensors, such as "
            f"{names[0]!r}, are missing, changed or not finite"
        )


def _note_loaded(bar: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Note progress at every item of a progress bar of transformers: a tensor that is read."""

    def items() -> Iterator[Any]:
        for item in args[0]:
            note_progress()
            yield item

    return bar(*(items() for _ in args[:1]), *args[1:], **kwargs)


@torch.no_grad()
def save_adapter(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out_dir: str | Path,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Write adapter and tokenizer as a folder for `peft.PeftModel.from_pretrained`; collective.

    The adapter is in float32.

    group: see `save_pretrained`.

    Raises:
        ModelError: on every rank, if rank 0 cannot write.
    """
    tensors = {}
    for name, factor in peft_factors(model).items():
        full = full_tensor(factor.parameter.detach())
        if dist.get_rank() == 0:
            tensors[name] = factor.stored(full.cpu()).contiguous()

    config: Any = copy.copy(*model.peft_config.values())
    adapted = adapter_shards(model)
    of_experts = {name for name, adapter in adapted.items() if adapter.of_experts}
    # PEFT would take a linear layer of these names for experts, but reads a full parameter's name.
    renamed = {n for n in adapted if n.endswith(_RENAMED_BY_PEFT)} if has_experts(model) else set()
    by_parameter = of_experts | renamed
    outer = names_in_whole(model.config)
    linear = (name.removesuffix(".weight") for name in adapted.keys() - by_parameter)
    config.target_modules = sorted(map(outer, linear))
    config.target_parameters = sorted(map(outer, by_parameter)) or None
    config.base_model_name_or_path = base_name(model.config.name_or_path or "")
    config.inference_mode = True

    def write() -> None:
        with atomic_folder(Path(out_dir).absolute()) as out:
            save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
            config.save_pretrained(str(out))
            save_tokenizer(tokenizer, out)

    run_on_rank0(write, f"saving the adapter to {str(out_dir)!r}", group)


def base_name(name: str) -> str:
    """Return the absolute path of a local base model, or a hub name unchanged."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def copy_files(source: str | None, out: Path) -> None:
    """Copy files other than weights of the model `source` that are not in `out`, such as its code.

    source: path or hub name of a model; nothing is copied if it is None or not on this machine.
    """
    folder = folder_of(source)
    if folder is None:
        return
    for file in (file for pattern in _FILES for file in folder.glob(pattern)):
        if file.is_file() and not (out / file.name).exists():
            shutil.copyfile(file, out / file.name)


def unread_bytes(model: PreTrainedModel, source: str | None) -> int:
    """Return the bytes that `copy_unread` will add, of FP8 before it is dequantized."""
    unread = _unread_tensors(model, source)
    tensors = ((_tensors(file), names) for file, names in unread.items())
    return sum(stored[name].nbytes for stored, names in tensors for name in names)


def copy_unread(model: PreTrainedModel, source: str | None, out: Path) -> None:
    """Add the tensors of the checkpoint `source` that `model` does not read, to that in `out`.

    A tensor that `model` has under another name or as a part of a fused one is read, and so is one
    that is tied to another. Tensors in FP8 are dequantized to bfloat16, as the rest of the folder.

    model: of which names and configuration are used; it can be on the meta device.
    source: as for `copy_files`.
    """
    added = dict[str, str]()
    for i, (file, names) in enumerate(_unread_tensors(model, source).items()):
        part, stored, contents = f"unread-{i}.safetensors", _tensors(file), {}
        for name in names:
            note_progress()
            tensor = stored[name]
            if tensor.dtype == torch.float8_e4m3fn:
                tensor = _dequantized(file.parent, name, tensor)
            contents[name] = tensor.clone(memory_format=torch.contiguous_format)
        save_file(contents, out / part, metadata={"format": "pt"})
        added |= dict.fromkeys(names, part)
    if added:
        _number_files(out, added)


def _unread_tensors(model: PreTrainedModel, source: str | None) -> dict[Path, list[str]]:
    """Return by file the tensors of the checkpoint `source` that `model` does not read."""
    if (folder := folder_of(source)) is None:
        return {}
    conversions = [*_outer_names(model, source), *get_model_conversion_mapping(model)]
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    own = model.state_dict()

    def is_read(name: str) -> bool:
        # As transformers looks up a tensor: with its conversions, and as it is.
        for renaming in ((renamings, converters), ([], [])):
            if rename_source_key(name, *renaming, model.base_model_prefix, own)[0] in own:
                return True
        return False

    unread, files = defaultdict[Path, list[str]](list), stored_tensors(folder)
    quantization = folder_quantization(folder)
    for name, file in sorted(files.items()):
        weight = weight_of(name, quantization)
        if not is_read(weight) and (weight == name or weight not in files):
            unread[file].append(name)
    return dict(unread)


def _outer_names(model: PreTrainedModel, source: str | None) -> list[WeightRenaming]:
    """Return how transformers names tensors of the checkpoint `source`, as it reads and saves."""
    return [WeightRenaming(*names) for names in inner_names(source, model.config).items()]


def _dequantized(folder: Path, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return the FP8 `weight` of the checkpoint in `folder` in bfloat16."""
    quantization, scale = folder_quantization(folder), f"{name}_scale_inv"
    file = stored_tensors(folder).get(scale)
    if quantization is None or file is None:
        raise ModelError(
            f"{name} of {str(folder)!r} is in FP8, but its scales {scale} are not there; "
            "copy the whole checkpoint"
        )
    block_size = quantization["weight_block_size"]
    return dequantize(weight, _tensors(file)[scale], block_size).bfloat16()


def _number_files(out: Path, added: Mapping[str, str]) -> None:
    """Rename the weight files of `out`, and those of `added`, to the shards of one index."""
    index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
    if (out / INDEX).is_file():
        index = json.loads((out / INDEX).read_text())
    else:
        index["weight_map"] = dict.fromkeys(stored_tensors(out), WEIGHTS)
    weight_map = index["weight_map"] | dict(added)
    files = list(dict.fromkeys(weight_map.values()))
    new = {f: f"model-{i:05}-of-{len(files):05}.safetensors" for i, f in enumerate(files, 1)}
    for file in files:
        (out / file).rename(out / f"{file}.moved")
    for file, name in new.items():
        (out / f"{file}.moved").rename(out / name)
    index["weight_map"] = {name: new[file] for name, file in sorted(weight_map.items())}
    tensors = (x for name in new.values() for x in _tensors(out / name).values())
    index["metadata"]["total_size"] = sum(x.nbytes for x in tensors)
    (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a weight file, mapped into memory."""
    if file.suffix == ".safetensors":
        return load_file(file)
    tensors: dict[str, torch.Tensor] = torch.load(file, "cpu", weights_only=True, mmap=True)
    return tensors
