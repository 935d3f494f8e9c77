"""`hybridengine tune`: sizes are found without running one that does not fit."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from hybridengine import cli
from hybridengine.engine.vllm.environment import vllm_available
from hybridengine.lab.tune.jobs import PeakMemory, Probe, best_limit, probe_limits, smallest_fast
from hybridengine.run.config import load_config, load_sft_config
from tests.forked import run_forked
from tests.ranks import run_ranks
from tests.train.in_process import small_job
from tests.train.sft_job import sft_settings, write_sft_job


@given(
    shortest=st.integers(8, 4096),
    factor=st.integers(1, 64),
    fixed=st.floats(0, 1e9),
    per_token=st.floats(1, 1e5),
    allowed=st.floats(1e6, 1e10),
)
def test_only_sizes_that_fit_are_tried(shortest, factor, fixed, per_token, allowed):
    """Memory grows linearly: every probe but the first fits, and the last is nearly the largest."""

    def measure(limit: int) -> Probe:
        return Probe(limit, fixed + per_token * limit, 1.0)

    longest = shortest * factor
    probes = list(probe_limits(shortest, longest, allowed, measure))
    assert probes[0].limit == shortest
    assert all(probe.memory <= allowed * (1 + 1e-9) for probe in probes[1:])
    last, largest = probes[-1].limit, (allowed - fixed) / per_token
    assert len(probes) == 1 or last == longest or last * 1.25 + 256 >= min(largest, longest)


def test_the_smallest_of_the_fastest_sizes_is_chosen() -> None:
    probes = [Probe(256, 1.0, 70.0), Probe(512, 2.0, 98.0), Probe(1024, 3.0, 100.0)]
    assert smallest_fast(probes).limit == 512
    assert best_limit(probes, 1.5) == probes[0]
    assert best_limit(probes, 0.5) is None


def test_the_peak_is_that_since_the_restart() -> None:
    memory = PeakMemory(torch.device("cpu"), 1)
    memory.restart()
    before = memory.peak
    touched = np.ones(64 << 20, dtype=np.uint8)
    assert memory.peak >= before + 60 * 2**20
    del touched
    memory.restart()
    assert memory.peak < before + 60 * 2**20
    assert memory.allowed > before


def tune(kind: str, job: list[str]) -> list[str]:
    """Return the lines that `hybridengine tune` prints."""
    command = [sys.executable, "-m", "hybridengine", "tune", kind, *job]
    done = run_forked(command)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line.strip() for line in done.stdout.splitlines()]


@pytest.mark.multirank
def test_the_overrides_of_a_job(tmp_path: Path) -> None:
    job = [*small_job(tmp_path), "trainer.n_gpus_per_node=2"]
    lines = tune("grpo", job)
    probed = [line for line in lines if line.startswith("actor.ppo_max_token_len_per_gpu=")]
    limits = [int(line.split("=")[1].split(":")[0]) for line in probed[:-1]]
    assert limits == [10, 20, 40, 80]  # of the longest sequence, to all tokens of a rank
    overrides = lines[-1].split()
    config = load_config(None, [*job, *overrides])
    assert config.actor.ppo_max_token_len_per_gpu in limits
    assert config.reshard.bucket_mib == 16  # which holds the whole model
    assert not (tmp_path / "run").exists()  # nothing is written


# What rejects, masks or clips rollouts, and what needs more of a reward than its score.
HARD = {
    "rejection": [
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.5_2.0",
        "algorithm.mask_truncated_completions=true",
        "actor.ppo_mini_batch_size=2",
    ],
    "critic": ["algorithm.adv_estimator=gae"],
    "parts": ["algorithm.adv_estimator=gdpo"],
    "filter": ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=even"],
}
if vllm_available():  # last: a closed engine takes the process group along
    HARD["exact"] = ["rollout.name=vllm", "rollout.kv_cache_gib=0.01", "rollout.exact=on"]


def step_on_made_up_tokens(
    rank: int, world_size: int, folder: Path, jobs: dict[str, list[str]]
) -> dict[str, dict[str, float]]:
    from hybridengine.lab.tune.jobs import RLJob
    from hybridengine.run.session import PhaseStatus, Session

    metrics = {}
    for name, settings in jobs.items():
        job = RLJob(load_config(None, settings), Session(PhaseStatus(folder / "run", rank)))
        job.session.on_phase = lambda phase: None
        job.train_on(job.longest)
        metrics[name], _ = job.step(2)
        job.close()
    return metrics


@pytest.mark.multirank
def test_made_up_tokens_are_trained_on_as_sampled_ones(tmp_path: Path) -> None:
    """Their log-probs are the trainer's: nothing is rejected, rollout.exact agrees."""
    base = small_job(tmp_path)
    jobs = {name: [*base, *settings] for name, settings in HARD.items()}
    [metrics] = run_ranks(step_on_made_up_tokens, 1, tmp_path, jobs, timeout_s=400)
    for of_job in metrics.values():
        assert of_job["training/rollout_probs_diff_max"] == 0
        assert of_job["rollout_corr/rollout_rs_masked_fraction"] == 0
        assert of_job["actor/grad_norm"] > 0


@pytest.mark.multirank
def test_the_overrides_of_sft(tmp_path: Path) -> None:
    job = sft_settings(write_sft_job(tmp_path))
    [override] = tune("sft", job)[-1].split()
    config = load_sft_config(None, [*job, override])
    assert override.startswith("data.max_token_len_per_gpu=")
    assert config.data.max_token_len_per_gpu >= 1


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("trainer.nnodes=2", "trainer.nnodes is 2"),
        ("rollout.servers=[http://127.0.0.1:1]", "rollout.servers=[]"),
    ],
)
def test_jobs_that_are_refused(tmp_path: Path, setting: str, words: str) -> None:
    job = [s for s in small_job(tmp_path) if not s.startswith("rollout.name")]
    result = CliRunner().invoke(cli.app, ["tune", "grpo", *job, setting])
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())
