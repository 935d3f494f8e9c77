"""flash_attn as of 2.6: unpad_input returns four values, the cross-entropy takes no log-sum-exp."""

import torch.distributed as dist
from torch import Tensor

from . import flash_attn
from .flash_attn import (
    index_first_axis,
    index_put_first_axis,
    pad_input,
    unpad_input_for_concatenated_sequences,
)

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
    hidden_states: Tensor, attention_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """(x [T, ...], indices, cu_seqlens int32 [B + 1], max_seqlen); see flash_attn.unpad_input."""
    return flash_attn.unpad_input(hidden_states, attention_mask)[:4]


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """(losses [T], z_losses [T]); see flash_attn.cross_entropy_loss."""
    return flash_attn.cross_entropy_loss(
        logits,
        labels,
        None,
        label_smoothing,
        logit_scale,
        lse_square_scale,
        ignore_index,
        inplace_backward,
        process_group,
    )


class CrossEntropyLoss(flash_attn.CrossEntropyLoss):
    """The module of `cross_entropy_loss`; see flash_attn.CrossEntropyLoss."""

    def forward(  # type: ignore[override]
        self, input: Tensor, target: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute the loss of input [T, V] and target [T]."""
        return flash_attn.CrossEntropyLoss.forward(self, input, target)


_PATCHES = flash_attn.make_patches(
    ">=2.6,<2.7", unpad_input, cross_entropy_loss, CrossEntropyLoss.forward
)
patch, unpatch, patched = _PATCHES.patch, _PATCHES.unpatch, _PATCHES.patched
