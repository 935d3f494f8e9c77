"""The logits of the reference backends: a product that autograd can differentiate any number of
times."""

from __future__ import annotations

from torch import Tensor

from .._per_token import compute_dtype
from ..gemm import product


def reference_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ignored: Tensor
) -> Tensor:
    """Compute logits [..., V], float32 (float64 for float64), of hidden [..., H] and weight [V, H].

    ignored: [...] bool, rows whose hidden states are taken as 0.
    """
    dtype = compute_dtype(hidden)
    rows = hidden.masked_fill(ignored.unsqueeze(-1), 0).to(dtype)
    flat = rows if rows.dim() == 2 else rows.flatten(0, -2)
    logits = product(flat, weight.to(dtype), None if bias is None else bias.to(dtype))
    return logits if rows.dim() == 2 else logits.unflatten(0, rows.shape[:-1])
