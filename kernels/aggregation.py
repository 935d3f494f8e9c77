"""How per-token losses become one number: a weight per token, with global denominators.

Every aggregation mode is one weight per unmasked token. With the denominators of the whole global
batch, the losses of micro-batches and ranks add up to the loss of the batch, however it is split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# The order is that of csrc/policy_loss/params.h.
LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


class Segments(NamedTuple):
    """Which sequence a token belongs to; those past the last belong to an extra, ignored one."""

    ids: Tensor  # [T] int64
    counts: Tensor  # [n + 1] int64, unmasked tokens

    @staticmethod
    def of(cu_seqlens: Tensor, mask: Tensor) -> Segments:
        places = torch.arange(mask.numel(), device=mask.device)
        ids = torch.searchsorted(cu_seqlens[1:].long(), places, right=True)
        counts = torch.zeros(cu_seqlens.numel(), dtype=torch.int64, device=mask.device)
        return Segments(ids, counts.index_add(0, ids, mask.long()))

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Mean over the unmasked tokens of the sequence, spread to its tokens, [T]."""
        sums = torch.zeros(self.counts.shape, dtype=values.dtype, device=values.device)
        sums = sums.index_add(0, self.ids, torch.where(mask, values, 0))
        return (sums / self.counts.clamp(min=1))[self.ids]


def as_mask(response_mask: Tensor | None, like: Tensor) -> Tensor:
    """bool, all True for None."""
    if response_mask is None:
        return torch.ones_like(like, dtype=torch.bool)
    return response_mask.bool()


def kept(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with 0 where masked; what was there, NaN included, is gone before any arithmetic."""
    return torch.where(mask, values, 0)


def denominator(
    given: float | Tensor | None, device: torch.device, count: Callable[[], Tensor]
) -> Tensor:
    """A 0-d float64 tensor on the device, at least 1; made there, so that nothing waits for it."""
    if given is None:
        value = count()
    elif isinstance(given, Tensor):
        value = given.detach().reshape(()).to(device)
    else:
        value = torch.full((), given, dtype=torch.float64, device=device)
    return value.double().clamp(min=1)


def token_weights(
    loss_agg_mode: str,
    mask: Tensor,
    segments: Segments | None,
    num_tokens: Tensor,
    num_seqs: Tensor,
    loss_scale_factor: float | None,
) -> Tensor:
    """[T], what each token's terms are multiplied by in the loss; 0 where masked.

    With N = num_tokens and S = num_seqs (global), L the unmasked tokens of the token's sequence:
    token-mean 1/N, token-sum 1, seq-mean-token-sum 1/S, seq-mean-token-mean 1/(S L),
    seq-mean-token-sum-norm 1/(S loss_scale_factor).
    """
    if loss_agg_mode == "token-mean":
        weight = 1 / num_tokens
    elif loss_agg_mode == "token-sum":
        weight = torch.ones_like(num_tokens)
    elif loss_agg_mode == "seq-mean-token-sum":
        weight = 1 / num_seqs
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        weight = 1 / (num_seqs * loss_scale_factor)
    else:
        weight = 1 / (num_seqs * segments.counts.clamp(min=1)[segments.ids])
    return torch.where(mask, weight, 0)


def denominators(
    op: str,
    loss_agg_mode: str,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    global_num_tokens: float | Tensor | None,
    global_num_seqs: float | Tensor | None,
) -> Tensor:
    """float64 [2]: the global tokens and sequences, counted here where they are not given."""
    num_tokens = denominator(global_num_tokens, mask.device, mask.sum)
    num_seqs = num_tokens  # the token modes do not read it
    if loss_agg_mode.startswith("seq"):
        if cu_seqlens is None:
            raise ValueError(
                f"{op}: loss_agg_mode {loss_agg_mode!r} works on sequences; give cu_seqlens"
            )
        num_seqs = denominator(
            global_num_seqs,
            mask.device,
            lambda: (Segments.of(cu_seqlens, mask).counts > 0).sum(),
        )
    return torch.stack([num_tokens, num_seqs])


def check_choice(op: str, name: str, value: str, known: tuple[str, ...], aliases=()) -> None:
    if value not in known and value not in aliases:
        raise ValueError(
            f"{op}: {name} is {value!r}; expected one of {', '.join((*known, *aliases))}"
        )


def check_shapes(op: str, name: str, first: Tensor, per_token: dict[str, Tensor | None]) -> None:
    if first.dim() != 1:
        raise ValueError(
            f"{op}: {name} has shape {list(first.shape)}; expected [T], packed: "
            "see hybridengine.kernels.pack"
        )
    for other, tensor in per_token.items():
        if tensor is not None and tensor.shape != first.shape:
            raise ValueError(
                f"{op}: {other} has shape {list(tensor.shape)}; expected "
                f"{list(first.shape)} like {name}"
            )
