"""The tokens that may have a gradient, found for all micro-batches of an update at once."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hybridengine.model import PackedBatch, pack_rollouts
from hybridengine.run.config import RLConfig
from hybridengine.run.config import rl as schema
from hybridengine.train.batch import RolloutBatch
from hybridengine.train.models import Actor

ADVANTAGES = torch.tensor([1.0, 0.0, -2.0, 0.0, 0.0, 3.0, 1.0, 1.0])
MASK = torch.tensor([1, 1, 0, 1, 1, 1, 1, 0], dtype=torch.bool)  # active: 0, 5, 6


def micro_batch(*tokens: int, is_dummy: bool = False) -> PackedBatch:
    packed = pack_rollouts([([1], [2] * len(tokens))])
    return replace(packed, row_index=torch.tensor(tokens), is_dummy=is_dummy)


def active_rows(config: RLConfig) -> list[list[list[int] | None]]:
    first = [micro_batch(5, 6, 7), micro_batch(3, 4)]
    second = [micro_batch(2, 0), micro_batch(0, 1, is_dummy=True)]
    kl_coef = config.actor.kl_loss_coef if config.actor.use_kl_loss else 0.0
    dp = SimpleNamespace(divide=lambda batch, _: batch)
    actor: Any = SimpleNamespace(_config=config, _kl_coef=kl_coef, _dp=dp, model=nn.Module())
    unused: Any = None
    batch = RolloutBatch(
        outcomes=unused,
        index=unused,
        cu_seqlens=unused,
        response_mask=MASK,
        rollout_log_probs=unused,
        pack=unused,
        mini_batches=[first, second],
        mini_batch_of=unused,
        placement=unused,
        advantages=ADVANTAGES,
    )
    return [
        [None if m.active_rows is None else m.active_rows.tolist() for m in mini_batch]
        for mini_batch in Actor.with_active_rows(actor, batch).mini_batches
    ]


def test_rows_of_every_micro_batch_are_its_own() -> None:
    assert active_rows(RLConfig()) == [[[0, 1], []], [[1], []]]


def test_every_row_is_active_where_a_term_has_a_gradient_everywhere() -> None:
    actor = schema.ActorConfig(entropy_coeff=0.1)
    assert active_rows(RLConfig(actor=actor)) == [[None, None], [None, None]]
