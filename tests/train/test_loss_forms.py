"""The loss from hidden states in one pass equals log-probs, then the loss: values and gradients."""

from __future__ import annotations

import itertools
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybridengine.run.config import RLConfig
from hybridengine.run.config import rl as schema
from hybridengine.run.config.rl import (
    AlgorithmConfig,
    PolicyLossConfig,
    RolloutCorrectionConfig,
)
from tests import tolerances
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny
from tests.train.loss_forms_shared import Setup

pytestmark = pytest.mark.multirank  # one rank, for FSDP2

MODES = typing.get_args(typing.get_type_hints(PolicyLossConfig)["loss_mode"])
AGGREGATIONS = typing.get_args(typing.get_type_hints(schema.ActorConfig)["loss_agg_mode"])
CORRECTIONS = ((None, 2.0), ("token", 1.2), ("token", "0.8_1.2"))


def config_of(mode: str, aggregation: str, correction: tuple, extra_terms: bool) -> RLConfig:
    level, threshold = correction
    return RLConfig(
        actor=schema.ActorConfig(
            policy_loss=PolicyLossConfig(loss_mode=mode),
            loss_agg_mode=aggregation,
            use_kl_loss=extra_terms,
            kl_loss_coef=0.1,
            entropy_coeff=0.01 if extra_terms else 0.0,
        ),
        algorithm=AlgorithmConfig(rollout_correction=RolloutCorrectionConfig(level, threshold)),
    )


def cases(every: bool) -> Iterator[tuple[RLConfig, bool]]:
    """Every mode with every correction, with given and own old log-probs.

    The extra terms, and the aggregations, take turns, so that every mode meets all of them.

    every: both with and without the extra terms.
    """
    product = [
        (mode, own, correction, extra_terms)
        for number, (mode, own, correction) in enumerate(
            itertools.product(MODES, (False, True), CORRECTIONS)
        )
        for extra_terms in ((False, True) if every else (number % 2 == 1,))
    ]
    for (mode, own, correction, extra_terms), aggregation in zip(
        product, itertools.cycle(AGGREGATIONS), strict=False
    ):
        yield config_of(mode, aggregation, correction, extra_terms), own


def body(rank: int, world_size: int, path: str, every: bool) -> tuple[list[bool], int]:
    """Return which batches permit one pass, and the number of compared cases."""
    setup, count = Setup(rank, world_size, path), 0
    for config, own in cases(every):
        actor = setup.actor(config)
        assert actor.permits_one_pass(setup.batch, setup.batch.micro_batches[0])
        got, metrics = setup.loss(actor, own)
        two_steps = setup.actor(config, permits_one_pass=lambda *_: False)
        expected, expected_metrics = setup.loss(two_steps, own)
        case = f"{config.actor}, {config.algorithm.rollout_correction}, own={own}"
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(g, e, **tolerances.LINEAR, msg=lambda m, c=case: f"{c}: {m}")
        assert metrics.keys() == expected_metrics.keys(), case
        for name, e in expected_metrics.items():
            torch.testing.assert_close(
                metrics[name].double(),
                e.double(),
                **tolerances.LINEAR,
                msg=lambda m, c=case, n=name: f"{c}, {n}: {m}",
            )
        count += 1
    return permitted(setup), count


def permitted(setup: Setup) -> list[bool]:
    from hybridengine.model.packed import SequenceShard

    [micro_batch] = setup.batch.micro_batches
    own = replace(setup.batch, old_log_probs=None)
    by_response = setup.actor(config_of("vanilla", "token-mean", ("sequence", 2.0), False))
    by_mean = setup.actor(config_of("vanilla", "token-mean", ("sequence_mean", 2.0), False))
    by_token = setup.actor(RLConfig())
    rows = SequenceShard(torch.distributed.group.WORLD, torch.tensor([0]), 1)
    full_logits = setup.actor(RLConfig(), model=torch.nn.Linear(1, 1))
    return [
        by_token.permits_one_pass(own, micro_batch),
        by_response.permits_one_pass(setup.batch, micro_batch),
        by_response.permits_one_pass(own, micro_batch),
        by_mean.permits_one_pass(own, micro_batch),
        by_token.permits_one_pass(own, replace(micro_batch, shard=rows)),
        full_logits.permits_one_pass(own, micro_batch),
    ]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_one_pass_equals_two_steps_where_it_is_permitted(tmp_path: Path, every: bool) -> None:
    [(permits, count)] = run_ranks(body, 1, save_tiny("llama", tmp_path), every, timeout_s=300.0)
    assert permits == [True, True, False, False, False, False]
    assert count == len(MODES) * len(CORRECTIONS) * (4 if every else 2)


def clipped_tokens(rank: int, world_size: int, path: str) -> list[tuple[str, float, float]]:
    """Return, by loss mode, the share of tokens recorded as clipped and the metric of it.

    Both forms record the same tokens and entropies.
    """
    from hybridengine.train.rollout_files import TokenRecord

    setup, shares = Setup(rank, world_size, path), []
    mask = setup.batch.response_mask
    for mode in MODES:
        config, records = config_of(mode, "token-mean", (None, 2.0), False), []
        for changes in ({}, {"permits_one_pass": lambda *_: False}):
            actor = setup.actor(config, record=TokenRecord(), **changes)
            _, metrics = setup.loss(actor, own=False)
            records.append({n: x[mask] for n, x in actor.record.columns.items()})
        torch.testing.assert_close(*records, **tolerances.LINEAR)
        assert records[0]["entropy"].min() > 0
        recorded = records[0].get("clipped", torch.tensor(0.0)).mean().item()
        parts = [float(metrics.get(f"actor/{n}", 0)) for n in ("pg_clipfrac", "pg_clipfrac_lower")]
        shares.append((mode, recorded, sum(parts)))
    return shares


def test_the_recorded_tokens_are_those_that_the_loss_clips(tmp_path: Path) -> None:
    [shares] = run_ranks(clipped_tokens, 1, save_tiny("llama", tmp_path), timeout_s=300.0)
    for mode, recorded, metric in shares:
        assert recorded == pytest.approx(0.0 if mode == "geo_mean" else metric, abs=1e-6), mode
    assert dict((mode, recorded) for mode, recorded, _ in shares)["vanilla"] > 0
