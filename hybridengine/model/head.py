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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hybridengine.kernels.gemm import mixed_gemm
from hybridengine.model.packed import Part
from hybridengine.model.validation import takes_images


@dataclass(frozen=True)
class KeptIds(Part):
    """The vocabulary entries that truncated sampling kept for each of R tokens, end to end.

    A token without entries was sampled from the full vocabulary. The ends are on the CPU: sizes of
    results are known without waiting for a device. The most likely entries of each token have the
    same form, with the engine's log-probs.
    """

    needs_tails: ClassVar[bool] = False
    ids: Tensor  # int32 [K], ascending for each token
    cu_kept: Tensor  # int64 [R + 1], on the CPU: token r has ids[cu_kept[r]:cu_kept[r + 1]]
    log_probs: Tensor | None = None  # float32 [K], of most likely entries

    @staticmethod
    def from_counts(ids: Tensor, counts: Tensor, log_probs: Tensor | None = None) -> KeptIds:
        """counts: [R] on the CPU, the number of entries of each token."""
        return KeptIds(ids, _ends(counts.long()), log_probs)

    def take(self, rows: Tensor) -> KeptIds:
        """Select the entries of the tokens `rows`, int64 [r] on the CPU, in any order."""
        counts = self.cu_kept.diff()[rows]
        cu_kept = _ends(counts)
        entries = self._per_entry(self.cu_kept[rows] - cu_kept[:-1], counts)
        entries += torch.arange(len(entries), device=entries.device)
        log_probs = None if self.log_probs is None else self.log_probs[entries]
        return KeptIds(self.ids[entries], cu_kept, log_probs)

    def select(self, sequences: Sequence[int], rows: Tensor) -> KeptIds:
        return self.take(rows)

    def place(self, input_ids: Tensor, cu_seqlens: Tensor) -> KeptIds:
        return self

    def local(self, tokens: slice, rows: Tensor) -> KeptIds:
        return self.take(rows)

    def to(self, device: torch.device | str) -> KeptIds:
        log_probs = None if self.log_probs is None else self.log_probs.to(device)
        return KeptIds(self.ids.to(device), self.cu_kept, log_probs)

    def filled(self, vocab_size: int) -> KeptIds:
        """Give tokens without entries all `vocab_size` of them."""
        counts = self.cu_kept.diff()
        if (counts > 0).all():
            return self
        full = torch.arange(vocab_size, dtype=self.ids.dtype, device=self.ids.device)
        both = KeptIds(
            torch.cat([self.ids, full]), torch.cat([self.cu_kept, self.cu_kept[-1:] + vocab_size])
        )
        rows = torch.arange(counts.numel())
        return both.take(rows.where(counts > 0, counts.numel()))

    def entries(self, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Return the entries of all tokens [K] and their ends [R + 1], on one device."""
        kept = self.filled(vocab_size)
        return kept.ids, kept.cu_kept.to(kept.ids.device)

    def vocab_mask(self, vocab_size: int) -> Tensor:
        """Return bool [R, vocab_size], True for the entries of each token."""
        kept = self.filled(vocab_size)
        num_tokens = kept.cu_kept.numel() - 1
        mask = torch.zeros(num_tokens, vocab_size, dtype=torch.bool, device=kept.ids.device)
        rows = kept._per_entry(torch.arange(num_tokens), kept.cu_kept.diff())
        mask[rows, kept.ids.long()] = True
        return mask

    def _per_entry(self, per_token: Tensor, counts: Tensor) -> Tensor:
        """Repeat a number per token for each of its entries, on the device: [R] -> [K]."""
        size, device = int(counts.sum()), self.ids.device
        return per_token.to(device).repeat_interleave(counts.to(device), output_size=size)


def _ends(counts: Tensor) -> Tensor:
    """[R] -> [R + 1], from 0."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


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
    head.forward = MethodType(float32_linear, head)  # type: ignore[method-assign]
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
            return float32_linear(self, hidden)
        dtype = torch.promote_types(hidden.dtype, self.weight.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        rows, weight = hidden.squeeze(0).to(dtype), self.weight.to(dtype)
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


def float32_linear(head: nn.Linear, hidden: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        weight, bias = head.weight, None if head.bias is None else head.bias.float()
        # On a CPU most machines multiply 16-bit operands slowly.
        if not (hidden.is_cuda and hidden.dtype == weight.dtype and hidden.itemsize == 2):
            return F.linear(hidden.float(), weight.float(), bias)
        product = Float32Product.apply(hidden.flatten(0, -2), weight)
        logits = product.unflatten(0, hidden.shape[:-1])
        return logits if bias is None else logits + bias
