"""The output head: results computed from hidden states, without [T, V] logits.

The model's own forward runs unchanged, FSDP2's hooks included; only its head, a linear layer, is
patched to call a function of the caller, such as one that computes log-probs or a loss from hidden
states and weight. Many models scale or soft-cap the logits after the head: that transform is
detected by sending known values through the model's forward, and the function gets its parameters.
Logits, where a caller asks for them, are float32: rounding them to bfloat16 would dominate the
error.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hybridengine.kernels.gemm import mixed_gemm
from hybridengine.model.parts import KeptIds
from hybridengine.model.validation import takes_images

# (rows [R, H] of the head's input, weight [V, H], bias=[V] or None, logit_scale=, softcap= or None)
# -> the results of the model's forward. Only tensors in them that require a gradient get FSDP2's
# backward hooks, so at least one must where the model is trained.
HeadFunction = Callable[..., tuple[Any, ...]]


def patch_head(model: PreTrainedModel, use_fused_kernels: bool = True) -> None:
    """Make `model` return float32 logits and, with `use_fused_kernels`, accept a `head_function`.

    `model(..., head_function=f)` returns what f, a `HeadFunction`, computes in place of the head.
    Rows, weight and bias are in the compute dtype; f runs inside the module call, so FSDP2 has
    gathered the weight and reduces its gradient.

    Call it before sharding. Inputs and weight of the head stay in the compute dtype, as in the
    rollout engine; accumulation and results are float32. A head that is not a plain linear layer is
    left unchanged. If the model does more to its logits than scale or soft-cap them, they are
    computed in full.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return
    transform = detect_logit_transform(model, head) if use_fused_kernels else None
    head.forward = MethodType(_float32_linear, head)  # type: ignore[method-assign]
    if transform is not None:
        _accept_head_function(model, head, *transform)
    elif use_fused_kernels:
        warnings.warn(
            f"{type(model).__name__} does more to its logits than scale or soft-cap them: they are "
            "computed in full, as with use_fused_kernels=false",
            stacklevel=2,
        )


def accepts_head_function(model: nn.Module) -> bool:
    """Return whether the model's forward accepts a `head_function`."""
    return getattr(model.forward, "accepts_head_function", False)


def log_prob_head(
    target_ids: Tensor, temperature: float, kept: KeptIds | None, exact: bool = False
) -> HeadFunction:
    """Return a head function that computes (log_probs [R], entropy [R]) of `target_ids` [R].

    kept: the entries of each row's distribution; None: the full vocabulary.
    exact: the engine computes the same bits (`hybridengine.model.exact`).
    """
    from hybridengine.kernels import linear_token_log_probs, sparse_linear_token_log_probs

    def head(rows: Tensor, weight: Tensor, **transform: Any) -> tuple[Tensor, Tensor]:
        if kept is None:
            return linear_token_log_probs(
                rows, weight, target_ids, temperature, deterministic=exact, **transform
            )
        entries = kept.filled(weight.shape[0])
        parts = entries.ids, entries.cu_kept.to(rows.device)
        return sparse_linear_token_log_probs(
            rows, weight, target_ids, *parts, temperature, **transform
        )

    return head


def detect_logit_transform(
    model: PreTrainedModel, head: nn.Linear
) -> tuple[float, float | None] | None:
    """Return (scale, softcap) of the transform that `model` applies to its head's output x.

    That is scale * x, or softcap * tanh(x / softcap); None if it is neither.
    """
    x = torch.tensor([-1e4, -70.0, -3.0, 0.0, 0.5, 2.0, 30.0, 1e4])
    body = model.base_model if takes_images(model.config) else model.get_decoder()
    outputs = _DecoderOutput(last_hidden_state=torch.zeros(1, 1, head.in_features))  # type: ignore[arg-type]
    ids = torch.zeros(1, 1, dtype=torch.int64)
    try:
        with (
            patch.object(body, "forward", lambda *_, **__: outputs),
            patch.object(head, "forward", lambda input: x.clone()[None, None]),
        ):
            y = model.forward(input_ids=ids, use_cache=False).logits.flatten().float()
    except Exception:  # any model's own code; if it fails here, its logits stay as they are
        return None
    if y.shape != x.shape:
        return None
    scale, softcap = (y[4] / x[4]).item(), y[-1].item()
    if scale > 0 and torch.allclose(y, scale * x, rtol=1e-5):
        return scale, None
    if softcap > 0 and torch.allclose(y, softcap * torch.tanh(x / softcap), rtol=1e-5):
        return 1.0, softcap
    return None


class _DecoderOutput(BaseModelOutput):
    """A decoder's output of which all other fields (caches, router logits, ...) are None."""

    def __getattr__(self, name: str) -> None:
        return None


def _accept_head_function(
    model: nn.Module, head: nn.Linear, scale: float, softcap: float | None
) -> None:
    original_forward = model.forward
    # The model's forward passes its hidden states to the head but not our arguments, so both
    # patched functions share these two variables.
    function: HeadFunction | None = None
    results: tuple[Any, ...] | None = None

    @functools.wraps(original_forward)
    def forward(*args: Any, head_function: HeadFunction | None = None, **kwargs: Any) -> Any:
        nonlocal function, results
        if head_function is None:
            return original_forward(*args, **kwargs)
        function = head_function
        try:
            original_forward(*args, **kwargs)
            return results
        finally:
            function, results = None, None

    def head_forward(self: nn.Linear, hidden: Tensor) -> Tensor:
        nonlocal results
        if function is None:
            return _float32_linear(self, hidden)
        dtype = torch.promote_types(hidden.dtype, self.weight.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        rows, weight = hidden[0].to(dtype), self.weight.to(dtype)
        results = function(rows, weight, bias=bias, logit_scale=scale, softcap=softcap)
        return hidden.new_zeros(*hidden.shape[:-1], 1)  # stands in for logits in the forward

    forward.accepts_head_function = True  # type: ignore[attr-defined]
    model.forward = forward
    head.forward = MethodType(head_forward, head)  # type: ignore[method-assign]


class Float32Product(torch.autograd.Function):
    """rows [R, H] @ weight [V, H].T in float32, of 16-bit operands that are not converted.

    The gradient of the result is rounded to their dtype, as the fused operators round it.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        out = rows.new_empty(rows.shape[0], weight.shape[0], dtype=torch.float32)
        mixed_gemm(out, rows, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        grad = grads[0].to(rows.dtype)
        for_rows, for_weight = ctx.needs_input_grad
        return grad @ weight if for_rows else None, grad.t() @ rows if for_weight else None


def _float32_linear(head: nn.Linear, hidden: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        weight, bias = head.weight, None if head.bias is None else head.bias.float()
        # On a CPU most machines multiply 16-bit operands slowly.
        if not (hidden.is_cuda and hidden.dtype == weight.dtype and hidden.itemsize == 2):
            return F.linear(hidden.float(), weight.float(), bias)
        product = Float32Product.apply(hidden.flatten(0, -2), weight)
        logits = product.unflatten(0, hidden.shape[:-1])
        return logits if bias is None else logits + bias
