"""`hybridengine eval` and `generate`: the same numbers as a run's validation; pass@k."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from hybridengine import cli
from hybridengine.lab.evaluate import evaluate, load_evaluation, pass_at_k, results_table
from hybridengine.run.config import config_to_yaml, load_sft_config
from tests.tiny_models import save_tiny
from tests.train.in_process import run_jobs, small_job


def test_pass_at_k_counts_all_choices() -> None:
    values = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    for k in range(1, 7):
        assert pass_at_k(values, k) == pytest.approx(fmean(map(max, combinations(values, k))))


def test_the_table_has_intervals_and_pass_at_k_of_binary_results() -> None:
    problems = [("a", {"acc": [1.0, 0.0], "score": [0.5, 0.1]}, None)] * 3
    rows = list(zip(*(column.cells for column in results_table(problems).columns), strict=True))
    assert rows == [
        ("a", "3", "acc mean", "0.500", "0.500 to 0.500"),
        ("a", "3", "acc pass@2", "1.000", "1.000 to 1.000"),
        ("a", "3", "score mean", "0.300", "0.300 to 0.300"),
    ]


@pytest.fixture
def prompts_of_generate(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The token ids that the engine gets."""
    from hybridengine.hf.engine import HfEngine

    seen, generate = list[list[int]](), HfEngine.generate

    def record(self: HfEngine, prompts: Any, *args: Any) -> Any:
        seen.extend(list(prompt) for prompt in prompts)
        return generate(self, prompts, *args)

    monkeypatch.setattr(HfEngine, "generate", record)
    return seen


def typed(folder: Path, text: str, *settings: str) -> Result:
    """What `hybridengine generate` prints for lines of `text`."""
    given = [str(folder), "rollout.name=hf", "data.max_response_length=3", *settings]
    return CliRunner().invoke(cli.app, ["generate", *given], input=text)


@pytest.mark.multirank
def test_a_run_and_its_evaluation_agree(
    tmp_path: Path, prompts_of_generate: list[list[int]]
) -> None:
    (tmp_path / "chat.jinja").write_text(
        "{{ mark }}{% for m in messages %} {{ m.content }}{% endfor %}"
    )
    own = {
        "data.chat_template": tmp_path / "chat.jinja",
        "data.apply_chat_template_kwargs.mark": "w7",
        "data.val_files": tmp_path / "rows.jsonl",
        "trainer.total_training_steps": 1,
        "rollout.val_kwargs.n": 2,
        "rollout.val_kwargs.do_sample": True,
        "rollout.val_kwargs.temperature": 1.0,
    }
    job = [*small_job(tmp_path), *(f"{key}={value}" for key, value in own.items())]
    [result] = run_jobs(tmp_path, [job])
    run = tmp_path / "run"
    prompts = {tuple(line["prompt_ids"]) for line in result.rollouts["step_1"]}
    assert {ids[0] for ids in prompts} == {7}
    config = load_evaluation(run, [])
    assert config.model.path == str(run / "final")
    problems = evaluate(config)
    scores = [score for _, results, _ in problems for score in results["score"]]
    assert fmean(scores) == pytest.approx(result.last["val/score"])  # same weights, same seed
    prompts_of_generate.clear()
    done = typed(run, "w3 w4\n\nw5\n")
    assert done.exit_code == 0, done.output
    responses = [line.split() for line in done.stdout.splitlines() if line.startswith("w")]
    assert len(responses) == 2 and all(len(words) <= 3 for words in responses)
    typed(run / "final", "w3\n")  # which knows nothing of the run
    typed(run / "final", "w3\n", "data.apply_chat_template_kwargs.mark=w8")
    long = typed(run, "w3 " * 600 + "\nw5\n")
    assert long.exit_code == 2 and "data.max_prompt_length 509" in long.output
    assert prompts_of_generate == [[7, 3, 4], [7, 5], [7, 3], [8, 3], [7, 5]]


def test_a_run_of_sft_answers_as_it_was_trained(
    tmp_path: Path, prompts_of_generate: list[list[int]]
) -> None:
    save_tiny("llama", tmp_path / "run" / "final")
    (tmp_path / "chat.jinja").write_text("{{ mark }} {{ messages[0].content }}")
    settings = [
        f"model.path={tmp_path / 'model'}",
        f"data.train_files={tmp_path / 'rows.jsonl'}",
        f"data.chat_template={tmp_path / 'chat.jinja'}",
        "data.apply_chat_template_kwargs.mark=w9",
        "model.override_config.max_position_embeddings=99",
    ]
    config = load_sft_config(None, settings)
    (tmp_path / "run" / "config.yaml").write_text(config_to_yaml(config))
    done = typed(tmp_path / "run", "w3\n")
    assert done.exit_code == 0, done.output
    assert prompts_of_generate == [[9, 3]]


@pytest.mark.multirank
@pytest.mark.exhaustive
def test_vllm_gives_the_same_greedy_responses(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")
    job = small_job(tmp_path)
    reward = next(setting for setting in job if "custom_reward_function" in setting)
    settings = [
        f"data.val_files={tmp_path / 'rows.jsonl'}",
        "data.max_prompt_length=6",
        "data.max_response_length=4",
        "rollout.dtype=float32",
        "rollout.top_k=1",
        reward,
    ]
    for command, given in (("eval", ""), ("generate", "w3 w4\nw5\n")):
        printed = []
        for engine in ("hf", "vllm"):
            words = [command, str(tmp_path / "model"), *settings, f"rollout.name={engine}"]
            done = subprocess.run(
                [sys.executable, "-m", "hybridengine", *words],
                input=given,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert "NUMA" not in done.stderr  # vLLM would bind the memory of this process
            lines = [line.strip() for line in done.stdout.splitlines()]
            printed.append([line for line in lines if line.startswith(("w", "toy"))])
        assert printed[0] and printed[0] == printed[1]


def test_what_cannot_be_evaluated(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["eval", str(tmp_path)])
    assert result.exit_code == 2 and "no Hugging Face folder" in result.output
