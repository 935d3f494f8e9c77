"""The multi-turn examples: prompts, rules, tool and environment fit together."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hybridengine.run.config import load_config
from tests.extras.rewards.rules import score

EXAMPLES = Path(__file__).parents[2] / "examples"
PREPARE = runpy.run_path(str(EXAMPLES / "multi_turn" / "prepare.py"))


def test_gsm8k_asks_for_the_answer_that_its_rule_reads(tmp_path: Path) -> None:
    row = runpy.run_path(str(EXAMPLES / "gsm8k.py"))["row"]
    example = {"question": "6 eggs at $3?", "answer": "6 * 3 = <<6*3=18>>18\n#### 18"}
    pq.write_table(pa.Table.from_pylist([row(example, "train", 0)]), tmp_path / "train.parquet")
    [problem] = PREPARE["gsm8k_rows"](tmp_path, "train")
    asked = " ".join(turn["content"] for turn in problem["prompt"])
    assert "6 eggs" in asked and "calculator" in asked
    assert "boxed" in asked and "####" not in asked
    recipe = load_config(EXAMPLES / "multi_turn" / "gsm8k.yaml", [])
    [rule] = recipe.reward.custom_reward_function.path
    truth = problem["reward_model"]["ground_truth"]
    for answer, expected in (("18", 1.0), ("17", 0.0)):
        text = f"They cost \\boxed{{{answer}}}."
        assert score(rule, problem["data_source"], text, truth) == expected


def test_calculator() -> None:
    calculate = runpy.run_path(str(EXAMPLES / "multi_turn" / "calculator.py"))["calculator"]
    assert calculate("-12 * (3 + 4) // 5") == "-17"
    assert calculate("7 / 2") == "3.5"
    for refused in ("__import__('os')", "2 ** 9", "1 +" + " 1 +" * 100 + " 1"):
        with pytest.raises(ValueError):
            calculate(refused)


def test_a_game_of_guessing() -> None:
    game = runpy.run_path(str(EXAMPLES / "multi_turn" / "guess.py"))["GuessNumber"]()
    game.reset(SimpleNamespace(extra_info={"interaction_kwargs": {"number": 40}}))
    assert game.step("32?") == ("higher", 0.1, False)
    assert game.step("no idea") == ("write a number", 0.0, False)
    assert game.step("20") == ("higher", 0.0, False)  # 32 was too low already
    assert game.step("48") == ("lower", 0.1, False)
    assert game.step("40") == ("correct", 1.0, True)
