"""What a run leaves behind: metrics, rollouts, curves, summary, phases; whole files or none."""

import io
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from hybridengine.engine.response import Response
from hybridengine.lab.diagnose.plot import draw_curves
from hybridengine.lab.validation import accuracy_interval, gain_interval
from hybridengine.run import tracking as console_lines
from hybridengine.run.config import load_sft_config
from hybridengine.run.storage import atomic_file
from hybridengine.run.tracking import LINE_WIDTH, MetricsLogger, Progress, StepLine, write_summary
from hybridengine.train import report
from hybridengine.train.data import PromptSample
from hybridengine.train.report import Reporter
from hybridengine.train.rewards.manager import Reward
from hybridengine.train.rollout_files import rollout_line
from hybridengine.train.rollouts import ScoredResponse

STEP = {"critic/score/mean": 0.25, "response_length/mean": 4.0, "timing_s/step": 9.5}


def plain_console() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=200)


def test_metrics_reach_every_sink(tmp_path):
    console = plain_console()
    loggers = ["console", "jsonl", "tensorboard"]
    with MetricsLogger(tmp_path, loggers, console, total_steps=25) as metrics:
        metrics.log(0, {"val/strict": 0.2})
        metrics.log(1, {**STEP, "actor/grad_norm": math.nan})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 0, "val/strict": 0.2}, {"step": 1, **STEP, "actor/grad_norm": None}]
    validation, step = console.file.getvalue().splitlines()
    assert validation == "step  0/25  val/strict 0.200"
    assert step == "step  1/25  reward 0.250  len 4  grad nan  9.5 s  ETA 4m"
    assert _tensorboard_value(tmp_path / "tensorboard", "critic/score/mean") == (1, 0.25)
    assert metrics.history[1]["critic/score/mean"] == 0.25


def test_the_console_shows_the_critic_skipped_updates_and_data_sources(tmp_path):
    console = plain_console()
    with MetricsLogger(tmp_path, ["console"], console, total_steps=9) as metrics:
        critic = {"critic/vf_loss": 0.5, "critic/vf_explained_var": 0.25}
        metrics.log(1, {**critic, "actor/skipped_updates": 1, "critic/skipped_updates": 1})
        metrics.log(2, {**critic, "actor/skipped_updates": 0})
        one = {"val/score": 0.5, "val-core/org/sums/reward/mean@1": 0.5}
        metrics.log(3, one)
        metrics.log(4, {**one, "val-core/b/reward/mean@1": 0.7})
        metrics.log(
            5,
            {
                "val/score": 0.5,
                "val-core/a/reward/mean@4": 0.5,
                "val-core/a/reward/best@4/mean": 0.9,
            },
        )
    assert console.file.getvalue().splitlines() == [
        "step 1/9  skipped updates 2  explained +0.25  vf loss 0.500",
        "step 2/9  explained +0.25  vf loss 0.500",
        "step 3/9  val/score 0.500",
        "step 4/9  val/score 0.500  org/sums/reward/mean@1 0.500  b/reward/mean@1 0.700",
        "step 5/9  val/score 0.500  a/reward/best@4/mean 0.900",
    ]


def _tensorboard_value(dir, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(dir))
    events.Reload()
    [scalar] = events.Scalars(name)
    return scalar.step, scalar.value


def test_only_the_named_sinks_exist(tmp_path):
    with MetricsLogger(tmp_path, ["console"], plain_console(), total_steps=1) as metrics:
        metrics.log(1, STEP)
    assert list(tmp_path.iterdir()) == []


FULL_STEP = {
    "critic/score/mean": 0.25,
    "response_length/mean": 84.2,
    "actor/entropy": 0.512,
    "actor/pg_loss": 0.01,
    "actor/grad_norm": 0.35,
    "actor/skipped_updates": 0,
    "training/rollout_probs_diff_mean": 0.001,
    "timing_s/gen": 6.2,
    "timing_s/update_actor": 2.5,
    "timing_s/update_weights": 0.1,
    "timing_s/step": 10.0,
    "perf/total_num_tokens": 51_234,
}


def test_the_line_of_a_step_has_phases_rate_and_time_left(monkeypatch):
    now = iter([100.0, 112.0])  # a step takes 10 s, validation and saves 2 s more
    monkeypatch.setattr(console_lines.time, "monotonic", lambda: next(now))
    line = StepLine(total_steps=700)
    assert line.format(11, FULL_STEP) == (
        "step  11/700  reward 0.250  len 84  entropy 0.51  10.0 s  gen 62% update 25%  5.1k tok/s  "
        "ETA 1h55m"
    )
    assert line.format(12, FULL_STEP).endswith("  ETA 2h18m")


@pytest.mark.parametrize("width", [60, 80, LINE_WIDTH])
def test_a_line_never_exceeds_its_width(width):
    sources = {f"val-core/source_{k}/reward/mean@4": 0.5 for k in range(9)}
    many = {f"timing_s/a_phase_with_a_long_name_{k}": 3.0 for k in range(3)}
    long = {"critic/score/mean": -12345.678, "actor/skipped_updates": 12}
    line = StepLine(total_steps=10_000, width=width)
    for values in (FULL_STEP, {"val/score": 0.5, **sources}, FULL_STEP | many | long):
        text = line.format(9_999, values)
        assert len(text) <= width
    assert "reward -12345.678" in text and "skipped updates 12" in text


def test_the_time_of_a_save_has_no_line():
    assert StepLine(9).format(1, {"timing_s/save_checkpoint": 1.5}) == ""


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m"),
        (3569, "59m"),
        (3571, "1h00m"),
        (86_280, "23h58m"),
        (270_000, "3d03h"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds, text):
    assert console_lines.duration_text(seconds) == text


@pytest.mark.parametrize(
    "number, text",
    [(0.3, "0"), (999.4, "999"), (999.6, "1.0k"), (9_960, "10k"), (1.25e6, "1.2M"), (4e9, "4G")],
)
def test_a_rate_has_three_digits(number, text):
    assert console_lines.short_number(number) == text


def test_a_log_file_has_no_progress_bar():
    console = plain_console()
    with Progress(2, console=console) as progress:
        progress.enter("gen", 1)
        progress.finish_step()
    assert console.file.getvalue() == ""


def test_progress_on_a_terminal_shows_phase_and_steps():
    console = Console(file=io.StringIO(), force_terminal=True, width=200)
    with Progress(3, console=console) as progress:
        progress.enter("gen", 1)
        progress.finish_step()
        progress.enter("update_actor", 2)
    shown = console.file.getvalue()
    assert "step 2 update_actor" in shown and "1/3" in shown


SAMPLE = PromptSample(7, [5, 6], "1 + 1 =", "sums", "2", {})


def rollout(texts=(), versions=(), **extras):
    response = Response([9, 2], [-0.5, -0.25], "stop", versions)
    return ScoredResponse(response, text=" 2", reward=Reward(1.0, extras, texts=dict(texts)))


def test_rollouts_keep_the_generated_ids():
    [line] = rollout_line(SAMPLE, rollout(strict=1.0)).splitlines()
    assert json.loads(line) == {
        "index": 7,
        "data_source": "sums",
        "prompt": "1 + 1 =",
        "response": " 2",
        "ground_truth": "2",
        "reward": 1.0,
        "strict": 1.0,
        "finish_reason": "stop",
        "weight_version": 0,
        "prompt_ids": [5, 6],
        "response_ids": [9, 2],
        "log_probs": [-0.5, -0.25],
    }


def test_rollouts_have_texts_of_the_reward_and_the_advantage():
    told = replace(rollout({"pred": "2", "response": "a"}, acc=1.0), advantage=-0.5)
    row = json.loads(rollout_line(SAMPLE, told))
    assert (row["acc"], row["pred"], row["advantage"]) == (1.0, "2", -0.5)
    assert (row["response"], row["reward/response"]) == (" 2", "a")


def test_rollouts_of_several_weight_versions_have_them_by_token():
    [line] = rollout_line(SAMPLE, rollout(versions=[(4, 1), (5, 1)])).splitlines()
    row = json.loads(line)
    assert (row["weight_version"], row["weight_versions"]) == (4, [[4, 1], [5, 1]])


def test_atomic_file_keeps_the_old_one_on_failure(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_file(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert [f.read_text() for f in tmp_path.iterdir()] == ["old"]


OVERLAPPED = {
    "trainer/idle_ratio": 0.2,
    "rollouter/idle_ratio": 0.3,
    "fully_async/trajectory_staleness/max": 1.0,
    "fully_async/queue_size": 4.0,
}
CRITIC_RANKS = {"actor/idle_ratio": 0.2, "critic/idle_ratio": 0.3}


@pytest.mark.parametrize(
    "history",
    [
        [],
        [{"step": 0, "val/strict": 0.2}, {"step": 1, **STEP, "timing_s/gen": 4.0}],
        [{"step": 1, **STEP, **OVERLAPPED}],
        [{"step": 1, **STEP, **CRITIC_RANKS}],
        [{"step": 1, **STEP, **OVERLAPPED, **CRITIC_RANKS}],
        [{"step": 0, "val/loss": 2.5}, {"step": 1, "train/loss": 2.0, "timing_s/step": 1.0}],
    ],
)
def test_curves_are_drawn(tmp_path, history):
    draw_curves(history, tmp_path, title="t")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 1


def test_curves_are_redrawn_in_a_hundredth_of_the_time(tmp_path, monkeypatch):
    now, drawings = 0.0, []

    def plot(*args):
        nonlocal now
        now += 2.0
        drawings.append(now)

    drawing = SimpleNamespace(load=lambda: plot)
    monkeypatch.setattr(report, "plugins", lambda group: {"curves": drawing})
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=lambda: now))
    job = ["model.path=m", "data.train_files=t.jsonl", f"trainer.default_local_dir={tmp_path}"]
    config = load_sft_config(None, [*job, "trainer.logger=[jsonl]"])
    with Reporter(config, SimpleNamespace(is_main=True, step=0), 1000, 0) as reporter:
        while now < 1000:
            now += 1.0
            reporter.draw(if_due=True)
    assert drawings == [12, 214, 416, 618, 820]


def test_summary_is_valid_json(tmp_path):
    write_summary(tmp_path / "summary.json", {"seconds": 1.5, "bad": math.nan, "steps": 3})
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "seconds": 1.5,
        "bad": None,
        "steps": 3,
    }


def test_accuracy_interval_matches_published_values():
    # Newcombe 1998, table I, score method without continuity correction.
    for successes, n, low, high in [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)]:
        assert accuracy_interval(successes / n, n) == pytest.approx((low, high), abs=5e-5)
    assert accuracy_interval(0.0, 20)[0] == 0.0


def test_gain_interval_pairs_the_problems():
    assert gain_interval([0, 0, 1], [1, 1, 1])[0] == pytest.approx(2 / 3)
    mean, low, high = gain_interval([0.0] * 50 + [1.0] * 50, [1.0] * 100)
    assert mean == 0.5
    assert high - mean == pytest.approx(1.96 * math.sqrt(0.25 * 100 / 99 / 100), rel=1e-4)
    assert low == pytest.approx(2 * mean - high)


def test_a_resumed_run_keeps_what_can_be_read(tmp_path):
    rows = [
        b'{"step": 1, "a": 0.5}',
        b'{"step": 2, "a": nul}',
        b"\0\0\0}",
        b"[1]",
        b'{"a": 1}',
        b'{"step": 3, "a": 1.5}',
        b'{"step": 4, "a": 2.5}',
        b'{"step": 5, "\xe2',
    ]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(rows))
    with MetricsLogger(tmp_path, ["jsonl"], plain_console(), 9, first_step=3) as metrics:
        metrics.log(4, {"a": 3.0})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "a": 0.5}, {"step": 3, "a": 1.5}, {"step": 4, "a": 3.0}]
    assert metrics.history == lines
