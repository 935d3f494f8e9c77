"""A batch spread over replicas: advantages, losses and metrics are those of a replicated batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridengine.kernels import select_by_covariance, token_kl
from hybridengine.run.config.rl import AlgorithmConfig, KLControlConfig
from hybridengine.train.algorithms import (
    ESTIMATORS,
    AdvantageOptions,
    KLController,
    Responses,
    advantages,
)
from hybridengine.train.rewards.manager import Reward
from tests.ranks import run_ranks
from tests.train.rollout_cases import make_rollouts, share

pytestmark = pytest.mark.multirank

WHITENED = ("gae", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
WEIGHTS = (1.0, -0.5)
KL_COEF = 0.25


def parts_of(i: int) -> dict[str, tuple[float, float]]:
    return {"a": (1.0, i % 3 / 3), "b": (-0.5, i % 5 / 7)}


def rollouts_with_parts(count: int):
    prompts, responses, _ = make_rollouts(101, count)
    return prompts, [
        replace(r, reward=Reward(r.reward.score, {"acc": i % 2}, parts_of(i)))
        for i, r in enumerate(responses)
    ]


def columns(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Per token of all responses: what models would compute."""
    generator = torch.Generator().manual_seed(11)
    names = ("old_log_probs", "ref_log_probs", "values")
    numbers = {name: -3 * torch.rand(sum(lengths), generator=generator) for name in names}
    return {**numbers, "response_mask": torch.rand(sum(lengths), generator=generator) < 0.3}


def body(rank: int, world_size: int, folder: Path, count: int, sp_size: int) -> dict[str, Any]:
    """By name, what one replica computes of its responses, and metrics of all."""
    from hybridengine.run.session import PhaseStatus, Session
    from hybridengine.train.advantages import compute_advantages, compute_rewards
    from hybridengine.train.batch import DataParallel
    from hybridengine.train.metrics import batch_metrics, explained_variance, probs_diff
    from hybridengine.train.models import Actor

    prompts, rollouts = rollouts_with_parts(count)
    lengths = [len(r.response.token_ids) for r in rollouts]
    dp = DataParallel(Session(PhaseStatus(folder, rank)), sp_size)
    batch = dp.build_batch(share(prompts, rollouts, rank, world_size), 2, 30)
    own = {
        name: torch.cat([values.split(lengths)[i] for i in batch.index.tolist()])
        for name, values in columns(lengths).items()
    }
    some = own.pop("response_mask") & batch.response_mask
    outcomes = batch.outcomes.with_column("baseline", torch.arange(count) / count)
    batch = replace(batch, outcomes=outcomes, **own)
    results: dict[str, Any] = {}
    for name in ESTIMATORS:
        for kl in (None, KLController(KLControlConfig(), KL_COEF)):
            algorithm = AlgorithmConfig(adv_estimator=name, gamma=0.9, lam=0.8)
            rewards, metrics = compute_rewards(batch, dp, kl, algorithm)
            results[f"{name}/{kl is not None}"] = compute_advantages(batch, dp, rewards, algorithm)
            results[f"rewards/{kl is not None}"] = rewards.per_trajectory, metrics
    advantages, returns = results["grpo/False"][0], results["gae/False"][1]
    batch = replace(batch, advantages=advantages, returns=returns)
    results["metrics"] = {
        **batch_metrics(batch, dp.group),
        **probs_diff(batch, dp.group),
        "explained": explained_variance(batch, dp.group),
    }
    nothing = replace(batch, response_mask=torch.zeros_like(some))
    assert probs_diff(nothing, dp.group) == {}  # nothing is compared: no zeros
    masked = replace(batch, response_mask=some)
    counts = [dp.num_trained(masked, number) for number in (0, 1)]
    results["counts"] = [(int(tokens), int(seqs)) for tokens, seqs in counts]
    for mode in ("clip_cov", "kl_cov"):
        loss = SimpleNamespace(loss_mode=mode)
        config = SimpleNamespace(seed=3, actor=SimpleNamespace(policy_loss=loss))
        actor = SimpleNamespace(_dp=dp, _config=config)
        results[mode] = Actor.select(actor, batch), None
    results["index"] = [] if batch.is_dummy else batch.index.tolist()
    results["bounds"] = batch.cu_seqlens.tolist()
    results["tokens"] = batch.rollout_log_probs, None
    return results


def replicated(count: int) -> dict[str, Any]:
    """The same in one process from plain tensors of all responses."""
    _, rollouts = rollouts_with_parts(count)
    lengths = torch.tensor([len(r.response.token_ids) for r in rollouts])
    given = columns(lengths.tolist())
    ends = torch.cat([torch.zeros(1), lengths.cumsum(0)]).int()
    scores = torch.tensor([r.reward.score for r in rollouts])
    results: dict[str, Any] = {}
    for with_kl in (False, True):
        token_rewards = torch.zeros(int(ends[-1]))
        token_rewards[ends[1:].long() - 1] = scores
        ids, rewards = torch.repeat_interleave(lengths), scores
        if with_kl:
            kl = token_kl("kl", given["old_log_probs"], given["ref_log_probs"])
            token_rewards -= KL_COEF * kl
            rewards = scores - KL_COEF * torch.zeros(count).index_add(0, ids, kl)
        parts = torch.tensor([[part[1] for part in r.reward.parts.values()] for r in rollouts])
        responses = Responses(
            rewards=rewards,
            group_ids=torch.tensor([r.group for r in rollouts]),
            cu_seqlens=ends,
            response_mask=torch.ones(int(ends[-1]), dtype=torch.bool),
            token_rewards=token_rewards,
            values=given["values"],
            reward_baselines=torch.arange(count) / count,
            reward_parts=parts,
        )
        options = AdvantageOptions(gamma=0.9, lam=0.8, part_weights=WEIGHTS)
        for name in ESTIMATORS:
            results[f"{name}/{with_kl}"] = advantages(name, responses, options)
        results[f"rewards/{with_kl}"] = rewards
    adv, returns = results["grpo/False"][0], results["gae/False"][1]
    p = given["old_log_probs"].double().exp()
    q = torch.tensor([x for r in rollouts for x in r.response.log_probs]).double().exp()
    results["metrics"] = {
        "critic/score/mean": float(scores.mean()),
        "critic/advantages/mean": float(adv.mean()),
        "critic/advantages/max": float(adv.max()),
        "critic/returns/min": float(returns.min()),
        "critic/values/mean": float(given["values"].mean()),
        "response_length/mean": float(lengths.double().mean()),
        "response_length/clip_ratio": 1.0,
        "reward/acc": count // 2 / count,
        "training/rollout_probs_diff_mean": float((p - q).abs().mean()),
        "training/rollout_probs_diff_max": float((p - q).abs().max()),
        "training/rollout_actor_probs_pearson_corr": float(
            torch.corrcoef(torch.stack([p, q]))[0, 1]
        ),
        "explained": float(1 - (returns - given["values"]).var() / returns.var()),
    }
    groups = torch.tensor([r.group for r in rollouts])
    first = int((groups * 2 // (int(groups.max()) + 1) == 0).sum())
    split = [slice(0, int(ends[first])), slice(int(ends[first]), None)]
    trained = given["response_mask"]
    results["counts"] = [
        (int(trained[part].sum()), len(set(ids[part][trained[part]].tolist()))) for part in split
    ]
    for mode in ("clip_cov", "kl_cov"):
        generator = torch.Generator().manual_seed(3)
        chosen = [
            select_by_covariance(
                given["old_log_probs"][part], adv[part], loss_mode=mode, generator=generator
            )
            for part in split
        ]
        results[mode] = torch.cat(chosen), None
    results["tokens"] = q.log().float(), None
    results["lengths"] = lengths.tolist()
    return results


@pytest.mark.parametrize(
    ("world_size", "sp_size", "count"), [(1, 1, 11), (2, 1, 11), (4, 1, 11), (4, 2, 11), (4, 1, 3)]
)
def test_a_distributed_batch_is_the_replicated_one(
    tmp_path: Path, world_size: int, sp_size: int, count: int
) -> None:
    want = replicated(count)
    results = run_ranks(body, world_size, tmp_path, count, sp_size)
    held = [i for got in results[::sp_size] for i in got["index"]]
    assert sorted(held) == list(range(count)), "every response is trained on by one replica"
    for got in results:
        for name, value in want["metrics"].items():
            assert got["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
        for with_kl in (False, True):
            assert torch.equal(got[f"rewards/{with_kl}"][0], want[f"rewards/{with_kl}"])
        assert got["counts"] == want["counts"]
        for name, value in want.items():
            if isinstance(value, tuple):
                check_tokens(name, got, value, want["lengths"])


def check_tokens(name: str, got: dict[str, Any], want: tuple, lengths: list[int]) -> None:
    """Compare the responses that a replica holds bit for bit."""
    for mine, full in zip(got[name], want, strict=True):
        if full is None:
            continue
        for k, i in enumerate(got["index"]):
            own = mine[got["bounds"][k] : got["bounds"][k + 1]]
            theirs = full.split(lengths)[i]
            if name.split("/")[0] in (*WHITENED, "tokens"):  # float64 sums in another order
                torch.testing.assert_close(own, theirs, rtol=3e-7, atol=1e-7)
            else:
                assert torch.equal(own, theirs), (name, i)
