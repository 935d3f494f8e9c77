"""Algorithms by their config names, through whole steps of a small job."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
import torch

from hybridengine.kernels import group_advantage, whiten
from hybridengine.train.algorithms import ESTIMATORS
from tests.train.in_process import Result, run_jobs, small_job

pytestmark = pytest.mark.multirank

GROUP_KERNELS = {
    "grpo": "grpo",
    "dr_grpo": "mean",
    "rloo": "rloo",
    "grpo_passk": "grpo_passk",
    "max_mean": "max_mean",
    "opo": "opo",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Result]:
    """A job of one step per estimator, and some of several steps, by name."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "mine.py").write_text(
        "import torch\n"
        "from hybridengine.train.algorithms import register_estimator\n"
        "@register_estimator('my_estimator')\n"
        "def mine(responses, options):\n"
        "    out = torch.full_like(responses.response_mask, 0.25, dtype=torch.float32)\n"
        "    return out, 2 * out\n"
    )
    jobs = {name: [f"algorithm.adv_estimator={name}"] for name in ESTIMATORS}
    jobs["remax"] += ["reward.custom_reward_function.name=hashed"]
    jobs["gdpo"] += [
        f"reward.custom_reward_function.path=[{folder}/reward.py,{folder}/reward.py]",
        "reward.custom_reward_function.name=[both,shorter]",
        "reward.weights=[1,-0.5]",
    ]
    named = ["algorithm.gdpo_reward_keys=[shorter,both]"]
    jobs["gdpo_named"] = [*jobs["gdpo"], *named]
    jobs["gdpo_weighted"] = [*jobs["gdpo"], *named, "algorithm.gdpo_reward_weights=[3,1]"]
    jobs["gdpo_missing"] = [*jobs["gdpo"], "algorithm.gdpo_reward_keys=[first,shorter]"]
    jobs["gdpo_single"] = ["algorithm.adv_estimator=gdpo"]
    jobs["gdpo_kl"] = [*jobs["gdpo"], "algorithm.use_kl_in_reward=true"]
    jobs["gdpo_counts"] = [*jobs["gdpo"], "algorithm.gdpo_reward_weights=[1]"]
    jobs["mine"] = ["algorithm.adv_estimator=my_estimator", f"model.external_lib={folder}/mine.py"]
    jobs["unknown"] = ["algorithm.adv_estimator=grop"]
    jobs["warm_up"] = [
        "algorithm.adv_estimator=gae",
        "trainer.critic_warmup=1",
        "trainer.total_training_steps=2",
    ]
    # low_var_kl is never negative, as other estimates of few tokens may be.
    kl = ["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=low_var_kl"]
    kl += ["algorithm.kl_ctrl.kl_coef=0.5"]
    jobs["kl"] = [*kl, "trainer.total_training_steps=3", "algorithm.kl_ctrl.type=adaptive"]
    jobs["kl"] += ["algorithm.kl_ctrl.horizon=16", "algorithm.kl_ctrl.target_kl=1e-4"]
    jobs["kl_loss"] = ["actor.use_kl_loss=true", "trainer.total_training_steps=2"]
    jobs["filtered"] = [
        "algorithm.filter_groups.enable=true",
        "reward.custom_reward_function.name=picky",
        "algorithm.filter_groups.max_num_gen_batches=3",
        "rollout.n=2",
    ]
    longer = [f"model.path={folder}/stopping", "data.max_response_length=2", "rollout.n=8"]
    jobs["long"], jobs["truncated"] = longer, [*longer, "algorithm.mask_truncated_completions=true"]
    jobs["truncated_twice"] = [*jobs["truncated"], "actor.ppo_epochs=2"]
    jobs["bypass"] = ["algorithm.rollout_correction.bypass_mode=true"]
    off_policy = ["rollout.top_k=20", "algorithm.sampling_replay=off"]
    jobs["off_policy"] = [*off_policy, "algorithm.rollout_correction.rollout_is=sequence"]
    jobs["rejected"] = [
        *off_policy,
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold='1e-3_1.5'",
    ]
    jobs["rejected_responses"] = [
        *off_policy,
        "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
        "algorithm.rollout_correction.rollout_rs_threshold='0.61_1.5'",
    ]
    base = small_job(folder)
    found = run_jobs(folder, [[*base, *job] for job in jobs.values()])
    return dict(zip(jobs, found, strict=True))


@pytest.mark.parametrize("name", GROUP_KERNELS)
def test_group_estimators_give_the_kernels_advantages(results, name) -> None:
    rows = results[name].rollouts["step_1"]
    rewards = torch.tensor([row["reward"] for row in rows], dtype=torch.float64)
    lengths = torch.tensor([len(row["response_ids"]) for row in rows])
    groups = torch.tensor([row["index"] for row in rows])
    wanted = group_advantage(
        rewards, groups, estimator=GROUP_KERNELS[name], lengths=lengths, backend="reference"
    )
    per_token = wanted.repeat_interleave(lengths)
    last = results[name].last
    assert last["critic/advantages/mean"] == pytest.approx(float(per_token.mean()), abs=1e-5)
    assert last["critic/advantages/max"] == pytest.approx(float(per_token.max()), abs=1e-4)
    assert last["critic/advantages/min"] == pytest.approx(float(per_token.min()), abs=1e-4)
    assert last["critic/score/mean"] == pytest.approx(float(rewards.mean()), abs=1e-6)


@pytest.mark.parametrize(
    ("job", "weights"),
    [
        ("gdpo", {"both": 1.0, "shorter": -0.5}),  # the metrics `first` and `size` do not count
        ("gdpo_named", {"shorter": -0.5, "both": 1.0}),
        ("gdpo_weighted", {"shorter": 3.0, "both": 1.0}),
    ],
)
def test_gdpo_takes_the_scores_of_the_functions_with_their_weights(results, job, weights) -> None:
    rows = results[job].rollouts["step_1"]
    lengths = torch.tensor([len(row["response_ids"]) for row in rows])
    groups = torch.tensor([row["index"] for row in rows])
    total = sum(
        weight
        * group_advantage(torch.tensor([row[name] for row in rows], dtype=torch.float64), groups)
        for name, weight in weights.items()
    )
    per_token = whiten(total.repeat_interleave(lengths))
    last = results[job].last
    assert last["critic/advantages/max"] == pytest.approx(float(per_token.max()), abs=1e-4)
    assert last["critic/advantages/min"] == pytest.approx(float(per_token.min()), abs=1e-4)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (
            "gdpo_missing",
            "'first', which is not a declared reward; the rewards of this run are both",
        ),
        ("gdpo_single", "normalises several rewards separately, and there is one"),
        ("gdpo_kl", "use_kl_in_reward is true, but algorithm.adv_estimator gdpo"),
        ("gdpo_counts", "gdpo_reward_weights has 1 numbers for the 0 names"),
    ],
)
def test_gdpo_refuses_rewards_it_does_not_have(results, job, message) -> None:
    assert message in results[job].refused


def test_every_estimator_trains(results) -> None:
    for name in ESTIMATORS:
        assert not results[name].refused, name
        assert results[name].last["actor/grad_norm"] > 0, name


def test_a_users_own_estimator_by_its_config_name(results) -> None:
    assert results["mine"].last["critic/advantages/mean"] == 0.25
    assert results["mine"].last["critic/returns/max"] == 0.5
    assert "did you mean 'grpo'" in results["unknown"].refused


def test_remax_subtracts_the_greedy_responses_reward(results) -> None:
    """A sampled response is rarely the greedy one, so the baseline is not its own reward."""
    rows, last = results["remax"].rollouts["step_1"], results["remax"].last
    lengths = [len(row["response_ids"]) for row in rows]
    returns = sum(row["reward"] * n for row, n in zip(rows, lengths, strict=True)) / sum(lengths)
    assert last["critic/returns/mean"] == pytest.approx(returns, abs=1e-6)
    baseline = last["critic/returns/mean"] - last["critic/advantages/mean"]
    assert 0 <= baseline <= 1 and baseline != pytest.approx(last["critic/score/mean"], abs=1e-4)


def test_the_critic_warms_up_alone(results) -> None:
    first, second = results["warm_up"].rows
    assert "actor/pg_loss" not in first and "training/rollout_probs_diff_mean" in first
    assert first["critic/vf_loss"] > 0 and "actor/pg_loss" in second
    assert first["critic/values/max"] == 0, "a new value head says 0"
    assert second["critic/values/max"] != 0
    for name in ("values", "update_critic"):
        assert f"timing_s/{name}" in second
    # lam = gamma = 1: the return of every token is the score of its response
    rows = results["warm_up"].rollouts["step_2"]
    assert second["critic/returns/max"] == pytest.approx(max(r["reward"] for r in rows), abs=1e-5)


def test_kl_in_the_reward_and_its_controller(results) -> None:
    rows = results["kl"].rows
    assert rows[0]["actor/reward_kl_penalty"] == 0, "policy and reference are still the same"
    coefficients = [row["actor/reward_kl_penalty_coeff"] for row in rows]
    # 16 responses a step, horizon 16: one step moves it by the whole clipped error of 20%.
    assert coefficients[:2] == pytest.approx([0.5, 0.5 * 0.8])
    assert coefficients[2] > coefficients[1], "the second step's KL is above the tiny target"
    row = rows[2]
    lengths = [len(r["response_ids"]) for r in results["kl"].rollouts["step_3"]]
    penalty = row["critic/score/mean"] - row["critic/rewards/mean"]
    # mean over responses of sum_t coef * kl_t, against coef * mean KL per token * length
    bound = coefficients[2] * row["actor/reward_kl_penalty"]
    assert min(lengths) * bound * 0.5 < penalty < max(lengths) * bound * 1.5
    assert "actor/kl_loss" not in row, "a KL in the reward is none in the loss"


def test_kl_in_the_loss(results) -> None:
    first, second = results["kl_loss"].rows
    assert first["actor/kl_loss"] == pytest.approx(0, abs=1e-6) and second["actor/kl_loss"] > 1e-4
    assert second["actor/kl_coef"] == pytest.approx(0.001) and "timing_s/ref" in second


def test_dynamic_sampling_is_bounded(results) -> None:
    last = results["filtered"].last
    rows = results["filtered"].rollouts["step_1"]
    assert len(rows) == 4 * 2
    assert 1 < last["training/num_gen_batches"] <= 3
    flat = [len({row["reward"] for row in rows[i : i + 2]}) == 1 for i in range(0, 8, 2)]
    assert sum(flat) == last["training/groups_without_signal"]


def test_truncated_responses_weigh_nothing(results) -> None:
    masked, whole = results["truncated"], results["long"]
    for name in ("prompt_ids", "response_ids", "log_probs", "reward"):
        rows = [[row[name] for row in r.rollouts["step_1"]] for r in (masked, whole)]
        assert rows[0] == rows[1], "the same responses"
    assert 0 < whole.last["response_length/clip_ratio"] < 1
    assert masked.last["critic/advantages/max"] == whole.last["critic/advantages/max"]
    assert masked.last["actor/entropy"] != pytest.approx(whole.last["actor/entropy"], rel=1e-4)
    # A mean over the tokens that are left: were they counted differently, it would not be 1.
    assert masked.last["actor/ratio_mean"] == pytest.approx(1, abs=1e-5)


def test_what_was_not_computed_is_null_and_in_no_check(results) -> None:
    """Old log-probs of the step itself are of trained tokens; those of a pass before, of all."""
    for name, is_once in (("truncated", True), ("truncated_twice", False)):
        rows, last = results[name].rollouts["step_1"], results[name].last
        assert {row["finish_reason"] for row in rows} == {"stop", "length"}
        diffs = []
        for row in rows:
            has_none = row["finish_reason"] == "length"
            for column in ("entropy", "clipped", *(["old_log_probs"] if is_once else [])):
                assert [x is None for x in row[column]] == [has_none] * len(row["response_ids"])
            assert row["advantages"] == pytest.approx([row["advantage"]] * len(row["advantages"]))
            if not (is_once and has_none):
                assert row["old_log_probs"] == pytest.approx(row["log_probs"], abs=1e-3)
            if not has_none:
                pairs = zip(row["old_log_probs"], row["log_probs"], strict=True)
                diffs += [abs(math.exp(p) - math.exp(q)) for p, q in pairs]
        assert last["training/rollout_probs_diff_mean"] == pytest.approx(fmean(diffs), rel=1e-3)
        assert last["training/rollout_probs_diff_max"] == pytest.approx(max(diffs), rel=1e-3)
    assert all("old_log_probs" not in row for row in results["bypass"].rollouts["step_1"])


def test_rollout_correction(results) -> None:
    on_policy, off, rejected = (results[n].last for n in ("grpo", "off_policy", "rejected"))
    assert on_policy["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-3)
    assert on_policy["rollout_corr/rollout_rs_masked_fraction"] == 0
    assert off["rollout_corr/kl"] > 0.1, "top-k renormalises: the engine's log-probs are higher"
    assert off["rollout_corr/rollout_is_mean"] < 0.9
    assert 0 < rejected["rollout_corr/rollout_rs_masked_fraction"] < 1
    assert "timing_s/old_log_prob" in rejected and "timing_s/old_log_prob" not in off


def test_rejected_responses_count_in_the_baseline_of_their_group(results) -> None:
    job = results["rejected_responses"]
    rows, last = job.rollouts["step_1"], job.last
    assert 0 < last["rollout_corr/rollout_rs_masked_fraction"] < 1
    rewards = torch.tensor([row["reward"] for row in rows], dtype=torch.float64)
    groups = torch.tensor([row["index"] for row in rows])
    wanted = group_advantage(rewards, groups, backend="reference")
    assert [row["advantage"] for row in rows] == pytest.approx(wanted.tolist(), abs=1e-4)
    has_values = [[x is not None for x in row["entropy"]] for row in rows]
    assert all(len({*own}) == 1 for own in has_values), "whole responses are rejected"
    assert {own[0] for own in has_values} == {True, False}
    assert all(None not in row["old_log_probs"] for row in rows)  # those of rejected ones, too
