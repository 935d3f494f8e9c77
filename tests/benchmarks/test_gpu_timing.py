"""Timing on a GPU, resumed runs and rows of baselines that fail, with a GPU that is acted."""

import json

import pytest
import torch

from benchmarks import _gpu
from benchmarks._bench import GPU_LOST, OURS, Bench, Check
from benchmarks._gpu import REPEATS, Samples, time_call
from benchmarks._results import UNFINISHED
from tools import gpu_report

FLUSH_MS = 0.05


class ActedGpu:
    """Device times are what calls report: a call returns its milliseconds."""

    def __init__(self, waits=False, fails_in_capture=False, host_ms=0.3):
        self.waits, self.fails_in_capture, self._host_ms = waits, fails_in_capture, host_ms
        self.flushes = 0

    lost = False

    def answers(self):
        return not self.lost

    def warm_up(self, call):
        call()

    run = warm_up

    def flush(self):
        self.flushes += 1
        self.clock += FLUSH_MS

    def elapsed_ms(self, call):
        self.clock = 0.0
        return (call() or 0.0) + self.clock

    def host_ms(self, call):
        call()
        return self._host_ms

    def why_not_captured(self, call):
        return "not captured: called .item()" if self.waits else ""

    def capture(self, call):
        if self.fails_in_capture:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

        def replay():
            return sum(call() or 0.0 for _ in range(REPEATS))

        return replay

    def peak_mib(self, call):
        return 0.0

    def state(self):
        return {"clocks.sm": "1980 MHz"}


def test_a_short_call_is_replayed_and_the_flushes_are_taken_off(monkeypatch):
    gpu = ActedGpu()
    calls = []

    def call():
        calls.append(None)
        gpu.clock = getattr(gpu, "clock", 0.0) + 0.01

    samples = time_call(gpu, call, 0.0)
    assert samples.timing == "graph" and samples.host_ms == 0.3
    assert samples.ms == pytest.approx([0.01] * 5)
    assert len(calls) == 5 + 3 + 5 * REPEATS  # host time, event time, replays
    assert gpu.flushes == 2 * 5 * REPEATS


def test_a_long_call_and_one_that_cannot_be_captured_are_timed_by_events():
    assert time_call(ActedGpu(), lambda: 3.0, 0.0) == Samples([3.0] * 5, 0.3, "events")
    waiting = time_call(ActedGpu(waits=True), lambda: 0.02, 0.0)
    assert waiting == Samples([0.02] * 5, 0.3, "events: not captured: called .item()")
    failing = time_call(ActedGpu(fails_in_capture=True), lambda: 0.02, 0.0)
    assert failing.ms == [0.02] * 5
    assert failing.timing.endswith("operation not permitted when stream is capturing")


def test_a_call_that_waits_for_its_host_is_replayed():
    def call():
        gpu.clock = getattr(gpu, "clock", 0.0) + 3.0

    gpu = ActedGpu(host_ms=2.0)
    assert time_call(gpu, call, 0.0).timing == "graph"
    gpu = ActedGpu(host_ms=1.0)
    assert time_call(gpu, call, 0.0).timing == "events"


def acted_bench(tmp_path, resume=False):
    bench = Bench("cpu", quick=True)
    bench.gpu, bench.budget_s = ActedGpu(), 0.0
    bench.results.open(tmp_path / "gpu.json", {"device": "acted", "commit": "1"}, resume)
    return bench


def compare(bench, **calls):
    bench.compare("op", "forward", "T=1", torch.float32, calls, bytes_moved=8_000_000)
    return json.loads((bench.results.path).read_text())["rows"]


def test_a_row_has_the_spread_and_how_it_was_timed(tmp_path):
    row, other = compare(acted_bench(tmp_path), **{OURS: lambda: 2.0, "peer": lambda: 4.0})
    assert row["ms_p20"] == row["ms_min"] == row["ms_max"] == row["ms_p50"] == 2.0
    assert row["gb_per_s"] == 4.0 and row["timing"] == "events" and row["host_ms"] == 0.3
    assert row["ratio_to_best_peer"] == 2.0 and other["ratio_to_best_peer"] is None


def test_a_baseline_that_raises_has_a_row_with_the_reason_and_ours_raises(tmp_path):
    def broken():
        raise ValueError("needs another driver\nat line 3")

    rows = compare(acted_bench(tmp_path), **{OURS: lambda: 2.0, "peer": broken, "good": lambda: 4})
    assert rows[1]["note"] == "ValueError: needs another driver" and rows[1]["ms_p50"] is None
    assert rows[0]["ratio_to_best_peer"] == 2.0
    with pytest.raises(ValueError, match="another driver"):
        compare(acted_bench(tmp_path), **{OURS: broken})


def test_a_killed_run_keeps_its_rows_and_is_resumed(tmp_path):
    def killed():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(acted_bench(tmp_path), **{OURS: lambda: 2.0, "peer": killed})
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [row["impl"] for row in rows] == [OURS]

    def again():
        raise AssertionError("measured twice")

    resumed = acted_bench(tmp_path, resume=True)
    rows = compare(resumed, **{OURS: again, "peer": lambda: 8.0})
    assert [row["impl"] for row in rows] == [OURS, "peer"]
    assert rows[0]["ms_p50"] == 2.0 and rows[0]["ratio_to_best_peer"] == 4.0
    assert resumed.rows == rows


def test_a_run_of_several_rows_is_repeated_unless_its_last_one_is_there(tmp_path):
    bench = acted_bench(tmp_path)
    for impl, passes in {"a": ("forward", "step"), "b": ("forward",)}.items():
        for name in passes:
            bench.add("op", name, impl, "T=1", dtype="float32", ms_p50=1.0)
    resumed = acted_bench(tmp_path, resume=True)
    kept = [resumed.results.keep({"pass": "step"}, op="op", impl=impl) for impl in "ab"]
    assert kept == [True, False]
    assert [(row["impl"], row["pass"]) for row in resumed.rows] == [("a", "forward"), ("a", "step")]


def test_another_commit_and_a_fresh_run_start_over(tmp_path):
    compare(acted_bench(tmp_path), **{OURS: lambda: 2.0})
    fresh = acted_bench(tmp_path)
    fresh.results.save()
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"] == []
    compare(fresh, **{OURS: lambda: 2.0})
    other = Bench("cpu", quick=True)
    other.results.open(tmp_path / "gpu.json", {"device": "acted", "commit": "2"}, True)
    other.results.save()
    assert json.loads((tmp_path / "gpu.json").read_text())["rows"] == []


def test_peaks_are_measured_once_and_states_are_kept(tmp_path, monkeypatch):
    bench = acted_bench(tmp_path)
    bench.log_state("op", "before")
    monkeypatch.setattr(bench, "copy_peak", lambda _: 4000.0)
    assert bench.peak("copy", torch.float32) == 4000.0
    monkeypatch.setattr(bench, "copy_peak", lambda _: 1.0)
    assert bench.peak("copy", torch.bfloat16) == 4000.0
    bench.results.finished.append("op")
    bench.results.save()
    resumed = acted_bench(tmp_path, resume=True).results
    assert resumed.peaks == {"copy": 4000.0} and resumed.finished == ["op"]
    assert resumed.states == [{"op": "op", "when": "before", "clocks.sm": "1980 MHz"}]


def test_an_unanswered_nvidia_smi_gives_no_state(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(
        _gpu.torch.cuda, "get_device_properties", lambda _: type("", (), {"uuid": "1-2"})
    )
    gpu = _gpu.Gpu.__new__(_gpu.Gpu)
    gpu.device = torch.device("cuda")
    assert gpu.state() == {}


def test_a_baseline_with_a_wrong_result_is_not_the_best_one(tmp_path, capsys):
    def fails():
        raise ValueError("changed")

    right, ones = [torch.arange(1.0, 4.0).double()], torch.ones(3)
    results = {
        "rounded": lambda: (right[0].bfloat16(),),
        "wrong": lambda: (ones,),
        "nan": lambda: (ones * torch.nan,),
        "fails": fails,
    }
    bench = acted_bench(tmp_path)
    names = [OURS, "unchecked", *results]
    calls = {name: lambda ms=ms: ms for name, ms in zip(names, (2, 9, 4, 1, 1, 1), strict=True)}
    options = {"bytes_moved": 8_000_000, "check": Check(results, right)}
    bench.compare("op", "forward", "T=1", torch.float32, calls, **options)
    rows = {row["impl"]: row for row in bench.rows}
    assert rows[OURS]["ratio_to_best_peer"] == 2.0
    assert rows["wrong"]["ms_p50"] == 1 and "relative error of 6.0e-01" in rows["wrong"]["wrong"]
    assert "nan" in rows["nan"]["wrong"] and "wrong" not in rows["rounded"]
    assert rows["fails"]["note"] == "ValueError: changed"
    assert "wrong is wrong: result 0" in capsys.readouterr().out


def test_a_baseline_that_ends_its_process_or_breaks_the_gpu_is_not_run_again(tmp_path):
    def breaks():
        bench.gpu.lost = True
        raise RuntimeError("an illegal memory access")

    def killed():
        raise SystemExit(139)

    def again():
        raise AssertionError("run twice")

    bench = acted_bench(tmp_path)
    with pytest.raises(SystemExit) as ended:
        compare(bench, **{OURS: lambda: 2.0, "peer": breaks, "last": again})
    assert ended.value.code == GPU_LOST == gpu_report.GPU_LOST
    bench = acted_bench(tmp_path, resume=True)
    with pytest.raises(SystemExit):
        compare(bench, **{OURS: again, "peer": again, "last": killed})
    rows = compare(
        acted_bench(tmp_path, resume=True), **{OURS: again, "peer": again, "last": again}
    )
    assert [row.get("note") for row in rows] == [
        *(None, "RuntimeError: an illegal memory access", UNFINISHED)
    ]
