"""Whole steps with and without shared prefixes: the same metrics, from fewer computed tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.train.in_process import run_jobs, small_job
from tests.train.sft_job import start_run, write_sft_job

pytestmark = pytest.mark.multirank

PERFORMANCE = ("perf/", "timing_s/", "reshard/")
BASE = ("trainer.total_training_steps=2", "actor.use_kl_loss=true")
JOBS = {
    "update_once": (),
    "several": (
        "actor.ppo_epochs=2",
        "actor.ppo_mini_batch_size=2",
        "algorithm.adv_estimator=gae",
    ),
    "split groups": ("actor.ppo_max_token_len_per_gpu=12",),
    "lora": ("model.lora_rank=4",),
}


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_gives_the_same_metrics(tmp_path: Path, world_size: int) -> None:
    base = small_job(tmp_path)
    names = list(JOBS) if world_size == 1 else ["several"]
    jobs = [
        [*base, *BASE, *JOBS[name], f"actor.shared_prefix={chosen}"]
        for name in names
        for chosen in ("off", "on")
    ]
    results = run_jobs(tmp_path, jobs, world_size)
    for name, off, on in zip(names, results[::2], results[1::2], strict=True):
        assert not off.refused and not on.refused, (name, off.refused, on.refused)
        for plain, shared in zip(off.rows, on.rows, strict=True):
            assert plain.keys() == shared.keys()
            assert plain["perf/shared_tokens_saved"] == 0
            assert shared["perf/shared_tokens_saved"] > 0, name
            assert shared["perf/total_num_tokens"] == plain["perf/total_num_tokens"]
            for metric, value in plain.items():
                if not metric.startswith(PERFORMANCE):
                    # float32 in another order; Adam's first step is the sign of the gradient.
                    close = pytest.approx(value, rel=2e-3, abs=2e-5)
                    assert shared[metric] == close, (name, metric, plain["step"])


def sft_steps(rank: int, world_size: int, folder: Path, overrides: dict) -> list[tuple]:
    """Without and with shared prefixes: the metrics of a step, the loss after it, saved tokens."""
    results = []
    for share in (False, True):
        run = start_run(rank, world_size, folder, **overrides)
        run.dp.shared_prefix = share
        metrics, _ = run.step(1)
        results.append((metrics, run.loss_of(run.data), run.saved.tokens))
    return results


def test_sft_on_several_answers_to_a_prompt(tmp_path: Path) -> None:
    folder = write_sft_job(tmp_path)
    rows = [
        {"prompt": f"w9 w8 w{7 + k // 4} w6", "response": f"w5 w{20 + k % 4} w{30 + k}"}
        for k in range(16)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for world_size, overrides in ((1, {}), (2, {"ulysses_sequence_parallel_size": 2})):
        for plain, shared in run_ranks(sft_steps, world_size, folder, overrides):
            assert plain[2] == 0 and shared[2] > 16
            for name in ("train/loss", "train/grad_norm", "train/num_targets"):
                assert shared[0][name] == pytest.approx(plain[0][name], rel=2e-5), name
            assert shared[1] == pytest.approx(plain[1], rel=2e-4)


def test_models_that_cannot_share(tmp_path: Path) -> None:
    """auto packs plainly and says why in the plan; on is refused."""
    from hybridengine.run.config import ConfigError, load_config
    from hybridengine.train import choices

    base = small_job(tmp_path)
    off, auto, on = (load_config(None, [*base, f"actor.shared_prefix={s}"]) for s in SWITCH)
    chosen = choices.decide(off)
    assert not chosen.prefix and chosen.reasons["prefix"] == "actor.shared_prefix is off"
    assert choices.decide(auto).prefix
    assert choices.decide(on).prefix
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choices, "shared_prefix_obstacle", lambda *_: "it has a state")
        chosen = choices.decide(auto)
        assert not chosen.prefix
        assert "cannot share prefixes: it has a state" in chosen.reasons["prefix"]
        with pytest.raises(ConfigError, match=r"actor.shared_prefix is on, but model .* a state"):
            choices.decide(on)


SWITCH = ("off", "auto", "on")
