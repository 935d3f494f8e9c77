"""TRL's log-probs, fused output head and weight sync to vLLM, by ours.

    from hybridengine.integrations import trl

    trl.patch()  # before a trainer is made; GRPOTrainer, SFTTrainer, DPOTrainer, ... as before

Groups of `patch`, all of them default but `loss` and `async_sync`:

- `log_probs`: the functions of logits, and the autograd function under TRL's fused head.
- `head`: `add_fused_lm_head`, by which every trainer of TRL computes log-probs and entropy from
  hidden states. Only positions with a label pass through the head.
- `kept`: log-probs of GRPOTrainer and RLOOTrainer over the vocabulary entries that a colocated
  engine kept, where top-p, top-k or min-p truncate; needs `head`.
- `sync`: the weights of a vLLM engine in the trainers' processes (`vllm_mode="colocate"`) or of a
  server that was started for it (`vllm_mode="server"`).
- `async_sync`: the weights of the servers of `trl.experimental`'s AsyncGRPOTrainer and
  AsyncDistillationTrainer (the student's; teachers get none).
- `loss`: the loss of GRPOTrainer with its gradient made in the forward; needs `head`.

Losses (without `loss`), advantages and metrics remain TRL's. The functions can be imported from
here by their names in TRL, without TRL.
"""

from __future__ import annotations

from typing import Any

from hybridengine.integrations._patching import Patches
from hybridengine.integrations.trl import compared, kept
from hybridengine.integrations.trl.head import FusedCausalLMOutput, add_fused_lm_head
from hybridengine.integrations.trl.log_probs import (
    ChunkedLogProbFunction,
    entropy_from_logits,
    selective_log_softmax,
    selective_log_softmax_and_entropy,
)
from hybridengine.integrations.trl.loss import compute_loss
from hybridengine.integrations.trl.sync import init_communicator, init_vllm, sync_weights

__all__ = [
    "ChunkedLogProbFunction",
    "FusedCausalLMOutput",
    "add_fused_lm_head",
    "entropy_from_logits",
    "patch",
    "patched",
    "selective_log_softmax",
    "selective_log_softmax_and_entropy",
    "unpatch",
]

_GRPO = "trainer.grpo_trainer.GRPOTrainer._compute_loss"
_VLLM = "generation.vllm_generation.VLLMGeneration"
_CLIENT = "generation.vllm_client.VLLMClient.init_communicator"


def _init_vllm(self: Any) -> None:
    init_vllm(self, _PATCHES.original(f"{_VLLM}._init_vllm"))


def _sync_weights(self: Any) -> None:
    sync_weights(self, _PATCHES.original(f"{_VLLM}.sync_weights"))


def _init_communicator(self: Any, device: Any = 0) -> None:
    init_communicator(self, device, _PATCHES.original(_CLIENT))


def _generate(
    self: Any, prompts: Any, images: Any, num_generations: int, profiler: Any = None
) -> tuple:
    original = _PATCHES.original(f"{_VLLM}.generate")
    return kept.generate(self, lambda: original(self, prompts, images, num_generations, profiler))


def _kept(trainer: str, returns_tool_mask: bool) -> dict[str, Any]:
    """Return the replacements in a trainer of TRL; GRPO and RLOO have copies of each other."""
    generate, score, loss = (
        f"{trainer}.{name}"
        for name in ("_generate", "_generate_and_score_completions", "compute_loss")
    )

    def _generate(self: Any, prompts: list) -> tuple:
        result: tuple = _PATCHES.original(generate)(self, prompts)
        kept.note_completions(self, result[1], result[2] if returns_tool_mask else None)
        return result

    def _generate_and_score_completions(self: Any, inputs: Any) -> dict[str, Any]:
        return kept.score_completions(lambda: _PATCHES.original(score)(self, inputs))

    def compute_loss(
        self: Any,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        original, options = _PATCHES.original(loss), (return_outputs, num_items_in_batch)
        return kept.compute_loss(inputs, lambda: original(self, model, inputs, *options))

    return {generate: _generate, score: _generate_and_score_completions, loss: compute_loss}


def _async_sync(package: str, trainer: str) -> dict[str, Any]:
    """Return the replacements in one package of `trl.experimental`; each has a copy of the sync."""
    package = f"experimental.{package}"
    sync = f"{package}.{trainer}._sync_weight_merged"
    init = f"{package}.weight_transfer.WeightTransferClient.init_weight_transfer"

    def _sync_weight_merged(self: Any, t0: float) -> tuple[float, float, float]:
        from hybridengine.integrations.trl.async_sync import sync_weight_merged

        return sync_weight_merged(self, t0, _PATCHES.original(sync), _PATCHES.original(init))

    def init_weight_transfer(self: Any) -> None:
        from hybridengine.integrations.trl import async_sync

        async_sync.init_weight_transfer(self, _PATCHES.original(init))

    return {sync: _sync_weight_merged, init: init_weight_transfer}


def _compute_loss(self: Any, model: Any, inputs: dict[str, Any]) -> Any:
    return compute_loss(self, model, inputs, _PATCHES.original(_GRPO))


_GROUPS: dict[str, dict[str, Any]] = {
    "log_probs": {
        "trainer.utils.selective_log_softmax": selective_log_softmax,
        "trainer.utils.entropy_from_logits": entropy_from_logits,
        "trainer.utils.selective_log_softmax_and_entropy": selective_log_softmax_and_entropy,
        "kernels.chunked_logprob.ChunkedLogProbFunction": ChunkedLogProbFunction,
    },
    "head": {"trainer.utils.add_fused_lm_head": add_fused_lm_head},
    "kept": {
        f"{_VLLM}.generate": _generate,
        **_kept("trainer.grpo_trainer.GRPOTrainer", returns_tool_mask=True),
        **_kept("trainer.rloo_trainer.RLOOTrainer", returns_tool_mask=False),
    },
    "sync": {
        f"{_VLLM}._init_vllm": _init_vllm,
        f"{_VLLM}.sync_weights": _sync_weights,
        _CLIENT: _init_communicator,
    },
    "async_sync": {
        **_async_sync("async_grpo", "async_grpo_trainer.AsyncGRPOTrainer"),
        **_async_sync("async_distillation", "async_distillation_trainer.AsyncDistillationTrainer"),
    },
    "loss": {_GRPO: _compute_loss},
}
_PATCHES = Patches(
    "trl",
    _GROUPS,
    default_groups=("log_probs", "head", "kept", "sync"),
    probes=compared.PROBES,
    known=compared.KNOWN,
)
patch, unpatch, patched = _PATCHES.patch, _PATCHES.unpatch, _PATCHES.patched
