"""Drop-in for flash_attn.bert_padding and its cross-entropy (2.7 and later), on GPUs and CPUs.

    from hybridengine.integrations.flash_attn import cross_entropy_loss, pad_input, unpad_input

    from hybridengine.integrations import flash_attn

    flash_attn.patch()  # flash_attn's own functions are these, until unpatch()

Other packages that run `from flash_attn.bert_padding import ...` keep what they imported before the
patch: patch first. The groups of `patch(*groups)`: padding, cross_entropy; both by default.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.kernels import _check as check
from hybridengine.kernels import cross_entropy, pack
from hybridengine.kernels.packing import inverse_order, move_rows

from ._patching import Patches

__all__ = [
    "CrossEntropyLoss",
    "cross_entropy_loss",
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "patch",
    "patched",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
    "unpatch",
]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pack the tokens of a padded batch; differentiable.

    Args:
        hidden_states: [B, L, ...].
        attention_mask: [B, L], 1 for tokens.
        unused_mask: [B, L], 1 for further tokens that are packed but not counted in seqused.

    Returns:
        (x [T, ...], indices int64 [T] into the flattened batch, cu_seqlens int32 [B + 1],
        max_seqlen, seqused int32 [B]: the tokens of attention_mask alone).
    """
    op = "unpad_input"
    _check_mask(op, hidden_states, "attention_mask", attention_mask)
    used = packed_mask = check.mask(op, "attention_mask", attention_mask)
    if unused_mask is not None:
        _check_mask(op, hidden_states, "unused_mask", unused_mask)
        packed_mask = used | check.mask(op, "unused_mask", unused_mask)
    packed = pack([hidden_states], packed_mask)
    seqused = used.sum(dim=-1, dtype=torch.int32)
    return packed.values[0], packed.indices, packed.cu_seqlens, packed.max_seqlen, seqused


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Copy [T, ...] back to [batch, seqlen, ...], zero elsewhere; differentiable.

    indices: int32 or int64 [T], a distinct row of the flattened batch for every token. Others raise
    an IndexError on the CPU and fail an assertion on the device elsewhere: rows would be lost.
    """
    check.integer("pad_input", "batch", batch, at_least=0)
    check.integer("pad_input", "seqlen", seqlen, at_least=0)
    return _scatter("pad_input", "hidden_states", hidden_states, indices, [batch, seqlen])


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Return x[indices] along the first axis. A repeated index gets the sum of the gradients."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return zeros [first_axis_dim, ...] with `values` at `indices`; differentiable.

    indices: see `pad_input`.
    """
    op = "index_put_first_axis"
    check.integer(op, "first_axis_dim", first_axis_dim, at_least=0)
    return _scatter(op, "values", values, indices, [first_axis_dim])


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Pack the tokens of a padded batch whose rows hold several sequences; differentiable.

    Args:
        hidden_states: [B, L, ...].
        attention_mask_in_length: [B, L] integers; the non-zero ones of a row are the lengths of
            the sequences that fill it from the left.

    Returns:
        (x [T, ...], indices, cu_seqlens int32 [sequences + 1], max_seqlen).
    """
    op = "unpad_input_for_concatenated_sequences"
    lengths_BL = check.ids(op, "attention_mask_in_length", attention_mask_in_length)
    _check_mask(op, hidden_states, "attention_mask_in_length", lengths_BL)
    seqlen = lengths_BL.size(1)
    filled = lengths_BL.sum(dim=1, keepdim=True)
    # The size of the result waits for a GPU anyway, so reading costs nothing more.
    if bool((lengths_BL < 0).any()) or bool((filled > seqlen).any()):
        raise ValueError(
            f"{op}: attention_mask_in_length has rows whose lengths are negative or add up to more "
            f"than the {seqlen} tokens of a row; expected the lengths of the sequences in it."
        )
    packed = pack([hidden_states], torch.arange(seqlen, device=filled.device) < filled)
    lengths = lengths_BL[lengths_BL != 0]
    cu_seqlens = torch.zeros(lengths.numel() + 1, dtype=torch.int32, device=filled.device)
    cu_seqlens[1:] = lengths.cumsum(0)
    max_seqlen = int(lengths.max()) if lengths.numel() else 0
    return packed.values[0], packed.indices, cu_seqlens, max_seqlen


def _check_mask(op: str, hidden_states: Tensor, name: str, mask: Tensor) -> None:
    check.same_device(op, hidden_states=hidden_states, **{name: mask})
    if mask.dim() != 2 or hidden_states.shape[:2] != mask.shape:
        raise ValueError(
            f"{op}: {name} has shape {list(mask.shape)} and hidden_states "
            f"{list(hidden_states.shape)}; expected [B, L] and [B, L, ...]."
        )


def _scatter(op: str, name: str, values: Tensor, indices: Tensor, shape: list[int]) -> Tensor:
    """Return zeros [*shape, ...] with row t of `values` at row indices[t], all distinct."""
    check.same_device(op, **{name: values}, indices=indices)
    check.reverse_mode_only(op, **{name: values})
    if values.dim() == 0 or indices.dim() != 1 or indices.numel() != values.shape[0]:
        raise ValueError(
            f"{op}: indices has shape {list(indices.shape)} and {name} {list(values.shape)}; "
            "expected [T] and [T, ...]."
        )
    indices, rows = check.ids(op, "indices", indices), math.prod(shape)
    valid = (indices >= 0) & (indices < rows)
    inverse = inverse_order(torch.where(valid, indices, -1), rows)
    if rows:
        position = torch.arange(indices.numel(), device=indices.device)
        valid = valid & (inverse[indices.clamp(0, rows - 1)] == position)
    if not check.readable(valid):
        torch._assert_async(valid.all(), f"{op}: an index outside [0, {rows}), or given twice")
    elif not valid.all():
        t = int((~valid).nonzero()[0])
        raise IndexError(
            f"{op}: indices[{t}] is {int(indices[t])}; expected 0 <= index < {rows}, every index "
            f"once: two rows of {name} do not fit into one."
        )
    return move_rows([values], inverse, indices, 1, shape)[0]


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the cross-entropy of every row.

    Args:
        logits: [T, V], with a process_group this rank's slice of the vocabulary; labels: [T].
        precomputed_lse: not used; it is computed with the losses in one pass.
        logit_scale: multiplies the logits first; above 0.
        lse_square_scale: factor of the z-loss, lse^2, which is added to the loss.
        inplace_backward: write the gradient over `logits`.

    Returns:
        (losses [T] float32, differentiable; z_losses [T], the part of the z-loss).
    """
    return cross_entropy(
        logits,
        labels,
        label_smoothing=label_smoothing,
        lse_square_scale=lse_square_scale,
        logit_scale=logit_scale,
        ignore_index=ignore_index,
        group=process_group,
        inplace_backward=inplace_backward,
    )


class CrossEntropyLoss(torch.nn.Module):
    """The module of `cross_entropy_loss`; reduction: mean (over rows with a label), sum or none."""

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: dist.ProcessGroup | None = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "none", "sum"):
            raise NotImplementedError(f"reduction is {reduction!r}; expected mean, none or sum.")
        self.ignore_index, self.reduction = ignore_index, reduction
        self.label_smoothing, self.logit_scale = label_smoothing, logit_scale
        self.lse_square_scale, self.inplace_backward = lse_square_scale, inplace_backward
        self.process_group, self.return_z_loss = process_group, return_z_loss

    def forward(
        self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the loss of input [T, V] and target [T]; with return_z_loss also the z-loss."""
        both = cross_entropy_loss(
            input,
            target,
            precomputed_lse,
            self.label_smoothing,
            self.logit_scale,
            self.lse_square_scale,
            self.ignore_index,
            self.inplace_backward,
            self.process_group,
        )
        if self.reduction != "none":
            count = (target != self.ignore_index).sum() if self.reduction == "mean" else 1
            both = (both[0].sum() / count, both[1].sum() / count)
        return both if self.return_z_loss else both[0]


def as_apply(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with the signature of autograd.Function.apply, which flash-attn's have."""

    def apply(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return apply


_PADDING: dict[str, Callable[..., Any]] = {
    "bert_padding.unpad_input": unpad_input,
    "bert_padding.pad_input": pad_input,
    "bert_padding.index_first_axis": as_apply(index_first_axis),
    "bert_padding.index_put_first_axis": as_apply(index_put_first_axis),
    "bert_padding.unpad_input_for_concatenated_sequences": unpad_input_for_concatenated_sequences,
}
_CROSS_ENTROPY: dict[str, Callable[..., Any]] = {
    "ops.triton.cross_entropy.cross_entropy_loss": cross_entropy_loss,
    "losses.cross_entropy.CrossEntropyLoss.forward": CrossEntropyLoss.forward,
}
_PATCHES = Patches(
    "flash_attn",
    {"padding": _PADDING, "cross_entropy": _CROSS_ENTROPY},
    distribution="flash-attn",
)
patch, unpatch, patched = _PATCHES.patch, _PATCHES.unpatch, _PATCHES.patched
