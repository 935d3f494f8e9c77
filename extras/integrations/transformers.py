"""Hugging Face Trainer's losses of causal LMs, by ours; with Accelerate under any of its wrappers.

    from hybridengine.integrations import transformers

    transformers.patch()  # losses from logits: ForCausalLMLoss and the Trainer's label smoothing
    transformers.fuse_loss(model)  # before Trainer(model): no logits at all while it trains
    transformers.pack_linear_attention(model)  # packed batches for Gated DeltaNet, KDA, Mamba

The last two are one call per model and need no patch. The normalisation is the host's: by
`num_items_in_batch`, which the Trainer counts over a gradient accumulation, or by the labels.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybridengine.hybrid import pack_linear_attention, refuse_packed
from hybridengine.integrations._compare import calling, constant, draw
from hybridengine.integrations._lm_head import OutputHead, rows_of_labels
from hybridengine.integrations._patching import Patches
from hybridengine.kernels import linear_cross_entropy, token_log_probs

__all__ = [
    "ForCausalLMLoss",
    "fuse_loss",
    "pack_linear_attention",
    "patch",
    "patched",
    "smoothed_loss",
    "unpatch",
]

_IGNORE = -100


def ForCausalLMLoss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = _IGNORE,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Return the cross-entropy of next tokens, as transformers' function of this name.

    Args:
        logits: [..., L, V], any float dtype: they are not copied to float32.
        labels: [..., L]; position t predicts label t + 1.
        vocab_size: V.
        num_items_in_batch: divides the sum; None: the number of labels, of none the loss is NaN.
        shift_labels: [..., L], label t belongs to position t; replaces `labels`.
        kwargs: accepted for transformers' other losses; without effect, as there.

    Returns:
        The loss, a float32 scalar, differentiable with respect to the logits.
    """
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    logits, ids = logits.view(-1, vocab_size), shift_labels.reshape(-1).to(logits.device)
    log_probs, _ = token_log_probs(logits, ids, ignore_index=ignore_index)
    return -log_probs.sum() / _items(num_items_in_batch, ids != ignore_index)


def smoothed_loss(
    self: Any,
    model_output: Mapping[str, Any] | tuple[Any, ...],
    labels: Tensor,
    shift_labels: bool = False,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Return the label-smoothed loss of `transformers.trainer_pt_utils.LabelSmoother.__call__`.

    With e = self.epsilon, z the logits of a row and V their number, a row's loss is
    (1 - e) (-log p[label]) + e (-mean_v log p[v]) = -log p[label] + e (z[label] - mean_v z[v]).
    """
    logits = model_output["logits"] if isinstance(model_output, Mapping) else model_output[0]
    if shift_labels:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    if labels.dim() == logits.dim():
        labels = labels.squeeze(-1)
    kept = labels != self.ignore_index
    log_probs, _ = token_log_probs(logits, labels, ignore_index=self.ignore_index)
    index = labels.masked_fill(~kept, 0).unsqueeze(-1)
    above_mean = logits.gather(-1, index).squeeze(-1).float() - logits.mean(-1, dtype=torch.float32)
    loss = self.epsilon * above_mean.masked_fill(~kept, 0.0) - log_probs
    return loss.sum() / _items(num_items_in_batch, kept)


def fuse_loss(model: PreTrainedModel) -> None:
    """Let `model` compute the loss of its labels from hidden states, without logits, in training.

    The logits of the output are None then; in evaluation, and without labels, the forward is the
    model's own. Call it before the model is sharded or given to a Trainer; with PEFT, on the model
    inside. Only positions with a label pass through the head, and the loss and its gradient are
    computed in one pass. The loss is that of the model's own forward: the mean over labels (of
    none it is 0), or their sum by `num_items_in_batch`, and for experts the load-balancing loss
    with the config's coefficient. A packed batch is refused where layers with a state along the
    sequence would let it leak, until `pack_linear_attention`.
    """
    head = OutputHead(model)
    refuse_packed(model)

    @functools.wraps(type(model).forward)  # the Trainer reads the signature
    def forward(
        self: PreTrainedModel,
        *args: Any,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        target = labels if shift_labels is None else shift_labels
        if not self.training or target is None or kwargs.get("return_dict") is False:
            return head.forward_given(self, args, kwargs, labels, shift_labels, num_items_in_batch)
        scores = functools.partial(_loss, target, shift_labels is not None, num_items_in_batch)
        output, (loss,) = head.call(self, scores, *args, **kwargs)
        if getattr(output, "aux_loss", None) is not None:
            coefficient = getattr(self.config.get_text_config(), "router_aux_loss_coef", 0.0)
            loss = loss + coefficient * output.aux_loss
        kept = {name: value for name, value in output.items() if name != "logits"}
        return type(output)(**kept | {"loss": loss})

    model.forward = types.MethodType(forward, model)


def _loss(
    labels: Tensor,
    shifted: bool,
    num_items_in_batch: Tensor | int | None,
    output: Tensor,
    weight: Tensor | None,
    **transform: Any,
) -> tuple[Tensor]:
    rows, ids, mask = rows_of_labels(output, labels, shifted)
    if weight is None:
        log_probs, _ = token_log_probs(rows, ids)
        return (-log_probs.sum() / _items(num_items_in_batch, mask),)
    items = num_items_in_batch
    return (linear_cross_entropy(rows, weight, ids, num_items_in_batch=items, **transform)[0],)


def _items(num_items_in_batch: Tensor | int | None, kept: Tensor) -> Tensor | int:
    if num_items_in_batch is None:
        return kept.sum()
    if isinstance(num_items_in_batch, Tensor):
        return num_items_in_batch.to(kept.device)
    return num_items_in_batch


_PROBED = {
    "logits": draw(2, 4, 19),
    "labels": constant([[-100, 1, 2, 3], [4, 5, 6, -100]]),
    "vocab_size": 19,
}


def _smoothed(function: Any) -> Any:
    smoother = types.SimpleNamespace(epsilon=0.1, ignore_index=_IGNORE)

    def call(logits: Tensor, labels: Tensor) -> Any:
        return function(smoother, {"logits": logits}, labels, True)

    return calling(_PROBED, ["logits"])(call)


_PATCHES = Patches(
    "transformers",
    {
        "loss": {"loss.loss_utils.ForCausalLMLoss": ForCausalLMLoss},
        "label_smoothing": {"trainer_pt_utils.LabelSmoother.__call__": smoothed_loss},
    },
    probes={
        "loss.loss_utils.ForCausalLMLoss": calling(_PROBED, ["logits"]),
        "trainer_pt_utils.LabelSmoother.__call__": _smoothed,
    },
)
patch, unpatch, patched = _PATCHES.patch, _PATCHES.unpatch, _PATCHES.patched
