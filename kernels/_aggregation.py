"""Aggregation of per-token losses: one weight per token, with global denominators.

With the denominators of the whole global batch, the losses of micro-batches and ranks add up to the
loss of the batch, however it is split.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from . import _check as check
from ._per_token import TokenSequences

# In the order of LossAggMode in csrc/policy_loss/params.h.
LOSS_AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)

Counts = tuple[float | Tensor | None, float | Tensor | None]  # global_num_tokens, global_num_seqs


def check_aggregation(op: str, loss_agg_mode: str, loss_scale_factor: float | None) -> float | None:
    """Check the mode and the scale factor, which one mode needs; return the factor."""
    check.choice(op, "loss_agg_mode", loss_agg_mode, LOSS_AGG_MODES)
    if loss_scale_factor is not None:
        return check.number(op, "loss_scale_factor", loss_scale_factor, above=0)
    if loss_agg_mode == "seq-mean-token-sum-norm":
        raise ValueError(
            f"{op}: loss_agg_mode 'seq-mean-token-sum-norm' needs loss_scale_factor, "
            "usually the longest response allowed."
        )
    return None


def check_seq_num_tokens(
    op: str, loss_agg_mode: str, cu_seqlens: Tensor | None, seq_num_tokens: Tensor | None
) -> Tensor | None:
    """Check the numbers of tokens [N] that divide the losses of the sequences; constants."""
    if seq_num_tokens is None:
        return None
    if loss_agg_mode != "seq-mean-token-mean" or cu_seqlens is None:
        raise ValueError(
            f"{op}: seq_num_tokens is given with loss_agg_mode {loss_agg_mode!r}; only "
            "'seq-mean-token-mean' divides by the tokens of a sequence: leave it out."
        )
    check.same_device(op, cu_seqlens=cu_seqlens, seq_num_tokens=seq_num_tokens)
    check.dtype(op, "seq_num_tokens", seq_num_tokens, check.NUMBERS)
    check.shape(
        op, "seq_num_tokens", seq_num_tokens, "N", {"N": (cu_seqlens.numel() - 1, "cu_seqlens")}
    )
    return seq_num_tokens.detach()


def token_weights(
    loss_agg_mode: str,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    denominators: Tensor,
    loss_scale_factor: float | None,
    seq_num_tokens: Tensor | None = None,
) -> Tensor:
    """Return the weight of every token in the loss: float64 [T], 0 where masked.

    With N and S the global tokens and sequences of `denominators`, and L the unmasked tokens of the
    token's sequence, or its entry of `seq_num_tokens` ([N]): token-mean 1/N, token-sum 1,
    seq-mean-token-sum 1/S, seq-mean-token-mean 1/(S L), seq-mean-token-sum-norm
    1/(S loss_scale_factor).
    """
    num_tokens, num_seqs = denominators.unbind()
    if loss_agg_mode == "token-mean":
        weight = 1 / num_tokens
    elif loss_agg_mode == "token-sum":
        weight = torch.ones_like(num_tokens)
    elif loss_agg_mode == "seq-mean-token-sum":
        weight = 1 / num_seqs
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        assert loss_scale_factor is not None
        weight = 1 / (num_seqs * loss_scale_factor)
    else:
        assert cu_seqlens is not None
        sequences = TokenSequences.of(cu_seqlens, mask)
        lengths = sequences.lengths
        if seq_num_tokens is not None:  # the last entry is of the tokens without a sequence
            lengths = torch.cat([seq_num_tokens.double(), lengths[-1:].double()])
        weight = 1 / (num_seqs * lengths.clamp(min=1)[sequences.ids])
    return torch.where(mask, weight, 0)


def scaled_weights(
    op: str,
    loss_agg_mode: str,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    counts: Counts,
    loss_scale_factor: float | None,
    seq_num_tokens: Tensor | None,
    scale: float,
) -> Tensor:
    """Return scale * `token_weights`, float32 [T]: in one launch where the host knows the weight.

    counts: global_num_tokens and global_num_seqs.
    """
    on_device, numbers = kernel_denominators(op, loss_agg_mode, cu_seqlens, *counts, mask.device)
    count = numbers[loss_agg_mode.startswith("seq")]
    if loss_agg_mode == "token-sum":
        return (mask * scale).float()
    if loss_agg_mode != "seq-mean-token-mean" and on_device is None and not math.isnan(count):
        is_norm = loss_agg_mode == "seq-mean-token-sum-norm"
        factor = loss_scale_factor if is_norm and loss_scale_factor is not None else 1.0
        return (mask * (1 / (max(count, 1.0) * factor) * scale)).float()
    denominators = loss_denominators(op, loss_agg_mode, mask, cu_seqlens, *counts)
    weights = token_weights(
        loss_agg_mode, mask, cu_seqlens, denominators, loss_scale_factor, seq_num_tokens
    )
    return (weights * scale).float()


def loss_denominators(
    op: str,
    loss_agg_mode: str,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    global_num_tokens: float | Tensor | None,
    global_num_seqs: float | Tensor | None,
) -> Tensor:
    """Return the global numbers of tokens and sequences, float64 [2], counted here where None."""
    device = mask.device
    num_tokens = global_count(op, "global_num_tokens", global_num_tokens, device, mask.sum)
    if not loss_agg_mode.startswith("seq"):  # these modes do not read the sequences
        _check_count(op, "global_num_seqs", global_num_seqs, device)
        return torch.stack([num_tokens, num_tokens])
    if cu_seqlens is None:
        raise ValueError(
            f"{op}: loss_agg_mode {loss_agg_mode!r} works on sequences; give cu_seqlens."
        )

    def count_sequences() -> Tensor:
        return (TokenSequences.of(cu_seqlens, mask).lengths > 0).sum()

    num_seqs = global_count(op, "global_num_seqs", global_num_seqs, device, count_sequences)
    return torch.stack([num_tokens, num_seqs])


def kernel_denominators(
    op: str,
    loss_agg_mode: str,
    cu_seqlens: Tensor | None,
    global_num_tokens: float | Tensor | None,
    global_num_seqs: float | Tensor | None,
    device: torch.device,
) -> tuple[Tensor | None, list[float]]:
    """Return what `loss_denominators` does in the form that a kernel takes; nothing is counted.

    The numbers are those of tokens and sequences, NaN where the kernel counts them. Where one is a
    tensor on the device, the kernel reads both from a float64 tensor [2], which is made here.
    """
    by_sequences = loss_agg_mode.startswith("seq")
    if by_sequences and cu_seqlens is None:
        raise ValueError(
            f"{op}: loss_agg_mode {loss_agg_mode!r} works on sequences; give cu_seqlens."
        )
    tensors: list[Tensor | None] = []
    numbers: list[float] = []
    for name, given in (
        ("global_num_tokens", global_num_tokens),
        ("global_num_seqs", global_num_seqs),
    ):
        _check_count(op, name, given, device)
        on_device = isinstance(given, Tensor) and not check.readable(given)
        tensors.append(given if isinstance(given, Tensor) and on_device else None)
        numbers.append(math.nan if given is None else 1.0 if on_device else float(given))
    if not by_sequences:  # these modes do not read the sequences
        numbers[1], tensors[1] = 1.0, tensors[0]
    if tensors[0] is None and tensors[1] is None:
        return None, numbers
    filled = [
        torch.full((), number, dtype=torch.float64, device=device)
        if tensor is None
        else tensor.detach().reshape(()).to(device, torch.float64)
        for tensor, number in zip(tensors, numbers, strict=True)
    ]
    return torch.stack(filled), numbers


def global_count(
    op: str,
    name: str,
    given: float | Tensor | None,
    device: torch.device,
    count: Callable[[], Tensor],
) -> Tensor:
    """Return `given`, or `count()` for None: a 0-d float64 tensor on the device, at least 1.

    The tensor is made on the device, so that nothing waits for it.
    """
    _check_count(op, name, given, device)
    if given is None:
        value = count()
    elif isinstance(given, Tensor):
        value = given.detach().reshape(()).to(device)
    else:
        return torch.full((), max(float(given), 1.0), dtype=torch.float64, device=device)
    return value.double().clamp(min=1)


def _check_count(op: str, name: str, given: float | Tensor | None, device: torch.device) -> None:
    """Check for a finite number of at least 0, or a tensor with one (its value on the CPU only)."""
    if isinstance(given, Tensor):
        if given.numel() != 1 or given.device not in (device, torch.device("cpu")):
            raise ValueError(
                f"{op}: {name} is a tensor of shape {list(given.shape)} on {given.device}; "
                f"expected a number, or a tensor with one element on {device} or the CPU."
            )
        given = given.item() if check.readable(given) else None
    if given is not None:
        check.number(op, name, given, at_least=0)
