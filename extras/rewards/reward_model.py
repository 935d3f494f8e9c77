"""The reward model: a sequence classifier that scores responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hybridengine.model import (
    free_gathered,
    is_sequence_classifier,
    on_device,
    pack_rollouts,
    packed_values,
)
from hybridengine.model.attachments import Attachment, AttachmentPreparer
from hybridengine.model.packed import PartSource
from hybridengine.model.packing_check import check_packing
from hybridengine.model.validation import check_weights, config_of
from hybridengine.run.config import ConfigError, DataConfig, RLConfig
from hybridengine.run.session import Session
from hybridengine.train.build import load_model, load_preparer, load_tokenizer
from hybridengine.train.data import PromptSample
from hybridengine.train.data.chats import ChatTemplate
from hybridengine.train.exchange import RowExchange, split_micro_batches
from hybridengine.train.rollouts import Rollouts, ScoredResponse
from hybridengine.vision.checks import find_conflicts


def check(config: RLConfig) -> None:
    """Check the files of the model; raise ConfigError where it is no sequence classifier."""
    path, trust = config.reward.reward_model.model_path, config.model.trust_remote_code
    model = config_of(config.model.at(path))
    if not is_sequence_classifier(model):
        raise ConfigError(
            f"reward.reward_model.model_path {path!r} is not a sequence classifier; give a model "
            "of a ...ForSequenceClassification class with one label"
        )
    check_weights(path, model, trust, classifier=True)
    check_packing(path, model, trust)


def build(config: RLConfig, tokenizer: PreTrainedTokenizerBase, session: Session) -> RewardModel:
    """Build the reward model; tokenizer: the policy's."""
    path = config.reward.reward_model.model_path
    own_tokenizer = load_tokenizer(config, path)
    return RewardModel(
        load_model(config, session, path, value_head=True).requires_grad_(False),
        None if own_tokenizer.get_vocab() == tokenizer.get_vocab() else own_tokenizer,
        session,
        config.actor.ppo_max_token_len_per_gpu,
        config.reward.all_weights[-1],
        None if find_conflicts(config) else load_preparer(config),
    )


@dataclass(frozen=True)
class RewardModel:
    """A sequence classifier, sharded over all ranks like the policy.

    It scores a response by the model's value at its last token.

    A model with the policy's vocabulary reads the token ids as generated, with their images. A
    model with another vocabulary reads the conversation and the response's text in its own chat
    template, without images.
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase | None  # the model's own; None for the policy's vocabulary
    session: Session
    max_tokens: int  # of a micro-batch
    weight: float  # of the score in a response's reward
    preparer: AttachmentPreparer | None = None  # None: it reads text alone

    def __call__(self, rollouts: Rollouts) -> Rollouts:
        """Add the score of every response of all ranks. Collective."""
        return rollouts.add_reward("reward_model", self.weight, self.score(rollouts))

    @torch.no_grad()
    def score(self, rollouts: Rollouts) -> Tensor:
        """Compute one score per response of all ranks, float64 [N]. Collective.

        Responses move to the ranks that score them, balanced by tokens.
        """
        rollouts.check_images(self.preparer is not None)
        own = rollouts.with_prompts()
        own_ids = [torch.tensor(self._ids(*pair), dtype=torch.int32) for pair in own]
        session = self.session
        lengths = rollouts.gather_numbers([ids.numel() for ids in own_ids]).long()
        split = split_micro_batches(lengths.tolist(), session.world_size, self.max_tokens)
        shortest = [int(lengths.argmin())]  # of dummy micro-batches
        wanted = [[i for rows in part for i in rows or shortest] for part in split]
        packed = torch.cat([torch.empty(0, dtype=torch.int32), *own_ids]).to(session.device)
        exchange, own_rows = RowExchange(rollouts.outcomes.ranks, wanted), wanted[session.rank]
        ids = iter(exchange(packed, lengths).cpu().split(lengths[own_rows].tolist()))
        images: Iterator[Sequence[Attachment]] = repeat(())
        if self.preparer is not None:
            images = iter(rollouts.images_of(own_rows, rollouts.move(exchange, ["images"])))
        scores = torch.zeros(len(lengths), dtype=torch.float64, device=session.device)
        with on_device(self.model) as model:
            for rows in split[session.rank]:
                pairs = [(next(ids), next(images)) for _ in rows or shortest]
                parts: Mapping[str, PartSource] = {}
                if self.preparer is not None:
                    parts = self.preparer.parts([own for _, own in pairs])
                batch = pack_rollouts(
                    [(sequence, ()) for sequence, _ in pairs], session.device, parts=parts
                )
                batch = replace(batch, logit_positions=batch.cu_seqlens[1:].long() - 1)
                values = packed_values(model, batch)
                if rows:
                    scores[rows] = values.double()
            free_gathered(model)
        dist.all_reduce(scores)  # exact: one rank's value plus zeros
        return scores.cpu()

    def _ids(self, sample: PromptSample, rollout: ScoredResponse) -> list[int]:
        if self.tokenizer is None:
            return [*rollout.prompt_ids(sample), *rollout.response.token_ids]
        answer = {"role": "assistant", "content": rollout.text}
        own = ChatTemplate(self.tokenizer, DataConfig())
        # A response cannot end its own turn.
        chat, tools = (
            own.special.hide("a response", value)
            for value in ([*map(dict, sample.chat), answer], list(sample.tools))
        )
        text = own.of_row(tools, {}).render("a response to the reward model", chat, False)
        return list(own.special.encode([text])["input_ids"][0])
