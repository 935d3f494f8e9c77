"""Float32 logits of the engine's output head on a CPU, from its weight as it is.

There vLLM's `head_dtype=float32` converts a 16-bit weight [V, H] to float32 for every generated
token. Products of 16-bit numbers are exact in float32, so the logits of a product that reads it as
it is differ only by the order of their sums.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hybridengine.kernels.decode_linear import inference_linear


def use_plain_head(model: nn.Module) -> None:
    """Make the float32 head of `model`, loaded by vLLM on a CPU, read its weight as it is."""
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    for module in model.modules():
        if isinstance(module, LogitsProcessor) and module.head_dtype == torch.float32:
            module._apply_head = partial(_apply_head, module._apply_head)  # type: ignore[method-assign]


def _apply_head(original: Any, lm_head: Any, hidden: Tensor, bias: Tensor | None) -> Tensor:
    """Return logits [T, V], float32; `original` handles heads that are not a plain matrix."""
    weight: Tensor = lm_head.weight
    is_matrix = hidden.dim() == 2 and weight.shape[1:] == hidden.shape[1:]
    if not is_matrix or weight.dtype != hidden.dtype:
        return original(lm_head, hidden, bias)
    return inference_linear(hidden, weight, bias, torch.float32)
