"""What is compared before functions of Liger are replaced.

The bases are called with a loss of Liger on top; they make the gradients in the forward. Triton's
functions cannot run on the CPU and are compared by the names that they use.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from hybridengine.integrations._compare import Probe, constant, draw, with_gradients

__all__ = ["KNOWN", "PROBES"]

_CHUNKED, _CROSS_ENTROPY = "chunked_loss.fused_linear", "ops.fused_linear_cross_entropy"
_IDS = constant([[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]])
_INPUTS = {"hidden": draw(4, 3, 8), "weight": draw(19, 8, seed=1), "bias": draw(19, seed=2)}


class _Context:
    """What a forward keeps for the backward: the gradients."""

    saved: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved = tensors


def _chunk_forward(function: Any) -> Any:
    def call(hidden: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return getattr(function, "__func__", function)(hidden, weight, _IDS, bias, 0.7)

    return with_gradients(call, _INPUTS, tuple(_INPUTS))


def _forward(loss: str, given: Callable[[], dict[str, Any]]) -> Probe:
    """Return a probe of a base's `forward` for the autograd function `loss` of Liger.

    given: returns its arguments without those of the head.
    """

    def probe(function: Any) -> Any:
        module, name = loss.split(":")
        context = _Context()
        result = getattr(function, "__func__", function)(
            getattr(import_module(f"liger_kernel.chunked_loss.{module}"), name),
            context,
            _input=_INPUTS["hidden"].clone().requires_grad_(),
            weight=_INPUTS["weight"].clone().requires_grad_(),
            bias=_INPUTS["bias"].clone().requires_grad_(),
            compiled=False,
            **given(),
        )
        return result, context.saved

    return probe


def _grpo() -> dict[str, Any]:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]])
    old = -draw(4, 3, seed=3).abs() - 2
    return {
        "selected_token_ids": _IDS,
        "attention_mask": mask,
        "advantages": draw(4, seed=4),
        "old_per_token_logps": old,
        "ref_per_token_logps": old,
    }


def _target() -> Tensor:
    return _IDS.masked_fill(_IDS == 6, -100)


PROBES: dict[str, Probe] = {
    f"{_CHUNKED}_ppo.LigerFusedLinearPPOBase.chunk_forward": _chunk_forward,
    f"{_CHUNKED}_ppo.LigerFusedLinearPPOBase.forward": _forward(
        "grpo_loss:LigerFusedLinearGRPOFunction", _grpo
    ),
    f"{_CHUNKED}_preference.LigerFusedLinearPreferenceBase.forward": _forward(
        "dpo_loss:LigerFusedLinearDPOFunction", lambda: {"target": _target()}
    ),
    f"{_CHUNKED}_unpaired_preference.LigerFusedLinearUnpairedPreferenceBase.forward": _forward(
        "kto_loss:LigerFusedLinearKTOFunction",
        lambda: {
            "target": _target(),
            "preference_labels": torch.tensor([True, False, True, False]),
            "kl": torch.tensor(0.1),
        },
    ),
}
KNOWN = {
    "transformers.grpo_loss.triton_grpo_loss": """
        GrpoLossFunction ValueError append apply dim dtype fused_selective_log_softmax
        get_gamma_weights ones_like torch unsqueeze zeros_like""",
    f"{_CROSS_ENTROPY}.fused_linear_cross_entropy_forward": """
        MAX_FUSED_SIZE ValueError _ADDMM_SUPPORTS_OUT_DTYPE _can_use_mm_out add add_ addmm bfloat16
        bool cdiv clone contiguous cuda detach device dispatch dtype empty float float16 float32
        full gather get_device_capability int int64 is_floating_point is_hip isinstance item len
        liger_cross_entropy_kernel masked_select min mm next_power_of_2 range requires_grad shape
        softmax squeeze stride sum t tanh to torch triton type unsqueeze zeros zeros_like""",
    f"{_CROSS_ENTROPY}.fused_linear_cross_entropy_backward": """
        MAX_FUSED_SIZE device element_mul_kernel equal is_hip min next_power_of_2 shape stride
        tensor torch triton""",
}
