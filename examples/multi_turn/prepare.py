"""Make what the multi-turn examples train on, as parquet files in verl's row schema.

    python examples/multi_turn/prepare.py                         # products, sums and differences
    python examples/multi_turn/prepare.py --gsm8k data/gsm8k      # of examples/gsm8k.py

The numbers are too large for a small model to compute with by itself; every prompt shows three
questions that the calculator solved, in other words than the one that is asked. guess.parquet is
for guess.yaml. The model is made by `python examples/demo/prepare.py`.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

HELD_OUT = 64
TRAINED_ON = 2048
ASKED = (  # words, expression
    ("the sum of {a} and {b}", "{a} + {b}"),
    ("the product of {a} and {b}", "{a} * {b}"),
    ("the difference between {a} and {b}", "{a} - {b}"),
    ("{b} more than {a}", "{a} + {b}"),
    ("{b} less than {a}", "{a} - {b}"),
    ("twice {a}", "2 * {a}"),
)
SOLVED = (("12 times 345", "12 * 345"), ("908 minus 77", "908 - 77"), ("451 plus 38", "451 + 38"))
GUESS = "Guess my number from 1 to 64. I answer higher or lower. Write the number only."
GSM8K_SYSTEM = "Compute with the calculator."  # the rows say how to give the answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(".cache/demo/calculator"))
    parser.add_argument("--gsm8k", type=Path, help="folder with train.parquet and test.parquet")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.gsm8k is not None:
        for split in ("train", "test"):
            write(arguments.out / f"gsm8k_{split}.parquet", gsm8k_rows(arguments.gsm8k, split))
        return
    rng = random.Random(arguments.seed)
    asked: dict[str, str] = {}
    while len(asked) < HELD_OUT + TRAINED_ON:
        words, expression = rng.choice(ASKED)
        numbers = {"a": rng.randint(100, 999), "b": rng.randint(11, 99)}
        asked[f"What is {words.format(**numbers)}?"] = expression.format(**numbers)
    rows = [row(i, *pair) for i, pair in enumerate(asked.items())]
    write(arguments.out / "val.parquet", rows[:HELD_OUT])
    write(arguments.out / "train.parquet", rows[HELD_OUT:])
    games = [guess_row(i, rng.randint(1, 64)) for i in range(TRAINED_ON)]
    write(arguments.out / "guess.parquet", games)


def row(index: int, question: str, expression: str) -> dict[str, Any]:
    """A question after solved ones. The answer is in no row: a tool has to compute it."""
    return {
        "data_source": "calculator",
        "prompt": [*(turn for asked in SOLVED for turn in solved(*asked)), _turn("user", question)],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(eval(expression))},
        "extra_info": {"index": index},
    }


def solved(question: str, expression: str) -> list[dict[str, str]]:
    """A question, the call, its result and the answer."""
    answer = str(eval(expression))
    return [
        _turn("user", f"What is {question}?"),
        _turn("assistant", call(expression)),
        _turn("tool", answer),
        _turn("assistant", answer),
    ]


def guess_row(index: int, number: int) -> dict[str, Any]:
    """A game of guess.py."""
    return {
        "data_source": "guess",
        "prompt": [_turn("user", GUESS)],
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"index": index, "interaction_kwargs": {"number": number}},
    }


def call(expression: str) -> str:
    body = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return f"<tool_call>{body}</tool_call>"


def gsm8k_rows(folder: Path, split: str) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    rows = pq.read_table(folder / f"{split}.parquet").to_pylist()
    return [
        {
            **{name: r[name] for name in ("data_source", "ability", "reward_model", "extra_info")},
            "prompt": [_turn("system", GSM8K_SYSTEM), *r["prompt"]],
        }
        for r in rows
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    print(f"ready: {path}, {len(rows)} rows")


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


if __name__ == "__main__":
    main()
