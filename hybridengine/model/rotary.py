"""Rotary embeddings whose frequencies depend on the longest sequence: LongRoPE, dynamic NTK.

transformers takes the longest position of the batch at hand, so a token's logits would depend on
what is packed beside it. Here it is the longest sequence of the run, as in vLLM (`max_model_len`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from hybridengine.model.validation import (
    long_rope_limit,
    longest_sequence,
    meta_model,
    rotary_parameters,
)
from hybridengine.run.errors import ModelError

_PROBED = 16  # positions at which angles are compared
_TOLERANCE = 1e-4  # between two ways to compute an angle in float32; factors differ by far more


def fix_rotary_length(model: PreTrainedModel, max_model_len: int | None = None) -> None:
    """Let rotary embeddings treat every batch as one that contains a sequence of the longest kind.

    Embeddings that do not depend on the batch stay as they are.

    model: its buffers are not on the meta device.
    max_model_len: the longest sequence of the run, in tokens; None: that of the model.
    """
    config = model.config
    limits = [n for n in (max_model_len, longest_sequence(config)) if n is not None]
    if not limits:
        return
    length = min(limits)
    for module in _rotary_modules(model):
        if any(_depends_on_batch(module, config, length, kind) for kind in _layer_types(module)):
            module.forward = MethodType(_with_last_position(type(module).forward, length), module)


def check_rotary(
    config: PretrainedConfig, max_model_len: int, trust_remote_code: bool = False
) -> None:
    """Raise ModelError where the model and vLLM compute other angles for the same positions.

    Only LongRoPE is compared, whose factors the two read from different entries of config.json.
    """
    if long_rope_limit(config) is None:
        return
    model = meta_model(config, trust_remote_code)
    for module in _rotary_modules(model):
        module.to_empty(device="cpu")
        model._init_weights(module)  # computes its frequencies
    fix_rotary_length(model, max_model_len)
    text = config.get_text_config()
    for module in _rotary_modules(model):
        for kind in _layer_types(module):
            rope = text.rope_parameters if kind is None else text.rope_parameters[kind]
            if rope.get("rope_type") == "longrope":
                cos, sin = (x[0, 1].double() for x in _angles(module, text, [0, 1], kind))
                _compare(type(module).__name__, cos, sin, rope, text, max_model_len)


def _compare(
    module: str,
    cos: Tensor,
    sin: Tensor,
    rope: dict[str, Any],
    config: PretrainedConfig,
    max_model_len: int,
) -> None:
    """Compare cos and sin of position 1 with `Phi3LongRoPEScaledRotaryEmbedding` of vLLM 0.32."""
    original = rope["original_max_position_embeddings"]
    used = "long" if max_model_len > original else "short"
    factors = torch.tensor(rope[f"{used}_factor"], dtype=torch.float64)
    frequencies = rope["rope_theta"] ** -(torch.arange(len(factors)) / len(factors)) / factors
    ratio = config.max_position_embeddings / original
    scale = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    scale = rope.get(f"{used}_mscale") or scale

    found = float((cos**2 + sin**2).sqrt().mean())
    if abs(found - scale) > _TOLERANCE * scale:
        raise ModelError(
            f"the rotary embedding of the model ({module}, longrope) scales by {found:.6g}, and "
            f"that of vLLM by {scale:.6g}, which does not read attention_factor and factor: remove "
            "them from rope_parameters in config.json, or train another model"
        )
    if (torch.atan2(sin, cos)[: len(factors)] - frequencies).abs().max() > _TOLERANCE:
        raise ModelError(
            f"the rotary embedding of the model ({module}, longrope) does not have the "
            f"{used}_factor of rope_parameters for sequences of up to {max_model_len} tokens, and "
            f"that of vLLM does; use sequences of up to {original} tokens "
            "(original_max_position_embeddings)"
        )


def _rotary_modules(model: PreTrainedModel) -> Iterator[Any]:
    """Yield the modules of the language model that compute cosines and sines of positions."""
    for module in model.get_decoder().modules():
        arguments = inspect.signature(module.forward).parameters
        if "position_ids" in arguments and not list(module.parameters()):
            yield module


def _layer_types(module: Any) -> list[str | None]:
    """Return the kinds of layers for which a rotary embedding has other frequencies."""
    kinds = getattr(module, "rope_type", None)
    return list(kinds) if isinstance(kinds, dict) else [None]


def _depends_on_batch(module: Any, config: PretrainedConfig, length: int, kind: str | None) -> bool:
    """Return whether a sequence of `length` tokens changes the angles of other positions."""
    positions = list(range(min(_PROBED, length)))
    alone = _angles(module, config, positions, kind)
    beside = _angles(module, config, [*positions, length - 1], kind)
    return not all(
        torch.allclose(x, y[..., :-1, :], rtol=0, atol=_TOLERANCE / 10)
        for x, y in zip(alone, beside, strict=True)
    )


def _angles(
    module: Any, config: PretrainedConfig, positions: list[int], kind: str | None
) -> tuple[Tensor, ...]:
    """Return what the module computes for positions of one sequence, float32 or complex."""
    device = next((buffer.device for buffer in module.buffers()), torch.device("cpu"))
    ids = torch.tensor(positions, device=device)[None]
    if any("mrope_section" in rope for rope in rotary_parameters(config)):
        ids = ids.expand(3, 1, -1)
    options = {} if kind is None else {"layer_type": kind}
    result = module(torch.zeros(1, 1, 1, device=device), ids, **options)
    return result if isinstance(result, tuple) else (result,)


def _with_last_position(forward: Any, length: int) -> Any:
    """Return a forward that computes the angles of position `length - 1` too, and drops them."""

    def fixed(self: Any, x: Tensor, position_ids: Tensor, *args: Any, **options: Any) -> Any:
        last = position_ids.new_full((*position_ids.shape[:-1], 1), length - 1)
        result = forward(self, x, torch.cat([position_ids, last], -1), *args, **options)
        if isinstance(result, Tensor):
            return result[..., :-1, :]
        return tuple(part[..., :-1, :] for part in result)

    return fixed
