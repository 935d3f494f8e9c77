"""A model of transformers whose layers with a state along the sequence take packed batches.

The layers call functions that are globals of their module. A layer of the model gets its class's
forward with other globals, in which `functions.FUNCTIONS` stand for them; neither the class nor the
module changes. The segments of a batch travel with the call of the model: a hook puts them among
the keyword arguments, which transformers passes to every decoder layer, so a layer that gradient
checkpointing computes again gets the same ones.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hybridengine.hybrid.functions import FORWARDS, FUNCTIONS, RUNNING, rebound
from hybridengine.hybrid.segments import find_segments
from hybridengine.model.validation import carried_state
from hybridengine.run.errors import ModelError

__all__ = ["MODEL_TYPES", "pack_linear_attention", "refuse_packed", "takes_packed"]

# Tested: tests/extras/hybrid.
MODEL_TYPES = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "nemotron_h",
    "granitemoehybrid",
    "falcon_h1",
    "bamba",
    "jamba",
    "mamba2",
    "minimax",
)

_KEYWORD = "linear_segments"
_CODE = "transformers.models."


def pack_linear_attention(model: nn.Module) -> None:
    """Let the layers of `model` with a state along the sequence take packed batches, in place.

    A packed batch is one row of sequences end to end, described by `cu_seq_lens_q`, `seq_idx` or
    position_ids that restart, as other trainers pass them; other calls are as before. Call it
    before the model is sharded or wrapped; with PEFT, before or after. It has no effect on a model
    without such layers, or a second time.

    Raises:
        ModelError: the layers of the model cannot take packed batches.
    """
    if takes_packed(model):
        return
    layers = dict(_stateful_layers(model))
    if _state_of(model) is None and not layers:
        return
    if not layers or _model_type(model) not in MODEL_TYPES:
        raise ModelError(
            f"pack_linear_attention: got a {type(model).__name__} of type {_model_type(model)!r}; "
            f"expected transformers' own code for one of {list(MODEL_TYPES)}"
        )
    decoder_layers, bodies = dict[nn.Module, None](), dict[nn.Module, None]()
    for name, (layer, forward) in layers.items():
        layer.forward = types.MethodType(forward, layer)
        above = [model.get_submodule(x) for x in _prefixes(name)]
        decoder_layers[next(x for x in above if isinstance(x, GradientCheckpointingLayer))] = None
        models: list[Any] = [x for x in above if isinstance(x, PreTrainedModel)]
        bodies |= dict.fromkeys(models)
        models[-1]._passes_segments = True
    for decoder_layer in decoder_layers:
        decoder_layer.register_forward_pre_hook(_enter_layer, with_kwargs=True, prepend=True)
        decoder_layer.register_forward_hook(_leave_layer, always_call=True)
    for body in bodies:
        body.register_forward_pre_hook(_enter_model, with_kwargs=True, prepend=True)
        body.register_forward_hook(_leave_model, always_call=True)


def refuse_packed(model: nn.Module) -> None:
    """Let `model` raise ModelError for a packed batch if its layers would leak between sequences.

    Without effect on a model without a state along the sequence, or with `pack_linear_attention`,
    which may also follow.
    """
    if (state := _state_of(model)) is not None:

        def check(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if not takes_packed(model) and find_segments(kwargs) is not None:
                raise ModelError(
                    f"a packed batch for {type(model).__name__}: {state}, which would leak from "
                    "one sequence into the next; call hybridengine.integrations.transformers."
                    "pack_linear_attention(model) first if its type is one of "
                    f"{list(MODEL_TYPES)}, otherwise turn packing (padding-free batches) off"
                )

        model.register_forward_pre_hook(check, with_kwargs=True, prepend=True)


def takes_packed(model: nn.Module) -> bool:
    """Return whether `pack_linear_attention` has changed `model`."""
    return any(
        _enter_model in module._forward_pre_hooks.values()
        for module in model.modules()
        if isinstance(module, PreTrainedModel)
    )


def _state_of(model: nn.Module) -> str | None:
    config = getattr(model, "config", None)
    state = carried_state(config) if isinstance(config, PretrainedConfig) else None
    own_code = isinstance(model, PreTrainedModel) and model.is_custom_code()
    if state is None and own_code and model._is_stateful:
        return f"{type(model).__name__} carries a state along the sequence"
    return state


def _model_type(model: nn.Module) -> str:
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return "unknown"
    name: str = config.get_text_config().model_type
    return name


def _stateful_layers(
    model: nn.Module,
) -> Iterator[tuple[str, tuple[nn.Module, Callable[..., Any]]]]:
    """Yield name, module and its forward over packed segments."""
    for name, module in model.named_modules():
        kind: Any = type(module)
        if kind.__module__.startswith(_CODE) and (forward := _packed_forward(kind)) is not None:
            yield name, (module, forward)


@functools.cache
def _packed_forward(kind: type[nn.Module]) -> Callable[..., Any] | None:
    """Return the forward of a class over packed segments; None: it calls none of the functions."""
    if kind.__name__ in FORWARDS:
        own = functools.partial(FORWARDS[kind.__name__], kind.forward)
        return lambda layer, *args, **kwargs: own(layer, *args, **kwargs)
    forward: Any = inspect.unwrap(kind.forward)
    code = getattr(forward, "__code__", None)
    if code is None or not (names := FUNCTIONS.keys() & set(code.co_names)):
        return None
    scope = forward.__globals__
    return rebound(forward, {n: functools.partial(FUNCTIONS[n], scope[n]) for n in names})


def _prefixes(name: str) -> list[str]:
    """a.b.c -> "", a, a.b"""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(len(parts))]


def _enter_model(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Find the segments of a call; the model around the layers passes them on.

    They are found in the outermost model, which may not pass all of its arguments on.
    """
    if RUNNING.call is None:
        RUNNING.call = find_segments(kwargs)
    if RUNNING.call is None or not hasattr(model, "_passes_segments"):
        return None
    return args, kwargs | {_KEYWORD: RUNNING.call}


def _leave_model(*_: Any) -> None:
    RUNNING.call = None


def _enter_layer(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    RUNNING.segments = kwargs.get(_KEYWORD)
    if RUNNING.call is not None and RUNNING.segments is not RUNNING.call:
        raise ModelError(
            f"{type(layer).__name__} does not get the keyword arguments of its model, so a packed "
            "batch would leak from one sequence into the next; use another version of transformers"
        )
    return args, {name: value for name, value in kwargs.items() if name != _KEYWORD}


def _leave_layer(*_: Any) -> None:
    RUNNING.segments = None
