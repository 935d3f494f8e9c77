"""TRL's fused output head: per-token results of a causal LM without its [B, L, V] logits."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from hybridengine.hybrid import refuse_packed
from hybridengine.integrations._lm_head import OutputHead, rows_of_labels
from hybridengine.integrations.trl.kept import REPLAY, kept_scores
from hybridengine.integrations.trl.log_probs import hidden_scores, logits_scores
from hybridengine.integrations.trl.loss import PENDING
from hybridengine.integrations.trl.padding import can_unpad, unpadded
from hybridengine.model import KeptIds


@dataclasses.dataclass
class FusedCausalLMOutput(ModelOutput):
    """The result of a fused forward, with the fields of TRL's class of this name.

    loss: the loss of the labels, as TRL normalises it. In a call for the group `loss`
      (trl/loss.py) it is that loss, and the only field with a gradient.
    log_probs, entropy: float32 [B, L - 1] ([B, L] with shift_labels), differentiable.
    log_sum_sq_probs, mean_logits, is_top1: of the same shape, not differentiable.
    Tokens whose label_mask is 0 have 0 in all fields. Fields that were not requested are None.
    """

    loss: Tensor | None = None
    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    mean_logits: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None
    aux_loss: Tensor | None = None


def add_fused_lm_head(
    model: PreTrainedModel,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
) -> None:
    """Make `model(..., labels=labels, fused_lm_head=True)` return a `FusedCausalLMOutput`.

    As TRL's function of this name, with four differences. Only positions with a label pass through
    the head, on every device. The model's own forward runs, so a head that FSDP2 shards by itself
    is gathered and freed by FSDP2's hooks, not by `full_tensor()`. And a model that does more to
    its logits than scale or soft-cap them, or has an adapter on its head, gets correct results,
    from full logits. A model loaded with `attn_implementation="hybridengine_varlen"` computes the
    tokens of a padded batch only.

    Args:
        model: not sharded yet. Calls without `fused_lm_head` run its forward unchanged.
        temperature: divides the logits.
        cast_lm_head_to_fp32: multiply in float32, whatever autocast says.
        outputs: the optional fields to compute.
    """
    head, unpads = OutputHead(model), can_unpad(model)
    refuse_packed(model)
    dtype = torch.float32 if cast_lm_head_to_fp32 else None

    @functools.wraps(type(model).forward)  # `generate` checks its arguments by this signature
    def forward(
        self: PreTrainedModel,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        if not fused_lm_head:
            return head.forward_given(self, args, kwargs, labels, shift_labels, num_items_in_batch)
        kwargs["use_cache"] = False
        row = (
            unpadded(self, kwargs, labels) if unpads and not args and shift_labels is None else None
        )
        if row is not None:
            kwargs, shift_labels = row.kwargs, row.shift_labels
        target = labels if shift_labels is None else shift_labels
        if target is None:
            raise ValueError("fused_lm_head=True needs labels or shift_labels, got neither")
        replay = REPLAY.get()
        kept = None if replay is None or labels is None else replay.take(labels)
        scores = functools.partial(
            _scores, target, shift_labels is not None, temperature, outputs=outputs, kept=kept
        )
        result, (loss, label_mask, *fields) = head.call(self, scores, *args, dtype=dtype, **kwargs)
        if row is not None:
            label_mask, *fields = (
                None if x is None else row.padded(x) for x in (label_mask, *fields)
            )
        aux_loss = getattr(result, "aux_loss", None)
        if loss is None:
            items = num_items_in_batch
            loss = -fields[0].sum() / (label_mask.sum().clamp(min=1) if items is None else items)
            if aux_loss is not None:
                config = self.config.get_text_config()
                loss = loss + getattr(config, "router_aux_loss_coef", 0.0) * aux_loss
        values = (loss, *fields, label_mask, aux_loss)
        names = (field.name for field in dataclasses.fields(FusedCausalLMOutput))
        return FusedCausalLMOutput(**dict(zip(names, values, strict=True)))

    model.forward = types.MethodType(forward, model)


def _scores(
    labels: Tensor,
    shifted: bool,
    temperature: float,
    output: Tensor,
    weight: Tensor | None,
    *,
    outputs: tuple[str, ...],
    kept: KeptIds | None,
    **transform: Any,
) -> tuple[Tensor | None, ...]:
    """Return the pending loss or None, the mask of labels, and the fields in its shape."""
    rows, ids, mask = rows_of_labels(output, labels, shifted)
    pending = PENDING.get()
    loss: Tensor | None = None
    fields: tuple[Tensor | None, ...]
    if weight is not None and pending is not None:
        loss, log_probs, entropy = pending.scores(rows, weight, ids, temperature, kept, **transform)
        fields = (log_probs, entropy, None, None, None)
    elif kept is not None:
        log_probs, entropy = kept_scores(rows, weight, ids, temperature, kept, **transform)
        fields = (log_probs, entropy, None, None, None)
    elif weight is None:
        fields = logits_scores(rows, ids, temperature, outputs)
    else:
        fields = hidden_scores(rows, weight, ids, temperature, outputs, **transform)
    # masked_scatter: of no label at all, the result is still a function of the model
    return (
        loss,
        mask,
        *(None if x is None else x.new_zeros(mask.shape).masked_scatter(mask, x) for x in fields),
    )
