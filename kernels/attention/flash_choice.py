"""The implementation of FlashAttention on a GPU: the fastest that a small forest finds right."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

from . import reference
from .flash import ATEN, FlashPair, cute_pair
from .reference import Heads, TreeOptions

# Largest error relative to the largest entry: bfloat16 rounds by 2^-9, and P, dS, the parts and
# their sum are rounded once each.
TOLERANCE = 2.0**-6
# Two prompts of 200 and 70 tokens with responses of 150, 1 and 130, 90, and one sequence of 40.
_ENDS = ((200, 351), (150, 350), (1, 351), (70, 641), (130, 551), (90, 641), (40, 681))


@cache
def flash_pair(device: torch.device, head_size: int) -> FlashPair:
    """Return the fastest passes that are installed and right on a GPU, for heads of a size.

    FlashAttention 4 on Hopper and Blackwell, for heads of up to 128, after a check of its results;
    else torch's FlashAttention 2.
    """
    major, _ = torch.cuda.get_device_capability(device)
    if major not in (9, 10, 11) or head_size > 128:
        return ATEN
    try:
        pair = cute_pair(import_module("flash_attn.cute.interface"))
    except ImportError:
        return ATEN
    if reason := why_wrong(pair, device, head_size):
        warnings.warn(
            f"flash_attn.cute is not used for heads of size {head_size} on "
            f"{torch.cuda.get_device_name(device)}: {reason}. torch's FlashAttention 2 takes its "
            "place: install another version of flash-attn-4, or remove it.",
            RuntimeWarning,
            stacklevel=2,
        )
        return ATEN
    return pair


def why_wrong(pair: FlashPair, device: torch.device, head_size: int) -> str | None:
    """Return what is wrong with its results, or None: causal runs, and runs without keys."""
    from .cascade import cascade_backward, cascade_forward  # Triton, of which a CPU has no need
    from .cascade_tables import make_cascade

    ends = torch.cat([torch.full((n,), end, dtype=torch.int32) for n, end in _ENDS]).to(device)
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> Tensor:
        values = torch.randn(len(ends), heads, head_size, generator=generator)
        return values.to(device, torch.bfloat16)

    heads, grad, scale = Heads(draw(4), draw(2), draw(2)), draw(4), head_size**-0.5
    options = TreeOptions(ends, None, scale, None, None)
    exact = Heads(*(x.double() for x in heads))
    exact_out, exact_lse = reference.tree_attention_forward(exact, options, None)
    exact_grads, _ = reference.tree_attention_backward(
        grad.double(), exact, exact_out, exact_lse, options
    )
    try:
        cascade = make_cascade(ends)
        out, lse = cascade_forward(heads, scale, cascade, pair)
        grads = cascade_backward(grad, heads, out, lse, scale, cascade, pair)
    except Exception as error:  # of a compiler or driver: any
        return f"it raises {type(error).__name__}: {error}"
    names = ("the result", "log-sum-exp", "grad_query", "grad_key", "grad_value")
    expected = (exact_out, exact_lse, *exact_grads)
    for name, got, right in zip(names, (out, lse, *grads), expected, strict=True):
        error_of = ((got.double() - right).abs().max() / right.abs().max()).item()
        if not error_of <= TOLERANCE:  # NaN is wrong, too
            return f"{name} of a check has a relative error of {error_of:.2g}"
    return None
