"""Padded batches of TRL as one packed row, for models with our attention over packed sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybridengine.hybrid import takes_packed
from hybridengine.kernels import pack
from hybridengine.model.attention import ATTENTION
from hybridengine.model.packing_check import shared_prefix_obstacle
from hybridengine.model.validation import carried_state

_TEXT = {"input_ids", "attention_mask", "use_cache", "output_router_logits"}


class Unpadded(NamedTuple):
    """The arguments of a packed forward, its labels, and where its tokens were."""

    kwargs: dict[str, Any]
    shift_labels: Tensor  # int64 [1, T], label t belongs to position t
    mask: Tensor  # bool [B, L]

    def padded(self, packed: Tensor) -> Tensor:
        """Return [1, T] as [B, L - 1], 0 where there is no token."""
        shape = self.mask.shape
        return packed.new_zeros(shape).masked_scatter(self.mask, packed)[:, :-1]


def can_unpad(model: PreTrainedModel) -> bool:
    """Tell whether the layers of `model` keep the sequences of a packed row apart."""
    if model.is_custom_code() or shared_prefix_obstacle(model.config) is not None:
        return False
    return carried_state(model.config) is None or takes_packed(model)


def unpadded(
    model: PreTrainedModel, kwargs: Mapping[str, Any], labels: Tensor | None
) -> Unpadded | None:
    """Return a padded batch as one row of its tokens; None where the forward takes it as it is.

    That is: the model has another attention than ours, inputs other than text, or no mask.

    Args:
        kwargs: the arguments of the forward: input_ids and attention_mask [B, L].
        labels: [B, L]; position t predicts label t + 1.
    """
    ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
    is_text = labels is not None and kwargs.keys() <= _TEXT and ids is not None
    if not is_text or mask is None or mask.dim() != 2:
        return None
    if model.config.get_text_config()._attn_implementation != ATTENTION:
        return None
    assert ids is not None and labels is not None
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    packed = pack([ids, shifted], mask.bool())
    tokens, targets = packed.values
    starts = packed.cu_seqlens[:-1].long().repeat_interleave(packed.cu_seqlens.diff().long())
    positions = torch.arange(tokens.numel(), device=tokens.device) - starts
    inputs = dict(kwargs) | {
        "input_ids": tokens[None],
        "position_ids": positions[None],
        "attention_mask": None,
        "cu_seq_lens_q": packed.cu_seqlens,
        "cu_seq_lens_k": packed.cu_seqlens,
        "max_length_q": packed.max_seqlen,
        "max_length_k": packed.max_seqlen,
    }
    return Unpadded(inputs, targets[None], mask.bool())
