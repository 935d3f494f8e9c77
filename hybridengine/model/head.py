"""The output head: log-probs computed from hidden states, without [T, V] logits.

The model's own forward runs unchanged, FSDP2's hooks included; only its head, a linear layer, is
patched to compute log-probs when the caller passes targets. Many models scale or soft-cap the
logits after the head: that transform is detected by sending known values through the model's
forward, and the fused kernel applies it. Logits, where a caller asks for them, are float32:
rounding them to bfloat16 would dominate the error.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hybridengine.errors import ModelError


@dataclass(frozen=True)
class LogProbTargets:
    """The argument `log_prob_targets` of a patched model's forward."""

    target_ids: Tensor  # int64 [R]
    temperature: float
    positions: Tensor | None  # int64 [R], rows of the head's input; None: all rows


def patch_head(model: PreTrainedModel, use_fused_kernels: bool = True) -> None:
    """Make `model` return float32 logits and, with `use_fused_kernels`, log-probs without logits.

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
        _add_fused_log_probs(model, head, *transform)
    elif use_fused_kernels:
        warnings.warn(
            f"{type(model).__name__} does more to its logits than scale or soft-cap them: they are "
            "computed in full, as with use_fused_kernels=false",
            stacklevel=2,
        )


def has_fused_log_probs(model: nn.Module) -> bool:
    """Return whether the model's forward accepts `log_prob_targets`.

    It then returns (log_probs [R], entropy [R]).
    """
    return getattr(model.forward, "has_fused_log_probs", False)


def detect_logit_transform(
    model: PreTrainedModel, head: nn.Linear
) -> tuple[float, float | None] | None:
    """Return (scale, softcap) of the transform that `model` applies to its head's output x.

    That is scale * x, or softcap * tanh(x / softcap); None if it is neither.
    """
    x = torch.tensor([-1e4, -70.0, -3.0, 0.0, 0.5, 2.0, 30.0, 1e4])
    decoder = model.get_decoder()
    outputs = _DecoderOutput(last_hidden_state=torch.zeros(1, 1, head.in_features))  # type: ignore[arg-type]
    decoder.forward = lambda *_, **__: outputs
    head.forward = lambda input: x.clone()[None, None]  # type: ignore[method-assign]
    try:
        ids = torch.zeros(1, 1, dtype=torch.int64)
        y = model.forward(input_ids=ids, use_cache=False).logits.flatten().float()
    except Exception:  # any model's own code; if it fails here, its logits stay as they are
        return None
    finally:
        del decoder.forward, head.forward
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


def _add_fused_log_probs(
    model: nn.Module, head: nn.Linear, scale: float, softcap: float | None
) -> None:
    from hybridengine.kernels import linear_token_log_probs

    original_forward = model.forward
    # The model's forward passes its hidden states to the head but not our arguments, so both
    # patched functions share these two variables.
    targets: LogProbTargets | None = None
    result: tuple[Tensor, Tensor] | None = None

    @functools.wraps(original_forward)
    def forward(
        *args: Any, log_prob_targets: LogProbTargets | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor] | Any:
        nonlocal targets, result
        if log_prob_targets is None:
            return original_forward(*args, **kwargs)
        targets = log_prob_targets
        try:
            original_forward(*args, **kwargs)
            return result
        finally:
            targets, result = None, None

    def head_forward(self: nn.Linear, hidden: Tensor) -> Tensor:
        nonlocal result
        if targets is None:
            return _float32_linear(self, hidden)
        rows = hidden[0] if targets.positions is None else hidden[0, targets.positions]
        if rows.shape[0] != targets.target_ids.shape[0]:
            raise ModelError(
                f"{type(model).__name__} passed {rows.shape[0]} positions to its head, expected "
                f"{targets.target_ids.shape[0]}: its logits_to_keep accepts no index tensor"
            )
        dtype = torch.promote_types(rows.dtype, self.weight.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        result = linear_token_log_probs(
            rows.to(dtype), self.weight.to(dtype), targets.target_ids, targets.temperature,
            bias=bias, logit_scale=scale, softcap=softcap,
        )  # fmt: skip
        return result[0].detach().clone()[None, :, None]  # stands in for logits in the forward

    forward.has_fused_log_probs = True  # type: ignore[attr-defined]
    model.forward = forward
    head.forward = MethodType(head_forward, head)  # type: ignore[method-assign]


def _float32_linear(head: nn.Linear, hidden: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        bias = None if head.bias is None else head.bias.float()
        return F.linear(hidden.float(), head.weight.float(), bias)
