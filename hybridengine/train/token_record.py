"""What the policy update computes per token, kept where a rollout file of the step is due."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridengine.kernels import token_policy_loss
from hybridengine.model import PackedBatch
from hybridengine.train.batch import RolloutBatch

__all__ = ["TokenRecord"]

# Arguments of the loss that clipping depends on.
_CLIPPING = (
    "old_log_probs",
    "advantages",
    "response_mask",
    "loss_mode",
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_c",
    "selected",
    "cu_seqlens",
)


class TokenRecord:
    """The values of the tokens of a batch in the last pass of the update over them.

    Attributes:
        columns: by name, float32 [R]. entropy: of the policy, nats. clipped: 1 where a clip, a mask
          or a selection of the loss took effect, else 0. old_log_probs: only where the update
          computes them (`Actor.update_once`).
        mask: bool [R], the tokens in the loss, which alone have these values; None: none has.
    """

    def __init__(self) -> None:
        self.columns = dict[str, Tensor]()
        self.mask: Tensor | None = None

    @torch.no_grad()
    def add(
        self,
        batch: RolloutBatch,
        micro_batch: PackedBatch,
        log_probs: Tensor,
        entropy: Tensor,
        arguments: Mapping[str, Any],
    ) -> None:
        """Take a micro-batch. log_probs, entropy: [r]. arguments: of `policy_loss`."""
        if self.mask is None:  # a replica without responses has mask and columns as well
            self.mask = torch.zeros_like(batch.response_mask)
        if not micro_batch.is_dummy:
            self.mask[micro_batch.row_index] = arguments["response_mask"]
        if arguments["old_log_probs"] is None:
            self._set("old_log_probs", batch, micro_batch, log_probs)
        self._set("entropy", batch, micro_batch, entropy)
        if arguments["loss_mode"] != "geo_mean":  # which clips by the whole response
            chosen = {name: arguments[name] for name in _CLIPPING}
            losses = token_policy_loss(log_probs.detach(), **chosen)
            clipped = losses.clipped | losses.clipped_lower
            self._set("clipped", batch, micro_batch, clipped)

    def _set(
        self, name: str, batch: RolloutBatch, micro_batch: PackedBatch, values: Tensor
    ) -> None:
        if name not in self.columns:
            self.columns[name] = torch.zeros_like(batch.rollout_log_probs)
        if not micro_batch.is_dummy:
            self.columns[name][micro_batch.row_index] = values.to(torch.float32)
