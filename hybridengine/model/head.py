"""The output head in float32: logits rounded to bf16 would dominate the error of log-probs."""

from __future__ import annotations

from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["use_float32_head"]


def use_float32_head(model: nn.Module) -> None:
    """Let a linear output head give float32 logits, whatever the compute dtype of the model.

    Its inputs and weight stay in the compute dtype, as the rollout engine's do; only the sums and
    the result are float32. A head that is no plain linear layer is left as it is.
    """
    head = model.get_output_embeddings()
    if type(head) is nn.Linear:
        head.forward = MethodType(_float32_linear, head)


def _float32_linear(head: nn.Linear, hidden: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        bias = None if head.bias is None else head.bias.float()
        return F.linear(hidden.float(), head.weight.float(), bias)
