"""Score centering in a job: its gradient is the definition's, and what cannot work is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridengine.run.config import ConfigError, RLConfig, load_config
from hybridengine.run.config.rl import AlgorithmConfig, ScoreCenteringConfig
from tests import tolerances
from tests.ranks import run_ranks
from tests.tensors import whole
from tests.tiny_models import VOCAB, save_tiny
from tests.train.in_process import Result, run_jobs, small_job
from tests.train.loss_forms_shared import Setup
from tests.train.rollout_cases import make_rollouts, share

pytestmark = pytest.mark.multirank
CENTERED = "algorithm.score_centering.enabled=true"


def recorded_columns(count: int, truncates: bool, seed: int) -> dict[str, Any]:
    """The columns of `count` tokens of an engine of random distributions, sampled token included.

    truncates: over 9 kept entries, of which 4 are among the most likely ones; else over all.
    """
    generator = torch.Generator().manual_seed(seed)
    q = (2 * torch.randn(count, VOCAB, generator=generator)).log_softmax(1)
    tokens = torch.randint(VOCAB, (count, 1), generator=generator)
    columns: dict[str, Any] = {"tokens": tokens.flatten().tolist()}
    if truncates:
        ids = torch.cat([tokens, q.topk(9).indices], 1)[:, :9]
        ids = torch.stack([row[row.argsort()] for row in ids])
        keep = torch.ones_like(ids, dtype=torch.bool)
        keep[:, 1:] = ids.diff() > 0
        columns |= {"num_kept": keep.sum(1).tolist(), "kept_ids": ids[keep].tolist()}
        mask = torch.zeros_like(q, dtype=torch.bool).scatter(1, ids, True)
        q = q.masked_fill(~mask, -torch.inf).log_softmax(1)
    likely = q.topk(4).indices.sort(1).values
    columns |= {"num_likely": [4] * count, "likely_ids": likely.flatten().tolist()}
    return columns | {
        "likely_log_probs": q.gather(1, likely).flatten().tolist(),
        "log_probs": q.gather(1, tokens).flatten().tolist(),
    }


def definition(model: Any, rollouts: Any, advantages: list[torch.Tensor]) -> torch.Tensor:
    """The loss in float64, token by token, with every factor of equations 7 to 14 a constant."""
    losses = []
    for (prompt, scored), a in zip(rollouts, advantages, strict=True):
        c, columns = scored.response, scored.response.columns
        ids = torch.tensor([[*prompt, *c.token_ids]])
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        kept = list(columns.get("num_kept", [0] * len(a)))
        kept_ids = torch.tensor(columns.get("kept_ids", [])).split(kept)
        likely = torch.tensor(columns["likely_ids"]).split(list(columns["num_likely"]))
        log_q = torch.tensor(columns["likely_log_probs"]).double().split([4] * len(a))
        for t, token in enumerate(c.token_ids):
            mask = torch.zeros(VOCAB, dtype=torch.bool)
            mask[kept_ids[t].long() if kept[t] else slice(None)] = True
            log_p = logits[t].masked_fill(~mask, -torch.inf).log_softmax(0)
            p, q = log_p[likely[t]].exp().detach(), log_q[t].exp()
            w = (log_p[token].detach() - c.log_probs[t]).exp().clamp(max=2.0)
            r = (1 - q.sum()).clamp(min=0) / (1 - p.sum()).clamp(min=1e-6)
            tail = r * (1 / r).clamp(max=2.0) if r > 0 else r
            factors = q * (p / q).clamp(max=2.0) - tail * p
            losses.append(a[t] * ((factors * log_p[likely[t]]).sum() - w * log_p[token]))
    return torch.stack(losses).mean()


def gradients(rank: int, world_size: int, path: str, truncates: bool) -> list[tuple[Any, Any]]:
    """The gradients of each parameter: of the job's loss, and of the definition."""
    from transformers import AutoModelForCausalLM

    setup = Setup(rank, world_size, path)
    prompts, responses, advantages = make_rollouts(VOCAB)
    for i, scored in enumerate(responses):
        columns = recorded_columns(len(scored.response.token_ids), truncates, seed=i)
        response = replace(
            scored.response,
            token_ids=columns.pop("tokens"),
            log_probs=columns.pop("log_probs"),
            columns=columns,
        )
        responses[i] = replace(scored, response=response)
    batch = setup.dp.build_batch(share(prompts, responses, 0, 1), 1, 10_000)
    setup.batch = replace(batch, advantages=torch.cat(advantages))
    config = RLConfig(
        algorithm=AlgorithmConfig(score_centering=ScoreCenteringConfig(enabled=True, top_k=4))
    )
    actor = setup.actor(config)
    _, metrics = setup.loss(actor, own=True)
    assert "actor/score_centering" in metrics
    found = [whole(p.grad).clone() for p in setup.model.parameters()]

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    pairs = [(prompts[r.group].prompt_ids, r) for r in responses]
    definition(model, pairs, advantages).backward()
    names = [name for name, _ in setup.model.named_parameters()]
    own = dict(model.named_parameters())
    return [(g.double(), own[n].grad) for n, g in zip(names, found, strict=True)]


@pytest.mark.parametrize("truncates", [False, True], ids=["full vocabulary", "kept entries"])
def test_the_gradient_is_the_definitions_in_float64(tmp_path: Path, truncates: bool) -> None:
    [pairs] = run_ranks(gradients, 1, save_tiny("llama", tmp_path), truncates, timeout_s=300.0)
    scale = max(expected.abs().max() for _, expected in pairs)
    assert scale > 0
    for found, expected in pairs:
        torch.testing.assert_close(found / scale, expected / scale, **tolerances.LINEAR)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("jobs")
    base = [*small_job(folder), "trainer.n_gpus_per_node=2", "data.max_response_length=8"]
    base += ["algorithm.rollout_correction.rollout_is_threshold=1.0"]  # below it nothing is left
    wrong = [*base, "rollout.dtype=bfloat16"]
    cut = ["rollout.top_p=0.8", "rollout.top_k=20"]
    jobs = {
        name + suffix: [*settings, *more]
        for name, settings in {"equal": base, "cut": [*base, *cut], "wrong": wrong}.items()
        for suffix, more in (("", []), (" centered", [CENTERED]))
    }
    found = run_jobs(folder, list(jobs.values()), world_size=2)
    assert not any(result.refused for result in found)
    return dict(zip(jobs, found, strict=True))


@pytest.mark.parametrize("name", ["equal", "cut"])
def test_nothing_is_subtracted_where_the_engine_is_right(results, name: str) -> None:
    """Every entry has its log-prob on the rank that trains on it, or the gradients would differ."""
    plain, centered = results[name].rows[0], results[f"{name} centered"].rows[0]
    assert centered["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"], rel=1e-4)
    assert centered["actor/pg_loss"] == pytest.approx(plain["actor/pg_loss"], rel=1e-4, abs=1e-6)
    assert "actor/score_centering" in centered and "actor/score_centering" not in plain


def test_a_wrong_engine_is_corrected_for(results) -> None:
    """The same responses; the gradient changes by what the engine of bfloat16 is wrong."""
    plain, centered = results["wrong"], results["wrong centered"]
    assert [r["response_ids"] for r in plain.rollouts["step_1"]] == [
        r["response_ids"] for r in centered.rollouts["step_1"]
    ]
    change = abs(centered.rows[0]["actor/grad_norm"] / plain.rows[0]["actor/grad_norm"] - 1)
    exact = results["equal centered"].rows[0]["actor/grad_norm"]
    noise = abs(exact / results["equal"].rows[0]["actor/grad_norm"] - 1)
    assert change > 10 * noise


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("actor.ppo_epochs=2", "actor.ppo_epochs"),
        ("actor.ppo_mini_batch_size=2", "actor.ppo_mini_batch_size"),
        ("actor.policy_loss.loss_mode=gspo", "actor.policy_loss.loss_mode"),
        (
            "algorithm.rollout_correction.rollout_is=sequence",
            "algorithm.rollout_correction.rollout_is",
        ),
        (
            "algorithm.rollout_correction.bypass_mode=true",
            "algorithm.rollout_correction.bypass_mode",
        ),
        ("rollout.servers=[http://10.0.0.5:8000]", "algorithm.score_centering.enabled"),
    ],
)
def test_what_cannot_be_centered_is_refused_by_its_key(setting: str, key: str) -> None:
    given = ["model.path=model", "data.train_files=rows.jsonl", CENTERED, setting]
    with pytest.raises(ConfigError) as refused:
        load_config(None, given)
    lines = [line for line in str(refused.value).splitlines() if key in line]
    assert lines and "score_centering" in lines[0], str(refused.value)
