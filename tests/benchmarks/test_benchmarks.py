"""Every benchmark of an operator runs at small shapes and fills its rows; nothing is timed."""

import importlib
import sys
import time

import pytest
import torch

from benchmarks import _baselines, host, micro_batch, step, vllm_start
from benchmarks._bench import KEYS, OURS, Bench, OutOfTime
from benchmarks.isa import LIMITS, is_limited
from tools import gpu_probe

OPERATORS = (
    "advantage",
    "attention",
    "balance",
    "block_quantize",
    "causal_conv1d",
    "decode_linear",
    "delta_ops",
    "distillation",
    "exact_operators",
    "grouped_linear",
    "head_share",
    pytest.param("linear", marks=pytest.mark.slow),
    "linear_cross_entropy",
    "linear_recurrence",
    "logprob",
    "orthogonalize",
    "packing",
    "paged_attention",
    "policy_loss",
    "sampling",
    "shared_prefix",
    "strided_copy",
)


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setattr(_baselines, "is_limited", lambda: True)  # compiling takes minutes
    monkeypatch.setattr(Bench, "peak", lambda *_: 1.0)
    bench = Bench("cpu", quick=True)
    bench.budget_s = 0.0
    return bench


@pytest.mark.parametrize("op", OPERATORS)
def test_a_benchmark_runs(op, bench):
    importlib.import_module(f"benchmarks.{op}").run(bench)
    assert {row["impl"] for row in bench.rows} & {OURS}
    for row in bench.rows:
        assert row.keys() - {"note"} == set(KEYS)
        assert ("note" in row) == (row["ms_p50"] is None)
        assert not row["impl"].startswith("compile") or "note" in row


def test_launches_are_counted_and_few(bench, tmp_path):
    bench.results.open(tmp_path / "host.json", {"commit": "1"}, False)
    host.run(bench)
    of_ours = {(row["op"], row["pass"]): row for row in bench.rows if row["impl"] == OURS}
    assert of_ours["rms_norm", "fwd"]["launches"] == of_ours["strided_copy", "fwd"]["launches"] == 1
    assert of_ours["linear_policy_loss", "fwd+bwd"]["launches"] <= 25
    layers = {row["impl"]: row["launches"] for row in bench.rows if row["op"] == "micro_batch"}
    assert layers[f"{OURS}_policy_loss"] < 1.3 * layers["transformers"]
    assert layers[f"{OURS}_policy_loss_graphs"] <= 55
    assert all(row["ms_p50"] > 0 and row.keys() == set(KEYS) for row in bench.rows)
    resumed = Bench("cpu", quick=True)
    resumed.results.open(tmp_path / "host.json", {"commit": "1"}, True)
    resumed.op_end = 0.0  # a row that was measured again would raise OutOfTime
    host.run(resumed)
    assert resumed.rows == bench.rows


@pytest.mark.exhaustive
@pytest.mark.multirank
def test_the_part_of_the_gpu_report_with_vllm_runs_on_a_cpu():
    pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    from benchmarks import engine

    bench = Bench("cpu", quick=True)
    engine.run(bench)
    checked = [row["shape"] for row in bench.rows if row["pass"] == "check"]
    assert len(checked) == len(engine.TP_SIZES) * len(engine.ON_CPU)


TRAINER = """
import json, pathlib, sys, time, yaml
folder = pathlib.Path(yaml.safe_load(open(sys.argv[1]))["trainer"]["default_local_dir"])
folder.mkdir()
with (folder / "metrics.jsonl").open("w", buffering=1) as file:
    for seconds in (9, 2, 3):
        times = {"timing_s/step": seconds, "timing_s/update_actor": 1}
        row = json.dumps({**times, "perf/throughput": 10, "perf/mfu/actor": 0.5})
        file.write(row[:20])
        time.sleep(1.5)
        file.write(row[20:] + chr(10))
    sys.exit(3)
"""


def test_steps_are_rows_before_their_run_ends(bench, monkeypatch):
    monkeypatch.setattr(step, "COMMAND", ("-c", TRAINER))
    monkeypatch.setattr(step, "IMPLEMENTATIONS", {"on a GPU": {}, OURS: {}})
    seen = []
    monkeypatch.setattr(bench.results, "save", lambda: seen.append([*bench.rows]))
    with pytest.raises(AssertionError, match=f"runs that failed: {OURS}"):
        step.run(bench)
    of_step = [row for rows in seen for row in rows if row["pass"] == "step"]
    assert [(row["steps"], row["ms_p50"]) for row in of_step] == [(0, 9e3), (1, 2e3), (2, 2.5e3)]
    assert {row["steps"] for row in bench.rows} == {2} and len(bench.rows) == 2


def test_a_training_micro_batch_runs_in_every_form(bench, monkeypatch):
    forms = {name: form for name, form in micro_batch.FORMS.items() if form.keys() <= {"fsdp2"}}
    monkeypatch.setattr(micro_batch, "FORMS", forms)
    micro_batch.run(bench)
    got = {(row["impl"], row["pass"]) for row in bench.rows if "note" not in row}
    passes = ("fwd+bwd", "optimizer")
    assert got == {(impl, p) for impl in ("transformers", *forms) for p in passes}
    assert all(0 < row["host_ms"] <= row["ms_p50"] * 1.01 for row in bench.rows)


@pytest.mark.exhaustive
def test_vllm_starts_alone_on_a_cpu(bench):
    pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    vllm_start.run(bench)
    assert {row["shape"] for row in bench.rows} == {*vllm_start.ON_CPU}
    assert all(row["steps"] == ["start", "generate"] for row in bench.rows)


VLLM = """
import json, os, pathlib, subprocess, sys, time
name, device, result = sys.argv[1:]
runner = "second" if os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1" else "first"
pathlib.Path({started!r}).open("a").write(f"{{name}} {{runner}}\\n")
if [name, runner] in {hang}:
    subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"])
if [name, runner] in {fail}:
    raise ValueError("not on this device")
pathlib.Path(result).write_text(json.dumps({{"steps": ["start", "generate"]}}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hang", "fail", "order"),
    [
        pytest.param(
            ["eager second"],
            ["sleep first"],
            [{"eager first", "eager second"}, {"graphs first", "sleep first"}],
            id="the second runner hangs",
        ),
        pytest.param(
            ["sleep second", "sleep first"],
            ["graphs second"],
            [
                {"eager first", "eager second"},
                {"graphs second", "sleep second", "graphs first", "sleep first"},
            ],
            id="a step hangs",
        ),
    ],
)
def test_a_hanging_vllm_leaves_the_simplest_step_and_others(
    bench, monkeypatch, tmp_path, hang, fail, order
):
    started, steps = tmp_path / "started", ("eager", "graphs", "sleep")
    given = {"hang": [h.split() for h in hang], "fail": [f.split() for f in fail]}
    code = VLLM.format(started=str(started), **given)
    monkeypatch.setattr(vllm_start, "COMMAND", (sys.executable, "-c", code))
    monkeypatch.setattr(vllm_start, "vllm_available", lambda: True)
    monkeypatch.setattr(vllm_start, "STEPS", {name: {} for name in steps})
    monkeypatch.setattr(bench, "device", torch.device("cuda"))
    monkeypatch.setattr(Bench, "device_name", "a GPU")
    monkeypatch.setattr(vllm_start, "LIMIT_S", {"cuda": 4})
    monkeypatch.setattr(vllm_start, "WHOLE_S", {"cuda": 60})
    begin = time.monotonic()
    with pytest.raises(AssertionError, match=r"steps without a token: sleep$"):
        vllm_start.run(bench)
    assert time.monotonic() - begin < 55, "what hangs is ended with its children"
    lines = started.read_text().splitlines()
    assert {*lines[:2]} == order[0] and {*lines[2:]} == order[1]
    notes = {
        f"{row['shape']} {row['impl'].split('_')[1]}": row.get("note", "") for row in bench.rows
    }
    assert notes.keys() == order[0] | order[1]
    assert {n for n in notes if "not finished" in notes[n]} == {*hang}
    assert {n for n in notes if "not on this device" in notes[n]} == {*fail}
    name, runner = hang[0].split()
    late = vllm_start.attempt(name, runner, "cuda", tmp_path, end=time.monotonic() + 1)
    assert late["note"].startswith("not finished after 1 s")


def test_every_operator_of_the_probe_is_right_in_every_form():
    rows = list(gpu_probe.operators(torch.device("cpu")))
    assert [row for row in rows if row["outcome"] != "passed"] == []
    names = {row["name"].partition(",")[0] for row in rows}
    assert {"policy_loss", "tree_attention", "strided_copy", "bit_checksum"} <= names
    assert {row["form"] for row in rows} >= {"once", "again", "unaligned", "multiples"}


def test_chosen_rows_alone_and_none_after_the_time_of_a_benchmark(bench):
    bench.impl = "torch$|gemm"
    calls = dict.fromkeys((OURS, f"{OURS}_more", "torch", "torch_sort", "eager"), lambda: None)
    bench.compare("op", "forward", "shape", torch.bfloat16, calls)
    assert [row["impl"] for row in bench.rows] == [OURS, f"{OURS}_more", "torch"]
    bench.op_end = 0.0
    with pytest.raises(OutOfTime):
        bench.compare("op", "forward", "shape", torch.bfloat16, calls)


def test_compile_is_left_out_under_a_limited_instruction_set(monkeypatch):
    assert not is_limited()
    for name, value in LIMITS["avx2"].items():
        monkeypatch.setenv(name, value)
    assert is_limited()
    functions, missing = _baselines.from_logits()
    assert "eager" in functions and "compile" not in functions
    assert "crashes" in missing["compile"]
