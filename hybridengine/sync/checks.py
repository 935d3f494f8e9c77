"""Checks of a plan: engine tensors are written once, trained ones are read, configurations fit."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from hybridengine.sync.blocks import contiguous_strides, reach
from hybridengine.sync.layout import Copy, EngineLayout, LayoutError, Region
from hybridengine.sync.shards import ShardSpec


def check_coverage(layout: EngineLayout) -> None:
    """Raise LayoutError unless every element of every engine tensor is written exactly once.

    A constant region (vocabulary padding) may be overwritten by a copy. Tensors that the engine's
    own loader writes (fallback) are not checked.
    """
    copies: dict[str, list[Region]] = defaultdict(list)
    constants: dict[str, list[Region]] = defaultdict(list)
    for c in layout.copies:
        copies[c.destination].append(c.written)
    for name, offset, sizes, strides, _ in layout.constants:
        constants[name].append((offset, sizes, strides))
    for name, spec in layout.destinations.items():
        if name in layout.by_loader or math.prod(spec.shape) == 0:
            continue
        full = (0, spec.shape, spec.stride)
        missing, twice = _count_unwritten(full, tuple(copies[name]), tuple(constants[name]))
        if twice:
            raise LayoutError(f"engine tensor {name!r}: some elements would be written twice")
        if missing:
            raise LayoutError(
                f"engine tensor {name!r}: {missing} of {math.prod(spec.shape)} elements are "
                "written by no checkpoint tensor"
            )


@lru_cache(maxsize=64)  # layers of a model repeat
def _count_unwritten(
    full: Region, once: Sequence[Region], more: Collection[Region]
) -> tuple[int, bool]:
    """Return how many elements of `full` are in no region, and whether two of `once` overlap.

    Counts in runs of `grain` elements, which no region cuts. more: regions that may overlap.
    """
    grain = math.gcd(*(n for region in (full, *once, *more) for n in _run_lengths(region)))
    last = sum((n - 1) * s for n, s in zip(*full[1:], strict=True))
    count = np.zeros(last // grain + 1, np.uint8)
    for region in once:
        _view(count, region, grain)[...] += 1
    twice = bool(count.max() > 1)
    for region in more:
        _view(count, region, grain)[...] = 1
    return int((_view(count, full, grain) == 0).sum()) * grain, twice


def check_fit(
    specs: Mapping[str, ShardSpec],
    layouts: Sequence[EngineLayout],
    optional_parameters: Set[str],
    config_differences: Mapping[str, str],
) -> None:
    """Raise LayoutError if trained model and engines do not fit.

    layouts: an empty one is of a rank without an engine. The last arguments are those of
    `WeightTarget`.
    """
    try:
        distinct = [x for x in {id(x): x for x in layouts}.values() if x.destinations]
        shapes = {name: spec.shape for name, spec in specs.items()}
        check_sources(shapes, distinct, optional_parameters)
    except LayoutError as error:
        raise LayoutError(f"{error}{in_words(config_differences)}") from None
    check_configuration(config_differences)


def check_sources(
    shapes: Mapping[str, tuple[int, ...]],
    layouts: Sequence[EngineLayout],
    unused: Set[str] = frozenset(),
) -> None:
    """Raise LayoutError for a trained parameter that the engines read only in part.

    shapes: parameter → global shape.
    layouts: the engine layouts of all TP ranks.
    unused: parameters that need not be read.
    Parameters of a fallback count as read.
    """
    copies: dict[str, list[Copy]] = defaultdict(list)
    exempt = set(unused)
    for layout in layouts:
        exempt |= layout.fallback.keys()
        for c in layout.copies:
            copies[c.source].append(c)
    for name, shape in shapes.items():
        full, total = (0, shape, contiguous_strides(shape)), math.prod(shape)
        if name in exempt or not total:
            continue
        unread, _ = _count_unwritten(full, (), frozenset(c.read for c in copies[name]))
        if unread:
            parts = ", ".join(_describe_reach(shape, copies[name])) or "parts of it"
            what = f"only {parts}" if copies[name] else "nothing"
            raise LayoutError(
                f"the engine reads {what} of the trained parameter {name!r} of shape {shape}: "
                f"{unread} of its {total} elements are used by no engine tensor. Build both from "
                "one configuration. If they are, the engine's code does not have all of it: unset "
                "what adds the parameter, or take another engine."
            )


def _describe_reach(shape: tuple[int, ...], copies: Sequence[Copy]) -> Iterator[str]:
    """Yield how far the copies reach on each dimension that they do not read to the end."""
    blocks = [c.block(shape) for c in copies]
    for dim, size in enumerate(shape):
        if blocks and (end := max(reach(block, dim)[1] for block in blocks)) < size:
            yield f"the first {end} of {size} positions on dimension {dim}"


def _run_lengths(region: Region) -> Iterator[int]:
    """Yield numbers that a run length has to divide, so that the region consists of full runs."""
    offset, sizes, strides = region
    axes = [(n, s) for n, s in zip(sizes, strides, strict=True) if n != 1]
    yield offset
    yield from (s for _, s in axes if s != 1)
    yield next((n for n, s in axes if s == 1), 1)


def _view(cells: np.ndarray, region: Region, grain: int) -> np.ndarray:
    """Return the cells (one byte each) of a region; a cell stands for `grain` elements."""
    offset, sizes, strides = region
    axes = [
        (n // grain, 1) if s == 1 and n != 1 else (n, s // grain)
        for n, s in zip(sizes, strides, strict=True)
    ]
    shape, steps = zip(*axes, strict=True) if axes else ((), ())
    return np.lib.stride_tricks.as_strided(cells[offset // grain :], shape, steps)


# Ends of keys that change neither the weights nor what generation computes from them.
_INCIDENTAL = (
    "_token_id",
    "dtype",
    "version",
    "name_or_path",
    "use_cache",
    "architectures",
    "model_type",
    "attn_implementation",
    "dropout",
    "drop",
    "initializer_range",
    "initializer_factor",
    "init_std",
    "loss_coef",
    "jitter_noise",
    "output_router_logits",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "gradient_checkpointing",
    "problem_type",
    "pretraining_tp",
)
_DESCRIPTIVE = ("id2label", "label2id", "task_specific_params", "auto_map", "quantization_config")
# Where the weights fit, the engine has what it needs: vLLM unties a head that the checkpoint has.
_OF_THE_WEIGHTS = ("tie_word_embeddings",)
_LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")
_SCALED_BY_LENGTH = ("dynamic", "longrope")  # types of RoPE
_LATENT_YARN = "deepseek_yarn"  # vLLM's models with latent attention write it into their config


def config_differences(trained: Mapping[str, Any], engine: Mapping[str, Any]) -> dict[str, str]:
    """Return key → values in words, of common configuration keys whose values differ.

    Keys that change neither the weights nor what generation computes are left out. None is a value
    only where it turns something off in the trained model: elsewhere it stands for a default.
    """
    ours, theirs = plain_values(trained), plain_values(engine)
    theirs = {key: "yarn" if x == _LATENT_YARN else x for key, x in theirs.items()}
    by_length = any(
        key.endswith("rope_type") and value in _SCALED_BY_LENGTH for key, value in ours.items()
    )
    incidental = _INCIDENTAL if by_length else _INCIDENTAL + _LENGTHS
    return {
        key: f"{value} in the trained model, {theirs[key]} in the engine"
        for key, value in ours.items()
        if not key.endswith(incidental)
        and theirs.get(key, value) != value
        and (theirs[key] is not None or key.endswith("softcapping"))
        and (value is not None or key.endswith(("softcapping", "sliding_window")))
    }


def in_words(differences: Mapping[str, str]) -> str:
    """Return a sentence about `config_differences`, "" where there are none."""
    named = ", ".join(f"{key} ({values})" for key, values in list(differences.items())[:5])
    return f" Their configurations differ in {named}." if named else ""


def check_configuration(differences: Mapping[str, str]) -> None:
    """Raise LayoutError if engine and trained model compute differently from equal weights.

    differences: `config_differences` of models whose weights fit.
    """
    if wrong := {k: v for k, v in differences.items() if not k.endswith(_OF_THE_WEIGHTS)}:
        raise LayoutError(
            "the engine would compute another function of the trained weights, although their "
            f"shapes fit.{in_words(wrong)} Build both from one configuration."
        )


def plain_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return path → value as JSON has it, for a message; what JSON cannot hold is left out."""
    values = {}
    for path, value in _flatten(config):
        with suppress(TypeError):
            values[path] = json.loads(json.dumps(value))
    return values


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if key in _DESCRIPTIVE:
            continue
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
