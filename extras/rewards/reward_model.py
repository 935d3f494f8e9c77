"""The reward model: a sequence classifier that scores responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hybridengine.engine.response import Response
from hybridengine.model import free_gathered, on_device, pack_rollouts, packed_values
from hybridengine.run.config import DataConfig
from hybridengine.run.session import Session
from hybridengine.train.data import PromptSample
from hybridengine.train.data.chats import ChatTemplate
from hybridengine.train.exchange import RowExchange
from hybridengine.train.rollouts import Rollouts
from hybridengine.train.split import split_micro_batches
from hybridengine.vision import EncodedImage, ImagePreparer, image_arguments


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
    preparer: ImagePreparer | None = None  # None: it reads text alone

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
        images: Iterator[Sequence[EncodedImage]] = repeat(())
        if self.preparer is not None:
            images = iter(rollouts.move_images(exchange, own_rows, rollouts.image_sizes()))
        scores = torch.zeros(len(lengths), dtype=torch.float64, device=session.device)
        with on_device(self.model) as model:
            for rows in split[session.rank]:
                pairs = [(next(ids), next(images)) for _ in rows or shortest]
                batch = pack_rollouts(
                    [(sequence, ()) for sequence, _ in pairs],
                    session.device,
                    **image_arguments(self.preparer, [own for _, own in pairs]),
                )
                batch = replace(batch, logit_positions=batch.cu_seqlens[1:].long() - 1)
                values = packed_values(model, batch)
                if rows:
                    scores[rows] = values.double()
            free_gathered(model)
        dist.all_reduce(scores)  # exact: one rank's value plus zeros
        return scores.cpu()

    def _ids(self, sample: PromptSample, response: Response) -> list[int]:
        if self.tokenizer is None:
            return [*(response.context_ids or sample.prompt_ids), *response.token_ids]
        answer = {"role": "assistant", "content": response.text}
        own = ChatTemplate(self.tokenizer, DataConfig())
        # A response cannot end its own turn.
        chat, tools = (
            own.special.hide("a response", value)
            for value in ([*map(dict, sample.chat), answer], list(sample.tools))
        )
        text = own.of_row(tools, {}).render("a response to the reward model", chat, False)
        return list(own.special.encode([text])["input_ids"][0])
