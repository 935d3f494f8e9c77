"""Problems found in metrics, and runs compared in a picture."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hybridengine import cli
from hybridengine.lab.diagnose.findings import THRESHOLDS, LoggedRun, find_problems, phases_of
from hybridengine.lab.diagnose.plot import curve_of, same_settings, val_interval
from hybridengine.lab.keys import key_reference
from hybridengine.lab.parity.compare import SAMPLING, Finding, Report

HEALTHY = {
    "critic/score/mean": lambda s: 0.3 + 0.01 * s,
    "val/score": lambda s: 0.3 + 0.01 * s,
    "actor/entropy": lambda s: 1.0 - 0.01 * s,
    "actor/pg_clipfrac": lambda s: 0.02,
    "actor/skipped_updates": lambda s: 0.0,
    "response_length/mean": lambda s: 100.0,
    "response_length/max": lambda s: 200.0,
    "response_length/clip_ratio": lambda s: 0.01,
    "training/rollout_probs_diff_mean": lambda s: 0.001,
    "rollout_corr/rollout_is_clipped_fraction": lambda s: 0.0,
    "moe/dead_experts": lambda s: 0.3,
    "frac_reward_zero_std": lambda s: 0.1,
    "perf/cpu_memory_used_gb": lambda s: 4.0,
    "reshard/ms": lambda s: 30.0,
    "reshard/bytes_sent": lambda s: 2.0**20,
    "trainer/idle_ratio": lambda s: 0.1,
    "timing_s/step": lambda s: 10.0,
    "timing_s/gen": lambda s: 6.0,
    "timing_s/update_actor": lambda s: 3.0,
    "timing_s/update_weights": lambda s: 0.75,
}
SICK = {  # subject: what is logged instead
    "communication": {"timing_s/update_weights": lambda s: 3.0},
    "imbalance": {"trainer/idle_ratio": lambda s: 0.5},
    "weight sync": {"reshard/ms": lambda s: 900.0 if s == 9 else 30.0},
    "memory": {"perf/cpu_memory_used_gb": lambda s: 4.0 + 0.1 * s},
    "mismatch": {"training/rollout_probs_diff_mean": lambda s: 0.03},
    "entropy collapse": {"actor/entropy": lambda s: math.exp(-s / 3)},
    "reward hacking or overfitting": {"val/score": lambda s: 0.5 - 0.01 * s},
    "expert collapse": {"moe/dead_experts": lambda s: 0.02 * s},
    "no signal": {"frac_reward_zero_std": lambda s: 0.9},
    "length": {"response_length/clip_ratio": lambda s: 0.4},
    "length drift": {"response_length/mean": lambda s: 60.0 + 9 * s},
    "updates": {"actor/skipped_updates": lambda s: float(s == 4)},
}


def write_run(folder: Path, name: str = "grpo", seed: int = 1, lr: float = 1e-6, **metrics) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(
        f"seed: {seed}\nactor: {{optim: {{lr: {lr}}}}}\n"
        f"trainer: {{experiment_name: {name}, default_local_dir: {folder}}}\n"
    )
    rows = [{"step": s, **{n: of(s) for n, of in metrics.items()}} for s in range(1, 21)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_healthy_run_has_no_problem(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", **HEALTHY)
    assert find_problems(LoggedRun(run)) == []
    result = CliRunner().invoke(cli.app, ["diagnose", str(run)])
    assert result.exit_code == 0 and "no problem" in result.output
    assert [(p.name, p.seconds, p.is_communication) for p in phases_of(LoggedRun(run))] == [
        ("gen", 6.0, False),
        ("update_actor", 3.0, False),
        ("update_weights", 0.75, True),
        ("other", 0.25, False),
    ]


@pytest.mark.parametrize("subject", SICK)
def test_a_problem_is_found_alone(tmp_path: Path, subject: str) -> None:
    run = LoggedRun(write_run(tmp_path / "run", **HEALTHY | SICK[subject]))
    [problem] = find_problems(run)
    assert problem.subject == subject and problem.text and problem.advice
    assert {*problem.keys} <= {key.name for key in key_reference("grpo")}


def test_a_short_or_broken_log(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", **HEALTHY)
    file = run / "metrics.jsonl"
    file.write_text(file.read_text().splitlines()[0] + '\n{"step": 2, "critic/sc')
    assert len(LoggedRun(run).rows) == 1 and find_problems(LoggedRun(run)) == []
    file.write_text("")
    for command in (["diagnose", str(run)], ["plot", str(run)], ["diagnose", str(tmp_path)]):
        assert CliRunner().invoke(cli.app, command).exit_code == 2


def test_every_threshold_is_documented() -> None:
    text = (Path(__file__).parents[4] / "docs" / "lab.md").read_text()
    assert [name for name in THRESHOLDS if f"`{name}`" not in text] == []


def test_seeds_are_one_line_with_a_band(tmp_path: Path) -> None:
    rising = {"critic/score/mean": lambda s: 0.1 * s}
    runs = [
        write_run(tmp_path / "a1", "a", 1, **rising),
        write_run(tmp_path / "a2", "a", 2, **{"critic/score/mean": lambda s: 0.3 * s}),
        write_run(tmp_path / "b", "b", 1, 2e-6, **rising),
    ]
    logged = [LoggedRun(run) for run in runs]
    groups = same_settings(logged)
    assert {label: len(group) for label, group in groups.items()} == {"a, 2 seeds": 2, "b": 1}
    curve = curve_of(logged[:2], "critic/score/mean")
    assert curve.steps == [*range(1, 21)] and curve.means[9] == pytest.approx(2.0)
    assert curve.deviations[9] == pytest.approx(2.0**0.5)  # of 1 and 3
    out = tmp_path / "out.png"
    result = CliRunner().invoke(cli.app, ["plot", *map(str, runs), "--out", str(out)])
    assert result.exit_code == 0 and out.read_bytes().startswith(b"\x89PNG")


def test_a_validation_has_the_interval_of_its_problems(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", **HEALTHY)
    (run / "rollouts").mkdir()
    rows = [  # three problems with means 0, 0.5 and 1
        {"index": k // 2, "reward": reward, "strict": reward > 0.5, "note": "text"}
        for k, reward in enumerate((0.0, 0.0, 0.0, 1.0, 1.0, 1.0))
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "rollouts" / "val_10.jsonl").write_text(text)
    logged, half = LoggedRun(run), pytest.approx(1.96 * 0.5 / 3**0.5)
    assert val_interval(logged, "val/score", 10) == val_interval(logged, "val/strict", 10) == half
    nothing = [("val/score", 11), ("val/note", 10), ("val-core/toy/acc/mean@1", 10)]
    assert [val_interval(logged, *of) for of in nothing] == [0.0] * 3


def test_same_name_with_other_settings_is_another_line(tmp_path: Path) -> None:
    runs = [LoggedRun(write_run(tmp_path / f"r{lr}", "a", lr=lr)) for lr in (1e-6, 2e-6)]
    assert len(same_settings(runs)) == 2


def test_an_unknown_metric_names_similar_ones(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", **HEALTHY)
    result = CliRunner().invoke(cli.app, ["plot", str(run), "--metric", "score"])
    assert result.exit_code == 2 and "critic/score/mean" in result.output


@pytest.mark.parametrize(
    ("report", "correction", "problems"),
    [
        (Report(None, (), {"a": 0.0, "b": 0.0}, num_tokens=8), "none is needed", 0),
        (
            Report(None, (), {"a": 0.0, "b": 3e-4}, 0.3, 0.1, 0.01, 1.3, 8),
            "weights by token hold",
            0,
        ),
        (
            Report(Finding("b", 0.4, "another scale"), (), {"b": 0.4}, 2.0, 0.5, 0.4, 7.0, 8),
            "with score centering",
            1,
        ),
        (
            Report(Finding(SAMPLING, 0.4, "before temperature"), (), {}, 2.0, 0.5, 0.4, 7.0, 8),
            "none holds",
            1,
        ),
    ],
    ids=["equal", "rounding", "truncated", "sampling"],
)
def test_a_run_says_how_far_from_exact_it_is(
    tmp_path: Path, report: Report, correction: str, problems: int
) -> None:
    """What `hybridengine parity` has written to the run's folder."""
    run = write_run(tmp_path / "run", **HEALTHY)
    report.write(run)
    found = find_problems(LoggedRun(run))
    assert len(found) == problems and all(correction in f.advice for f in found)
    if problems:
        assert report.finding is not None and report.finding.cause in found[0].text
    output = " ".join(CliRunner().invoke(cli.app, ["diagnose", str(run)]).output.split())
    point, difference = report.first_inexact or ("none", 0.0)
    assert f"not equal bit for bit: {point} ({difference:.1e})" in output
    assert correction in output and f"largest ratio {report.largest_ratio:g} of 8 tokens" in output
    assert correction in str(report)
