"""A reward model: a sequence classifier, sharded over all ranks like the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedTokenizerBase

from hybridengine.model import on_device, pack_rollouts, packed_values
from hybridengine.runtime import Session
from hybridengine.trainer.batching import split_micro_batches
from hybridengine.trainer.rollouts import Rollout

__all__ = ["RewardModel"]


class RewardModel:
    """Scores a response by the model's value at its last token.

    With the policy's vocabulary it reads the ids as generated; with another one, the conversation
    and the response's text in its own chat template.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase | None,
        session: Session,
        max_tokens: int,
        weight: float,
    ) -> None:
        """tokenizer: the model's own, or None where it has the policy's vocabulary."""
        self.weight = weight
        self._model, self._tokenizer, self._session = model, tokenizer, session
        self._max_tokens = max_tokens

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout]) -> list[float]:
        """One number per rollout; all ranks call with the same rollouts."""
        ids = [self._ids(r) for r in rollouts]
        session = self._session
        split = split_micro_batches([len(i) for i in ids], session.world_size, self._max_tokens)
        scores = torch.zeros(len(ids), device=session.device)
        with on_device(self._model) as model:
            for micro in split[session.rank]:
                batch = pack_rollouts([(ids[i], []) for i in micro.indices], session.device)
                batch = replace(batch, logit_positions=batch.cu_seqlens[1:].long() - 1)
                values = packed_values(model, batch)
                if micro.counted:
                    scores[micro.indices] = values
        dist.all_reduce(scores)
        return scores.tolist()

    def _ids(self, rollout: Rollout) -> list[int]:
        if self._tokenizer is None:
            return [*rollout.sample.prompt_ids, *rollout.response_ids]
        answer = {"role": "assistant", "content": rollout.response_text}
        ids = self._tokenizer.apply_chat_template(
            [*rollout.sample.chat, answer], tokenize=True, return_dict=False
        )
        return list(ids)
