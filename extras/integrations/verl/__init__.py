"""verl's functions, under its names and by `patch()` in its place.

    from hybridengine.integrations import verl
    verl.patch()  # before verl builds its workers; verl.unpatch() puts its own functions back

In every process of a verl job, Ray's workers included, by an environment variable:

    VERL_USE_EXTERNAL_MODULES=hybridengine.integrations.verl.enabled

`patch(*groups)` replaces the functions of these groups, by default those marked *:

    log_probs *        log-probs and entropies from logits
    fused_head *       FusedLinearForPPO, linear_cross_entropy
    advantages *       compute_*_advantage*
    balancing *        partitions of sequences by length
    padding *          unpad_input, pad_input, index_first_axis
    losses             agg_loss, kl_penalty, compute_value_loss
    policy_losses      compute_policy_loss_*
    vocab_parallel     vocab-parallel log-probs and entropies; needs Megatron

`checkpoint_engine` syncs weights into a vLLM engine of the same process. Results, conventions and
differences: docs/verl.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from hybridengine.integrations._patching import Patches
from hybridengine.integrations.verl import (
    advantages,
    balancing,
    compared,
    log_probs,
    losses,
    padding,
    policy_losses,
)
from hybridengine.integrations.verl.advantages import *  # noqa: F403
from hybridengine.integrations.verl.balancing import *  # noqa: F403
from hybridengine.integrations.verl.log_probs import *  # noqa: F403
from hybridengine.integrations.verl.losses import *  # noqa: F403
from hybridengine.integrations.verl.padding import *  # noqa: F403
from hybridengine.integrations.verl.policy_losses import *  # noqa: F403

__all__ = [
    "patch",
    "patched",
    "unpatch",
    *advantages.__all__,
    *balancing.__all__,
    *log_probs.__all__,
    *losses.__all__,
    *padding.__all__,
    *policy_losses.__all__,
]


def _linear_cross_entropy(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """`linear_cross_entropy` with the signature of verl's, an autograd.Function's `apply`."""
    return log_probs.linear_cross_entropy(*args, **kwargs)


def _of(module: Any, home: str, names: Iterable[str]) -> dict[str, Any]:
    return {f"{home}.{name}": getattr(module, name) for name in names}


_CORE = "trainer.ppo.core_algos"
_PARALLEL = [name for name in log_probs.__all__ if name.startswith("vocab_parallel")]
_FROM_LOGITS = [n for n in log_probs.__all__ if "_from_logits" in n and n not in _PARALLEL]
_PATCHES = Patches(
    "verl",
    {
        "log_probs": _of(log_probs, "utils.torch_functional", _FROM_LOGITS),
        "advantages": _of(advantages, _CORE, advantages.__all__),
        "balancing": _of(balancing, "utils.seqlen_balancing", balancing.__all__),
        "padding": _of(padding, "utils.attention_utils", padding.__all__),
        "losses": _of(losses, _CORE, losses.__all__),
        "policy_losses": _of(policy_losses, _CORE, policy_losses.__all__),
        "vocab_parallel": _of(log_probs, "utils.megatron.tensor_parallel", _PARALLEL),
        "fused_head": {
            "utils.experimental.torch_functional.FusedLinearForPPO.forward": (
                log_probs.FusedLinearForPPO.forward
            ),
            "utils.kernel.linear_cross_entropy.linear_cross_entropy": _linear_cross_entropy,
        },
    },
    default_groups=("log_probs", "fused_head", "advantages", "balancing", "padding"),
    probes=compared.PROBES,
    known=compared.KNOWN,
)
patch, unpatch, patched = _PATCHES.patch, _PATCHES.unpatch, _PATCHES.patched
