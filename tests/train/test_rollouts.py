"""Rollouts: more ranks than prompts; the groups that dynamic sampling selects."""

import json
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch

from hybridengine.engine.response import Response
from hybridengine.lab.validation import expected_majority
from hybridengine.run.errors import RolloutError
from hybridengine.train.data import PromptSample, Subset
from hybridengine.train.metrics import problems_of
from hybridengine.train.rewards.manager import Reward
from hybridengine.train.rollout_files import rollout_line
from hybridengine.train.rollouts import Rollouts, ScoredResponse, own_outcomes, select_groups
from tests.ranks import run_ranks
from tests.train.in_process import Result, run_jobs, small_job

ONE_TOKEN = Response([1], [0.0], "stop")
SAMPLES = [PromptSample(index, [1], "", "", "", {}) for index in range(23)]


def group(number: int, index: int, scores: list[float], acc: list[float] | None = None):
    accs = acc or scores
    return [
        (index, ScoredResponse(ONE_TOKEN, number, reward=Reward(score, {"acc": a})))
        for score, a in zip(scores, accs, strict=True)
    ]


FIRST = [*group(0, 10, [1, 1]), *group(1, 11, [0, 1]), *group(2, 12, [0, 0])]
SECOND = [*group(0, 20, [1, 0]), *group(1, 21, [0, 0]), *group(2, 22, [1, 0])]


def batch_of(pairs):
    prompts = Subset(SAMPLES, list({r.group: index for index, r in pairs}.values()))
    own = [r for _, r in pairs]
    return Rollouts(prompts, own_outcomes(prompts, own, 0), own)


def chosen(batches, metric="score", wanted=3):
    rollouts, with_signal = select_groups(list(map(batch_of, batches)), metric, wanted)
    numbers = [i for i in range(wanted) for _ in range(2)]
    assert [r.group for r in rollouts.own] == rollouts.outcomes.groups.tolist() == numbers
    assert [r.reward.score for r in rollouts.own] == rollouts.outcomes.scores.tolist()
    indices = [sample.index for sample, _ in rollouts.with_prompts()][::2]
    assert indices == [prompt.index for prompt in rollouts.prompts]
    return indices, with_signal


JOBS = {
    "one prompt": {"data.train_batch_size": 1},
    "told": {
        "model.path": "{dir}/stopping",
        "reward.custom_reward_function.name": "told",
        "data.val_files": "{dir}/rows.jsonl",
        "rollout.val_kwargs.n": 4,
        "rollout.val_kwargs.do_sample": True,
        "rollout.val_kwargs.temperature": 1.0,
    },
    "two steps": {"trainer.total_training_steps": 2},
    "built-in": {
        "reward.custom_reward_function.path": "turn_rewards",
        "data.val_files": "{dir}/rows.jsonl",
    },
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Result]:
    """Of jobs on two ranks."""
    folder = tmp_path_factory.mktemp("rollouts")
    base = [*small_job(folder), "trainer.n_gpus_per_node=2"]
    jobs = [
        [*base, *(f"{key}={value}".format(dir=folder) for key, value in job.items())]
        for job in JOBS.values()
    ]
    found = run_jobs(folder, jobs, world_size=2)
    assert [result.refused for result in found] == [""] * len(JOBS)
    return dict(zip(JOBS, found, strict=True))


@pytest.mark.multirank
def test_a_rank_without_prompts_takes_part(results):
    """One prompt for two engines."""
    result = results["one prompt"]
    assert len(result.rollouts["step_1"]) == 4
    assert result.last["actor/grad_norm"] > 0


@pytest.mark.multirank
def test_files_have_texts_and_advantages_and_votes_count_texts(results):
    result = results["told"]
    rows = result.rollouts["step_1"]
    assert len(rows) == 16 and {row["pred"] for row in rows} == {"plumless", "buckeroo"}
    for row in rows:
        length = len(row["response"].split())
        assert (row["note"], row["reward"], row["data_source"]) == (f"é {length}", length, "toy")
        assert row["finish_reason"] in ("stop", "length")
        assert row["old_log_probs"] == pytest.approx(row["log_probs"], abs=1e-3)  # float32 both
        assert row["advantages"] == pytest.approx([row["advantage"]] * len(row["response_ids"]))
        assert len(row["entropy"]) == len(row["response_ids"]) and min(row["entropy"]) > 0
        assert set(row["clipped"]) == {0.0}  # one optimizer step: every ratio is 1
    for group in (rows[k : k + 4] for k in range(0, 16, 4)):
        rewards, advantages = ([row[name] for row in group] for name in ("reward", "advantage"))
        spread = stdev(rewards) + 1e-6
        want = [(reward - fmean(rewards)) / spread for reward in rewards]
        assert advantages == pytest.approx(want, abs=1e-4)
    tokens = [x for row in rows for x in row["entropy"]]
    [logged] = [row["actor/entropy"] for row in result.rows if "actor/entropy" in row]
    assert fmean(tokens) == pytest.approx(logged, rel=1e-4)
    tested = result.rollouts["val_1"]
    assert all("advantage" not in row for row in tested)
    votes = []
    for problem in (tested[k : k + 4] for k in range(0, 32, 4)):
        answers = [float(row["pred"] == "plumless") for row in problem]
        votes.append(expected_majority([row["acc"] for row in problem], answers, 4))
    assert result.last["val-core/toy/acc/maj@4/mean"] == pytest.approx(fmean(votes))
    assert not any("pred" in name or "note" in name for row in result.rows for name in row)


@pytest.mark.multirank
def test_what_a_built_in_rule_gives_up_on_is_a_metric_of_training(results):
    result = results["built-in"]
    logged = [item for row in result.rows for item in row.items() if "timed_out" in item[0]]
    assert logged == [("reward/timed_out", 0)]
    assert not any("timed_out" in row for rows in result.rollouts.values() for row in rows)


def test_groups_with_signal_come_first_in_their_order():
    assert chosen([FIRST, SECOND]) == ([11, 20, 22], 3)
    assert chosen([FIRST, SECOND], wanted=2) == ([11, 20], 2)


def test_a_short_batch_is_filled_with_what_there_is():
    assert chosen([FIRST]) == ([11, 10, 12], 1)


def test_the_metric_may_be_a_further_result():
    batch = [*group(0, 5, [0.5, 0.6], [1, 1]), *group(1, 6, [0.5, 0.5], [0, 1])]
    assert chosen([batch], "acc", 2) == ([6, 5], 1)
    assert chosen([batch], "seq_reward", 2) == ([5, 6], 1)


def test_counts_are_no_results_of_validation_and_in_files_where_they_are_not_0():
    pairs = [
        (index, ScoredResponse(ONE_TOKEN, index, reward=Reward(counts={"timed_out": number})))
        for index, number in enumerate([0.0, 1.0])
    ]
    batch = batch_of(pairs)
    assert batch.outcomes.counts["timed_out"].tolist() == [0, 1]
    assert [set(results) for _, results, _ in problems_of(batch)] == [{"score"}] * 2
    rows = [json.loads(rollout_line(*pair)) for pair in batch.with_prompts()]
    assert [row.get("timed_out") for row in rows] == [None, 1]


def test_a_group_of_one_has_signal():
    alone = group(0, 1, [1.0])
    rollouts, with_signal = select_groups([batch_of(alone)], "score", 1)
    assert (list(rollouts.own), with_signal) == ([r for _, r in alone], 1)


@pytest.mark.multirank
def test_files_name_the_weights(results):
    result = results["two steps"]
    of_steps = [{row["weights_checksum"] for row in result.rollouts[f"step_{n}"]} for n in (1, 2)]
    assert [len(names) for names in of_steps] == [1, 1], "both engines have the same weights"
    assert of_steps[0] != of_steps[1]


def train_beside_a_writer(rank: int, world_size: int, folder: Path, job: list[str]) -> str:
    """Something changes one bit of the engine's weights after the first step's sync."""
    from hybridengine.run.config import load_config
    from hybridengine.run.session import PhaseStatus, Session
    from hybridengine.sync.weight_target import target_of
    from hybridengine.train.rl import RLTrainer

    trainer = RLTrainer(load_config(None, job), Session(PhaseStatus(folder / "run", rank)))

    def write(step: int, metrics: object) -> None:
        weights = target_of(trainer.source.engine).weights()
        next(iter(weights.values())).data.view(torch.int32).view(-1)[7] ^= 1

    trainer.callbacks = {"on_step_end": write}
    with pytest.raises(RolloutError, match=r"changed since the sync to version \d") as error:
        trainer.train()
    return str(error.value)


@pytest.mark.multirank
def test_weights_that_something_else_wrote_are_an_error(tmp_path: Path):
    job = [*small_job(tmp_path), "trainer.total_training_steps=3"]
    [message] = run_ranks(train_beside_a_writer, 1, tmp_path, job)
    assert "responses are not the policy's" in message
