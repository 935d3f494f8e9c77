"""The simulation against committed measurements and published figures; nothing is timed."""

from benchmarks import simulate as benchmark
from benchmarks._bench import Bench


def test_memory_of_a_training_step_is_near_the_measured_peaks(capsys) -> None:
    bench = Bench("cpu", quick=True)
    benchmark.memory(bench)
    assert [row["shape"] for row in bench.rows] == [
        "hybridengine",
        "gradient checkpointing",
        "logits, not fused",
    ]
    for row in bench.rows:
        assert abs(row["error"]) < 0.2, row["shape"]


def test_decoding_is_near_what_vllm_reaches() -> None:
    for case in benchmark.vllm_cases():
        assert abs(case.predicted / case.reference - 1) < 0.15, case.name


def test_the_transition_is_not_slower_than_hybridflows() -> None:
    assert benchmark.hybridflow_case().predicted < benchmark.HYBRIDFLOW_S
