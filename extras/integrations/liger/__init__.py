"""Liger Kernel's fused losses on our operators, on GPUs and CPUs (liger-kernel 0.8).

    from hybridengine.integrations import liger

    liger.patch()                   # Liger's own classes and functions use ours, until unpatch()
    with liger.patched():           # within the block
        ...
    from hybridengine.integrations.liger import LigerFusedLinearGRPOLoss   # without Liger

The groups of `patch(*groups)`:

    log_probs       the fused-linear bases (GRPO, DPO, CPO, ORPO, SimPO, KTO, your subclasses): from
                    hidden states to log-probs and back; the losses' mathematics stays Liger's;
                    fused_selective_log_softmax
    policy_loss     triton_grpo_loss, by our form of the same mathematics
    cross_entropy   fused linear cross-entropy: what Liger's autograd function of it computes
"""

from .._patching import Patches
from . import compared
from .cross_entropy import (
    CrossEntropyOutput,
    LigerFusedLinearCrossEntropyLoss,
    fused_linear_cross_entropy_backward,
    fused_linear_cross_entropy_forward,
    liger_fused_linear_cross_entropy,
)
from .fused_linear_ppo import (
    LigerFusedLinearGRPOFunction,
    LigerFusedLinearGRPOLoss,
    LigerFusedLinearPPOBase,
)
from .fused_linear_preference import (
    LigerFusedLinearPreferenceBase,
    LigerFusedLinearUnpairedPreferenceBase,
)
from .grpo_from_logits import fused_selective_log_softmax, triton_grpo_loss
from .grpo_loss import get_gamma_weights

__all__ = [
    "CrossEntropyOutput",
    "LigerFusedLinearCrossEntropyLoss",
    "LigerFusedLinearGRPOFunction",
    "LigerFusedLinearGRPOLoss",
    "LigerFusedLinearPPOBase",
    "LigerFusedLinearPreferenceBase",
    "LigerFusedLinearUnpairedPreferenceBase",
    "fused_selective_log_softmax",
    "get_gamma_weights",
    "liger_fused_linear_cross_entropy",
    "liger_fused_linear_grpo",
    "patch",
    "patched",
    "triton_grpo_loss",
    "unpatch",
]

liger_fused_linear_grpo = LigerFusedLinearGRPOFunction.apply


_ppo, _paired = vars(LigerFusedLinearPPOBase), vars(LigerFusedLinearPreferenceBase)
_unpaired = vars(LigerFusedLinearUnpairedPreferenceBase)
_CHUNKED, _CROSS_ENTROPY = "chunked_loss.fused_linear", "ops.fused_linear_cross_entropy"
_PATCHES = Patches(
    "liger_kernel",
    {
        "log_probs": {
            f"{_CHUNKED}_ppo.LigerFusedLinearPPOBase.forward": _ppo["forward"],
            f"{_CHUNKED}_ppo.LigerFusedLinearPPOBase.chunk_forward": _ppo["chunk_forward"],
            f"{_CHUNKED}_preference.LigerFusedLinearPreferenceBase.forward": _paired["forward"],
            f"{_CHUNKED}_unpaired_preference.LigerFusedLinearUnpairedPreferenceBase.forward": (
                _unpaired["forward"]
            ),
            "ops.grpo_loss.fused_selective_log_softmax": fused_selective_log_softmax,
        },
        "policy_loss": {"transformers.grpo_loss.triton_grpo_loss": triton_grpo_loss},
        "cross_entropy": {
            f"{_CROSS_ENTROPY}.fused_linear_cross_entropy_forward": (
                fused_linear_cross_entropy_forward
            ),
            f"{_CROSS_ENTROPY}.fused_linear_cross_entropy_backward": (
                fused_linear_cross_entropy_backward
            ),
        },
    },
    distribution="liger-kernel",
    probes=compared.PROBES,
    known=compared.KNOWN,
)
patch, unpatch, patched = _PATCHES.patch, _PATCHES.unpatch, _PATCHES.patched
