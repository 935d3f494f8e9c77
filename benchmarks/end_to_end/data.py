"""Arithmetic problems with prompts and answers of widely varying length, and their reward."""

from __future__ import annotations

import random
import re
import zlib
from pathlib import Path
from typing import Any

from benchmarks._bench import ROOT, Bench

MODEL = ROOT / ".cache/demo/smollm2-135m-instruct"


def has_demo_model(bench: Bench, name: str) -> bool:
    """Return whether benchmark `name` can run (not in a quick run); else say what it needs."""
    if bench.quick or not MODEL.exists():
        print(f"# {name}: needs the demo's model: `python examples/demo/prepare.py`", flush=True)
        return False
    return True


def reward(response: str, truth: str) -> float:
    """Return 1 if the last number is right, 0.1 for any number, else 0, and less than 0.01 more.

    This remainder depends on the text alone. So the rewards of a group differ, and all of its
    tokens have a gradient: ours leaves out the backward of groups of equal rewards.
    """
    numbers = re.findall(r"-?\d+", response)
    score = 1.0 if numbers and numbers[-1] == truth else 0.1 if numbers else 0.0
    return score + zlib.crc32(response.encode()) % 1000 * 1e-5


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict
) -> float:
    """`reward` with the name and arguments of a verl reward function."""
    return reward(solution_str, ground_truth)


def job_of(
    train: Path, prompts: int, n: int, micro_batch: int, max_prompt: int, max_response: int
) -> dict[str, Any]:
    """Return the settings that every implementation takes; `bf16`: whether that is fast here."""
    import torch

    from hybridengine.kernels import has_fast_products

    return {
        "train": str(train),
        "reward": __file__,
        "micro_batch": micro_batch,
        "responses": prompts * n,
        "n": n,
        "max_response_length": max_response,
        "max_model_len": max_prompt + max_response,
        "kv_cache_bytes": 2**28,
        "lr": 1e-6,
        "bf16": has_fast_products(torch.bfloat16, "cpu"),
    }


def write(out: Path, count: int, seed: int = 0) -> None:
    """Write `count` rows in verl's schema: zero to twelve solved examples, then a sum to solve."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw = random.Random(seed)
    rows = []
    for index in range(count):
        chat = []
        for _ in range(draw.choice((0, 0, 1, 2, 4, 12))):
            a, b = draw.randrange(50), draw.randrange(50)
            chat += [_turn("user", f"What is {a} + {b}?"), _turn("assistant", f"{a + b}")]
        terms = [draw.randrange(30) for _ in range(draw.randrange(2, 5))]
        chat.append(_turn("user", f"What is {' + '.join(map(str, terms))}?"))
        rows.append(
            {
                "data_source": "sums",
                "prompt": chat,
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(sum(terms))},
                "extra_info": {"index": index},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), out)


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
