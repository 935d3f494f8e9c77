"""The output head: log-probs straight from hidden states, so that no [T, V] logits exist.

The model's own forward runs unchanged, FSDP2's hooks included; only the head's linear layer does
something else while log-probs are asked for. What the model makes of logits behind its head, a
scale or a soft-cap, is found by sending known values through that part of its forward. Where
logits themselves are wanted they are float32: rounded to bf16 they would dominate the error.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hybridengine.errors import ModelError

__all__ = ["LogProbsOf", "gives_log_probs", "prepare_head"]


@dataclass(frozen=True)
class LogProbsOf:
    """What a prepared model's forward is asked for by its keyword `log_probs_of`."""

    target_ids: Tensor  # int64 [R]
    temperature: float
    positions: Tensor | None  # int64 [R], rows of the head's input; None: all of them


def prepare_head(model: PreTrainedModel, use_fused_kernels: bool = True) -> None:
    """Let `model` give float32 logits and, unless turned off, log-probs without logits.

    Call it before the model is sharded. Inputs and weight of the head stay in the compute dtype, as
    the rollout engine's do; sums and results are float32. A head that is no plain linear layer is
    left as it is, and logits behind which the model does anything but scale or soft-cap them stay.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return
    shape = logit_shape(model, head) if use_fused_kernels else None
    head.forward = MethodType(_float32_linear, head)
    if shape is not None:
        _give_log_probs(model, head, *shape)
    elif use_fused_kernels:
        warnings.warn(
            f"{type(model).__name__} does more to its logits than a scale or a soft-cap: they are "
            "computed whole, as with use_fused_kernels=false",
            stacklevel=2,
        )


def gives_log_probs(model: nn.Module) -> bool:
    """Whether model(..., log_probs_of=LogProbsOf(...)) gives (log_probs [R], entropy [R])."""
    return getattr(model.forward, "gives_log_probs", False)


def logit_shape(model: PreTrainedModel, head: nn.Linear) -> tuple[float, float | None] | None:
    """(scale, softcap) of what the model makes of its head's result x.

    That is scale * x, or softcap * tanh(x / softcap); None where it is neither.
    """
    x = torch.tensor([-1e4, -70.0, -3.0, 0.0, 0.5, 2.0, 30.0, 1e4])
    decoder = model.get_decoder()
    outputs = _HiddenStates(last_hidden_state=torch.zeros(1, 1, head.in_features))
    decoder.forward, head.forward = lambda *_, **__: outputs, lambda _: x.clone()[None, None]
    try:
        ids = torch.zeros(1, 1, dtype=torch.int64)
        y = model.forward(input_ids=ids, use_cache=False).logits.flatten().float()
    except Exception:  # any model's own code: what does not run like this keeps its logits
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


class _HiddenStates(BaseModelOutput):
    """What a decoder returns, all else being None: caches, router logits, ..."""

    def __getattr__(self, name: str) -> None:
        return None


def _give_log_probs(model: nn.Module, head: nn.Linear, scale: float, softcap: float | None) -> None:
    from hybridengine.kernels import linear_token_log_probs

    whole, asked, found = model.forward, None, None

    @functools.wraps(whole)
    def forward(*args, log_probs_of: LogProbsOf | None = None, **kwargs):
        nonlocal asked, found
        if log_probs_of is None:
            return whole(*args, **kwargs)
        asked = log_probs_of
        try:
            whole(*args, **kwargs)
        finally:
            asked, result, found = None, found, None
        return result

    def head_forward(self: nn.Linear, hidden: Tensor) -> Tensor:
        nonlocal found
        if asked is None:
            return _float32_linear(self, hidden)
        rows = hidden[0] if asked.positions is None else hidden[0, asked.positions]
        if rows.shape[0] != asked.target_ids.shape[0]:
            raise ModelError(
                f"{type(model).__name__} gave its head {rows.shape[0]} positions where "
                f"{asked.target_ids.shape[0]} were asked for: its logits_to_keep takes no index"
            )
        dtype = torch.promote_types(rows.dtype, self.weight.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        found = linear_token_log_probs(
            rows.to(dtype), self.weight.to(dtype), asked.target_ids, asked.temperature,
            bias=bias, logit_scale=scale, softcap=softcap,
        )  # fmt: skip
        return found[0].detach().clone()[None, :, None]  # its "logits", for the model to go on with

    forward.gives_log_probs = True
    model.forward = forward
    head.forward = MethodType(head_forward, head)


def _float32_linear(head: nn.Linear, hidden: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        bias = None if head.bias is None else head.bias.float()
        return F.linear(hidden.float(), head.weight.float(), bias)
