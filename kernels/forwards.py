"""Forwards of modules by row operators, with the names that transformers and vLLM give parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .layer import Activation, gated_activation, row_norm


def activation_forward(activation: Activation) -> Callable[[Any, Tensor], Tensor]:
    """Return a forward of modules: the activation by itself, with `gated_activation`'s bits."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return gated_activation(x, x.new_ones(x.shape[-1]).expand(x.shape), activation)

    return forward


def gated_forward(activation: Activation) -> Callable[[Any, Tensor], Tensor]:
    """Return a forward of gated MLPs with transformers' names, whose product is rounded once."""

    def forward(self: Any, x: Tensor) -> Tensor:
        is_fused = hasattr(self, "gate_up_proj")
        gate_up = self.gate_up_proj(x).chunk(2, -1) if is_fused else ()
        gate, up = gate_up or (self.gate_proj(x), self.up_proj(x))
        out: Tensor = self.down_proj(gated_activation(gate, up, activation))
        return out

    return forward


def norm_forward(
    eps: float, options: Mapping[str, Any], returns_residual: bool = False
) -> Callable[..., Any]:
    """Return a forward of modules with a weight: the `row_norm` with these options.

    returns_residual: also what they are called with as a residual, unchanged.
    """

    def forward(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        out = row_norm(x, self.weight, getattr(self, "bias", None), eps, **options)
        return (out, residual) if returns_residual else out

    return forward
