"""Attention of mixtures for `rollout.exact`: latent attention (MLA), and rotary embeddings.

Latent attention multiplies keys and values of every head out of a latent vector (DeepSeek-V2, arXiv
2405.04434). vLLM multiplies by the same weights in another order as it decodes. An exact engine
runs transformers' own module instead, with vLLM's tensors, and caches keys and values of every head
as the trained model computes them.

A rotary embedding has the cosines and sines of `trained_rotary` in the form of transformers' own:
of half the width (gpt_oss), or complex numbers (deepseek_v2). torch multiplies complex numbers at
the end of a thread's part by another function than the others, so that their products are formed of
real ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface

from hybridengine.kernels.layer import inference_norm
from hybridengine.model.exact import ROPE_TYPES, norm_options, trained_rotary
from hybridengine.moe.routers import layer_index
from hybridengine.run.errors import ModelError

__all__ = ["engine_attention", "of_rows", "trained_attention"]

_Forwards = dict[Any, Callable[..., Any]]
_IN_ENGINE = "hybridengine_in_engine"  # of transformers' attention: `module.attend` of an engine
_AS_LLAMA = {"round_first": True}  # the norm that an exact engine has otherwise
_PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__)


def trained_attention(decoder: nn.Module) -> _Forwards:
    """Return the forwards of latent attention and rotary embeddings of a trained model."""
    forwards: _Forwards = {}
    for module in decoder.modules():
        if _is_latent(module):
            forwards[module] = _with_real_products
        elif _has_sinks(module):
            forwards[module] = type(module).forward
        elif type(module).__name__.endswith("RotaryEmbedding") and (form := _form(module)):
            forwards[module] = partial(_rotary, form)
    return forwards


def engine_attention(model: Any, trained: Any) -> _Forwards:
    """Return the forwards of latent attention of a vLLM model.

    trained: the same model of transformers, on the meta device.

    Raises:
        ModelError: transformers' module has parts, or a scale, that vLLM's has not.
    """
    modules: dict[str, Any] = dict(trained.named_modules())
    blocks = {layer_index(n): m for n, m in modules.items() if _is_latent(m)}
    rotary = _rotary_of(modules) if blocks else None
    forwards: _Forwards = {}
    for name, own in model.named_modules():
        if type(own).__name__ == "RMSNorm" and name in modules:
            # vLLM takes the epsilon of the configuration for all, transformers not.
            own.variance_epsilon = modules[name].variance_epsilon
            options = norm_options(name, modules[name], own.variance_epsilon)
            if options != _AS_LLAMA:
                forwards[own] = partial(_norm, options)
        elif _has_sinks(own):
            forwards[own] = type(own).forward
    for name, own in model.named_modules():
        if not (_is_latent(own) and hasattr(own, "attn")):
            continue
        block = blocks.get(layer_index(name))
        if block is None or getattr(model.config, "llama_4_scaling", None) is not None:
            raise ModelError(f"its {name} is another attention in transformers")
        forwards |= {m: type(m).forward for m in own.rotary_emb.modules()}  # not called
        forwards[own] = _engine_forward(name, own, block, rotary)
    return forwards


def _norm(options: dict[str, Any], self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    out = inference_norm(x, residual, self.weight, self.variance_epsilon, **options)
    return out if residual is None else (out, residual)


def _has_sinks(module: Any) -> bool:
    """Return whether the module has attention sinks, which the attention that it calls reads."""
    return isinstance(getattr(module, "sinks", None), nn.Parameter)


def _is_latent(module: Any) -> bool:
    return hasattr(module, "kv_b_proj") and hasattr(module, "qk_rope_head_dim")


def _rotary_of(modules: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the rotary embedding of a model on the meta device, with its frequencies."""
    (found,) = (module for name, module in modules.items() if name.endswith("rotary_emb"))
    with torch.device("cpu"):
        rotary = type(found)(found.config)
    return partial(trained_attention(rotary).get(rotary, trained_rotary), rotary)


def _engine_forward(name: str, own: Any, block: Any, rotary: Any) -> Callable[..., Any]:
    """Return a forward of vLLM's attention `own` that runs transformers' `block`."""
    for key, child in block.named_children():
        module: Any = getattr(own, key, None)
        if isinstance(child, nn.Linear) and hasattr(module, "output_size"):
            if (module.bias is None) != (child.bias is None):
                raise ModelError(f"its {name}.{key} has a bias in one of transformers and vLLM")
            child.forward = partial(of_rows, module)  # type: ignore[method-assign]
        elif type(child).__name__.endswith("RMSNorm") and module is not None:
            child.forward = partial(of_rows, module)
        else:
            raise ModelError(f"its {name}.{key} has no counterpart in vLLM that is known")
    impl = own.attn.impl
    if (impl.scale, impl.head_size) != (block.scaling, block.qk_head_dim):
        raise ModelError(
            f"its {name} scales by {impl.scale} in vLLM, and by {block.scaling} in transformers"
        )
    block.config = copy.copy(block.config)
    block.config._attn_implementation = _IN_ENGINE
    block.attend = partial(_attend, own.attn)

    def forward(self: Any, positions: Tensor, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """positions: [T]. hidden_states: [T, H]."""
        x = hidden_states[None]
        embeddings = rotary(x, positions[None])
        out: Tensor = _with_real_products(
            block, hidden_states=x, position_embeddings=embeddings, attention_mask=None
        )[0]
        return out[0]

    return forward


def of_rows(own: Any, x: Tensor) -> Tensor:
    """Return what a module of vLLM that takes rows computes from `x` [..., H]."""
    out = own(x.reshape(-1, x.shape[-1]))
    rows: Tensor = out[0] if isinstance(out, tuple) else out
    return rows.view(*x.shape[:-1], -1)


def _attend(attn: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend by vLLM's layer: query, key [1, H, T, D], value [1, H, T, D_v] -> [1, T, H, D_v].

    vLLM's layer has heads of one size: zeros are appended to values, and columns to the result.
    """
    size, width = query.shape[-1], value.shape[-1]
    value = nn.functional.pad(value, [0, size - width])
    rows = (x[0].transpose(0, 1).flatten(1) for x in (query, key, value))
    return attn(*rows).unflatten(1, (-1, size))[None, ..., :width]


def _in_engine(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    dropout: float = 0.0,
    scaling: float | None = None,
) -> tuple[Tensor, None]:
    return module.attend(query, key, value), None


AttentionInterface.register(_IN_ENGINE, _in_engine)


def _with_real_products(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The own forward of latent attention."""
    with _RealProducts():
        return type(self).forward(self, *args, **kwargs)


class _RealProducts(TorchFunctionMode):
    """Complex products, as those of rotary embeddings, by real ones."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _PRODUCTS and all(isinstance(x, Tensor) and x.is_complex() for x in args[:2]):
            (a, b), (c, d) = (torch.view_as_real(x).unbind(-1) for x in args[:2])
            return torch.complex(a * c - b * d, a * d + b * c)
        return func(*args, **(kwargs or {}))


def _form(module: Any) -> str | None:
    """Return how a rotary embedding of transformers returns its angles; None: [..., D] each."""
    if getattr(module, "rope_type", None) not in ROPE_TYPES:
        return None
    probe = copy.deepcopy(module).to_empty(device="cpu")
    ids = torch.zeros(1, 1, dtype=torch.long)
    try:
        out = type(module).forward(probe, torch.zeros(1, 1, 1), ids)
    except (IndexError, RuntimeError, TypeError, ValueError):  # of other positions: M-RoPE
        return None
    if isinstance(out, Tensor):
        return "complex"
    return "half" if out[0].shape[-1] == module.inv_freq.numel() else None


def _rotary(form: str, self: Any, x: Tensor, position_ids: Tensor) -> Any:
    dtype = torch.float32 if form == "complex" else x.dtype
    pair = trained_rotary(self, x.new_empty(0, dtype=dtype), position_ids)
    cos, sin = (t.chunk(2, -1)[0] for t in pair)
    return torch.complex(cos, sin) if form == "complex" else (cos, sin)
