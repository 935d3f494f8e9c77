"""The output head of a causal LM of any trainer: results from its input, in place of logits.

The model's own forward runs, wrapped as its trainer wrapped it (FSDP2, DeepSpeed, Accelerate); only
for that call its head, a linear layer, computes the results. So the hooks that gather the head's
weight, and reduce its gradient, run as for logits. What a model does to its logits after the head
is detected once; where it is more than a scale or a soft-cap, or where the head is not a plain
linear layer (an adapter on it, say), the model computes its logits and the results come from those.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybridengine.model.head import detect_logit_transform

# (input of the head [B, L, H], weight [V, H], bias=[V] or None, logit_scale=, softcap=), tensors in
# the dtype of the products, or (logits [B, L, V], None) -> results, some of them with a gradient:
# FSDP2 and DeepSpeed hook the backward there.
Scores = Callable[..., tuple[Any, ...]]


_LOSS = ("labels", "shift_labels", "num_items_in_batch")  # arguments of the loss


class OutputHead:
    """The forward of a model as it is now, and results of a call of it in place of logits.

    Make it before the model is sharded and before its forward is replaced.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._instance_forward = vars(model).get("forward")
        head = model.get_output_embeddings()
        self._transform = detect_logit_transform(model, head) if _is_plain(head) else None
        if self._transform is None:
            warnings.warn(
                f"{type(model).__name__} does more to its logits than a linear layer, a scale and "
                "a soft-cap, so log-probs are computed from its logits, which take more memory",
                stacklevel=3,
            )

    def forward(self, model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        """Call the forward of `model`, the model this was made of or a copy of it."""
        if self._instance_forward is not None:
            return self._instance_forward(*args, **kwargs)
        return type(model).forward(model, *args, **kwargs)

    def forward_given(
        self, model: PreTrainedModel, args: Any, kwargs: Mapping[str, Any], *loss_arguments: Any
    ) -> Any:
        """Call the forward with the `loss_arguments` that are given, in the order of _LOSS."""
        pairs = zip(_LOSS, loss_arguments, strict=True)
        given = {name: value for name, value in pairs if value is not None}
        return self.forward(model, *args, **kwargs, **given)

    def call(
        self,
        model: PreTrainedModel,
        scores: Scores,
        *args: Any,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> tuple[Any, tuple[Any, ...]]:
        """Call the forward; return its output, whose logits are meaningless, and the scores.

        dtype: the dtype of the products; None: autocast's if it is on, else the hidden states'.
        """
        head = model.get_output_embeddings()
        transform = self._transform
        if transform is None or not _is_plain(head):
            output = self.forward(model, *args, **kwargs)
            return output, scores(output.logits, None)
        results: tuple[Any, ...] = ()
        placeholder = head.weight.new_empty(0)

        def compute(hidden: Tensor) -> tuple[Any, ...]:
            nonlocal placeholder
            placeholder = hidden.new_zeros(*hidden.shape[:-1], 1)
            hidden = hidden.to(head.weight.device)
            to = dtype or _product_dtype(hidden)
            bias = None if head.bias is None else head.bias.to(to)
            with torch.autocast(hidden.device.type, enabled=False):
                scale, softcap = transform
                options = {"bias": bias, "logit_scale": scale, "softcap": softcap}
                return scores(hidden.to(to), head.weight.to(to), **options)

        def keep(_module: nn.Module, _arguments: Any, given: tuple[Any, ...]) -> Tensor:
            nonlocal results
            results = given
            return placeholder  # for logits, in the rest of the forward

        # The last hook: those of FSDP2 and DeepSpeed have seen the results as the head's output.
        handle = head.register_forward_hook(keep)
        try:
            with patch.object(head, "forward", compute):
                output = self.forward(model, *args, **kwargs)
        finally:
            handle.remove()
        return output, results


def rows_of_labels(
    output: Tensor, labels: Tensor, shifted: bool, ignore_index: int = -100
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what belongs to labels: rows [N, ...] of `output`, labels [N] and their mask.

    Args:
        output: [B, L, ...], hidden states or logits.
        labels: [B, L]; position t predicts label t + 1, or label t if they are `shifted`.

    Returns:
        The rows whose label is not `ignore_index`, and the mask [B, L - 1], or [B, L] if shifted.
    """
    if not shifted:
        output, labels = output[:, :-1], labels[:, 1:]
    labels = labels.to(output.device)
    mask = labels != ignore_index
    return output[mask], labels[mask], mask


def _is_plain(head: Any) -> bool:
    """Tell whether the head is a linear layer with a weight of floats (FSDP2 subclasses it)."""
    return isinstance(head, nn.Linear) and head.weight.is_floating_point()


def _product_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
