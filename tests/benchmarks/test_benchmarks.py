"""Every benchmark of an operator runs at small shapes and fills its rows; nothing is timed."""

import importlib

import pytest

from benchmarks import _baselines, host
from benchmarks._bench import KEYS, OURS, Bench
from benchmarks.isa import LIMITS, is_limited

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


def test_launches_are_counted_and_few(bench):
    host.run(bench)
    of_ours = {(row["op"], row["pass"]): row for row in bench.rows if row["impl"] == OURS}
    assert of_ours["rms_norm", "fwd"]["launches"] == of_ours["strided_copy", "fwd"]["launches"] == 1
    assert of_ours["linear_policy_loss", "fwd+bwd"]["launches"] <= 25
    layers = {row["impl"]: row["launches"] for row in bench.rows if row["op"] == "micro_batch"}
    assert layers[f"{OURS}_policy_loss"] < 1.3 * layers["transformers"]
    assert all(row["ms_p50"] > 0 and row.keys() == set(KEYS) for row in bench.rows)


@pytest.mark.exhaustive
@pytest.mark.multirank
def test_the_part_of_the_gpu_report_with_vllm_runs_on_a_cpu():
    pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    from benchmarks import engine

    bench = Bench("cpu", quick=True)
    engine.run(bench)
    checked = [row["shape"] for row in bench.rows if row["pass"] == "check"]
    assert len(checked) == len(engine.TP_SIZES) * len(engine.ON_CPU)


def test_compile_is_left_out_under_a_limited_instruction_set(monkeypatch):
    assert not is_limited()
    for name, value in LIMITS["avx2"].items():
        monkeypatch.setenv(name, value)
    assert is_limited()
    functions, missing = _baselines.from_logits()
    assert "eager" in functions and "compile" not in functions
    assert "crashes" in missing["compile"]
