"""How per-token losses become one number: a weight per token, with global denominators.

Every aggregation mode is one weight per unmasked token. With the denominators of the whole global
batch, the losses of micro-batches and ranks add up to the loss of the batch, however it is split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _check as check

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
        token_index = torch.arange(mask.numel(), device=mask.device)
        ids = torch.searchsorted(cu_seqlens[1:].long(), token_index, right=True)
        counts = torch.zeros(cu_seqlens.numel(), dtype=torch.int64, device=mask.device)
        return Segments(ids, counts.index_add(0, ids, mask.long()))

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Mean over the unmasked tokens of the sequence, spread to its tokens, [T]."""
        sums = torch.zeros(self.counts.shape, dtype=values.dtype, device=values.device)
        sums = sums.index_add(0, self.ids, torch.where(mask, values, 0))
        return (sums / self.counts.clamp(min=1))[self.ids]


def check_given(op: str, **tensors: Tensor | None) -> None:
    """Raise TypeError for a tensor that is None, by name."""
    for name, tensor in tensors.items():
        if tensor is None:
            raise TypeError(f"{op}: {name} is None; expected a tensor.")


def token_arguments(
    op: str,
    floats: dict[str, Tensor | None],
    masks: dict[str, Tensor | None],
    cu_seqlens: Tensor | None,
) -> tuple[dict[str, Tensor | None], Tensor | None]:
    """The per-token arguments of an operator, checked and packed: (all of them [T], cu_seqlens).

    Args:
        floats: by name, [T], or [B, L]: B sequences of L tokens each, which are laid end to end.
            The first one sets the shape and the device.
        masks: by name, bool or 0/1 numbers of that shape; they become bool.
        cu_seqlens: [N + 1] int32 or int64, or None; only beside [T]. Tokens past its end must be
            masked in masks["response_mask"].
    """
    given = {**floats, **masks}
    check.same_device(op, **given, cu_seqlens=cu_seqlens)
    check.floats(op, **floats)
    name, first = next(iter(floats.items()))
    assert first is not None
    if first.dim() not in (1, 2):
        raise ValueError(
            f"{op}: {name} has shape {list(first.shape)}; expected [T], packed tokens, or [B, L]."
        )
    for other, tensor in given.items():
        if tensor is not None and tensor.shape != first.shape:
            raise ValueError(
                f"{op}: {other} has shape {list(tensor.shape)}; expected "
                f"{list(first.shape)} like {name}."
            )
    for other, tensor in masks.items():
        given[other] = None if tensor is None else check.mask(op, other, tensor)
    if first.dim() == 1:
        if cu_seqlens is not None:
            cu_seqlens = check.cu_seqlens(op, cu_seqlens, first.numel(), given["response_mask"])
        return given, cu_seqlens
    if cu_seqlens is not None:
        raise ValueError(
            f"{op}: cu_seqlens is given and {name} has shape {list(first.shape)}; the rows are "
            "the sequences of [B, L]: leave cu_seqlens out, or pack the tokens to [T]."
        )
    flat = {other: None if t is None else t.reshape(-1) for other, t in given.items()}
    return flat, row_ends(first)


def row_ends(values: Tensor) -> Tensor:
    """cu_seqlens of the rows of [B, L], laid end to end: int32 [B + 1]."""
    rows, length = values.shape
    return torch.arange(rows + 1, device=values.device, dtype=torch.int32) * length


def compute_dtype(values: Tensor) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def as_mask(response_mask: Tensor | None, like: Tensor) -> Tensor:
    """bool, all True for None."""
    if response_mask is None:
        return torch.ones_like(like, dtype=torch.bool)
    return response_mask.bool()


def kept(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with 0 where masked; what was there, NaN included, is gone before any arithmetic."""
    return torch.where(mask, values, 0)


def denominator(
    op: str,
    name: str,
    given: float | Tensor | None,
    device: torch.device,
    count: Callable[[], Tensor],
) -> Tensor:
    """A 0-d float64 tensor on the device, at least 1; made there, so that nothing waits for it."""
    _check_count(op, name, given, device)
    if given is None:
        value = count()
    elif isinstance(given, Tensor):
        value = given.detach().reshape(()).to(device)
    else:
        value = torch.full((), float(given), dtype=torch.float64, device=device)
    return value.double().clamp(min=1)


def _check_count(op: str, name: str, given: float | Tensor | None, device: torch.device) -> None:
    """A finite number from 0 up, or a tensor with one (its value is looked at on the CPU only)."""
    if isinstance(given, Tensor):
        if given.numel() != 1 or given.device not in (device, torch.device("cpu")):
            raise ValueError(
                f"{op}: {name} is a tensor of shape {list(given.shape)} on {given.device}; "
                f"expected a number, or a tensor with one element on {device} or the CPU."
            )
        given = given.item() if check.readable(given) else None
    if given is not None:
        check.number(op, name, given, at_least=0)


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
    device = mask.device
    num_tokens = denominator(op, "global_num_tokens", global_num_tokens, device, mask.sum)
    if not loss_agg_mode.startswith("seq"):  # these modes do not read the sequences
        _check_count(op, "global_num_seqs", global_num_seqs, device)
        return torch.stack([num_tokens, num_tokens])
    if cu_seqlens is None:
        raise ValueError(
            f"{op}: loss_agg_mode {loss_agg_mode!r} works on sequences; give cu_seqlens."
        )

    def count_sequences() -> Tensor:
        return (Segments.of(cu_seqlens, mask).counts > 0).sum()

    num_seqs = denominator(op, "global_num_seqs", global_num_seqs, device, count_sequences)
    return torch.stack([num_tokens, num_seqs])


def check_aggregation(op: str, loss_agg_mode: str, loss_scale_factor: float | None) -> float | None:
    """Check the mode, and the scale factor, which one mode needs; return the factor."""
    check.choice(op, "loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES)
    if loss_scale_factor is not None:
        return check.number(op, "loss_scale_factor", loss_scale_factor, above=0)
    if loss_agg_mode == "seq-mean-token-sum-norm":
        raise ValueError(
            f"{op}: loss_agg_mode 'seq-mean-token-sum-norm' needs loss_scale_factor, "
            "usually the longest response allowed."
        )
    return None
