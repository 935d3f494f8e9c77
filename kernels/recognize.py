"""Which operator of this package computes what a function or module does, found by trying."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .layer import Activation, row_norm
from .rotary import rotate

_FEW = 0.01  # of the elements may differ: roundings of sums in another order, or of other angles
_OF_VECTORS: tuple[dict[str, Any], ...] = ({"round_first": True}, {}, {"offset": 1.0})
_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def find_activation(function: Callable[[Tensor], Tensor]) -> Activation | None:
    """Return the activation of `gated_activation` that the function is."""
    x = torch.linspace(-6, 6, 101)
    for activation, known in _ACTIVATIONS.items():
        if torch.allclose(function(x), known(x), rtol=0, atol=1e-6):
            return activation
    return None


def find_norm(module: Any, eps: float | None) -> dict[str, Any] | None:
    """Return the options of `row_norm` that give what the module does.

    module: with a weight, and maybe a bias; it may be on the meta device. eps: as far as known.
    """
    if eps is None or not isinstance(getattr(module, "weight", None), Tensor):
        return None
    probe = copy.deepcopy(module).to_empty(device="cpu").bfloat16()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator) + 0.5)
        weight = probe.weight
        rows = 1 + 2048 // weight.numel()
        x = (torch.randn(rows, *weight.shape, generator=generator) + 0.5).bfloat16()
        for options in (*(_OF_VECTORS if weight.dim() == 1 else ()), {"centered": True}):
            given = weight, getattr(probe, "bias", None), eps
            if _is_same(row_norm(x, *given, **options, backend="reference"), probe(x)):
                return options
    return None


def find_tables(decoder: Any, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the tables by which `rotate` turns neighbours in bfloat16 as a model does.

    They are in float32, rounded to bfloat16, or in bfloat16, by which products are rounded, too.

    decoder: of transformers, with a rotary embedding beside the function that applies it.
    cos, sin: float32 [positions, R / 2].
    """
    kinds = (type(module) for module in decoder.modules())
    rotary = next(kind for kind in kinds if kind.__name__.endswith("RotaryEmbedding"))
    apply = sys.modules[rotary.__module__].apply_rotary_pos_emb
    positions = torch.arange(min(64, len(cos)))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(positions), 1, 2 * cos.shape[1], generator=generator).bfloat16()
    heads = x.transpose(0, 1)[None]
    expected = apply(heads, heads, *rotary(decoder.config)(x, positions[None]))[0]
    expected = expected[0].transpose(0, 1)
    rounded = cos.bfloat16(), sin.bfloat16()
    for tables in ((cos, sin), (rounded[0].float(), rounded[1].float()), rounded):
        one, other = (t[: len(x)].cpu() for t in tables)
        if _is_same(rotate(x.clone(), positions, one, other, neighbours=True), expected):
            return tables
    return None


def _is_same(one: Tensor, other: Tensor) -> bool:
    return float((one != other).float().mean()) < _FEW
