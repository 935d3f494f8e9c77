"""`hybridengine parity` of a job, and the engine of a run with FP8 weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hybridengine import cli
from hybridengine.lab.parity.compare import token_cause
from tests.extras.lab.parity.engines import written
from tests.forked import run_forked
from tests.ranks import run_ranks
from tests.sync.quantized_cases import save
from tests.sync.quantized_kernel import register_kernel
from tests.train.in_process import small_job

COMMAND = [sys.executable, "-m", "hybridengine", "parity"]


@pytest.mark.slow
def test_a_job_and_its_engine_agree(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    job = [s for s in small_job(tmp_path) if not s.startswith("rollout.name")]
    command = [*COMMAND, str(tmp_path / "model"), *job, "rollout.kv_cache_gib=0.1"]
    done = run_forked(command, uses_vllm=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "trained model and engine agree at all 29 points" in done.stdout
    assert "KL 0.0e+00 nats per token, largest ratio 1; correction: none" in done.stdout  # exact


def test_an_engine_that_runs_the_trained_model_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        cli.app, ["parity", str(tmp_path / "model"), *small_job(tmp_path), "rollout.name=hf"]
    )
    assert result.exit_code == 2
    assert "compare vllm" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ([5, 6, 7], [5, 6, 7], None),
        ([1, 5, 6], [5, 6], "only the trainer puts a token before"),
        ([5, 6], [5, 6, 7], "3, equal up to position 2"),
        ([5, 6, 7], [5, 9, 7], "equal up to position 1"),
    ],
)
def test_tokens_of_prompts(ours: list[int], theirs: list[int], words: str | None) -> None:
    cause = token_cause(ours, theirs)
    assert cause is None if words is None else words in str(cause)


def quantized_faults(rank: int, world_size: int, path: str) -> list[tuple[str, str]]:
    from hybridengine.lab.parity import Parity
    from tests.sync.vllm_engines import build

    register_kernel()
    torch.compiler.set_stance("force_eager")
    engine, model, resharder = build(path, 1, torch.bfloat16, 1 << 20, quantization="fp8")
    resharder.sync(1)
    target: Any = engine.target
    parity = Parity(model, engine.llm, layout=target.layout, tensors=target.weights)
    prompts = [list(range(3, 20))]
    name, how = next(iter(target.layout.quantized.items()))
    tensors = target.weights()

    def faults() -> list[tuple[str, str]]:
        report = parity.compare(prompts, max_tokens=4)
        return [(fault.tensor, fault.cause) for fault in report.weights]

    results = faults()
    assert not results
    with written(tensors[how.scale], lambda scale: scale.mul_(1.5)):
        results += faults()
    with written(tensors[name].view(torch.uint8), lambda values: values.zero_()):
        results += faults()
    return [("scale" if tensor == how.scale else "values", cause) for tensor, cause in results]


@pytest.mark.multirank
@pytest.mark.slow
def test_scales_of_an_older_version(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    faults = run_ranks(quantized_faults, 1, save(tmp_path / "model"), timeout_s=300)[0]
    assert [kind for kind, _ in faults] == ["scale", "values"]
    assert "the scales are older" in faults[0][1]
    assert "are not the trained ones" in faults[1][1]
