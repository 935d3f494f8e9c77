"""A run's folder with rollouts of a tiny model's vocabulary."""

from __future__ import annotations

import json
import math
from pathlib import Path

__all__ = ["HOSTILE", "write_run"]

HOSTILE = "</script><img src=x onerror=document.title='owned'>[bold red]"
WORDS = ["w3", "w4", "w5", "w6", "w7", "w8"]


def write_run(folder: Path, *, steps: int = 3, prompts: int = 2, n: int = 3) -> Path:
    """Write `n` responses of 4 tokens to each prompt at each step; rewards are 0, 1, 2, …."""
    (folder / "rollouts").mkdir(parents=True)
    for step in range(1, steps + 1):
        rows = [_row(step, prompt, k) for prompt in range(prompts) for k in range(n)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "rollouts" / f"step_{step}.jsonl").write_text(text)
    return folder


def _row(step: int, prompt: int, k: int) -> dict[str, object]:
    ids = [3 + (step + k + i) % 6 for i in range(4)]
    log_probs = [-0.5 * (i + 1) for i in range(4)]
    row: dict[str, object] = {
        "index": 10 + prompt,
        "data_source": "toy",
        "prompt": f"prompt {prompt}",
        "response": " ".join(f"w{token}" for token in ids) + (HOSTILE if k == 2 else ""),
        "ground_truth": [1, 2],
        "reward": float(k),
        "strict": k / 2,
        "advantage": k - 1.0,
        "finish_reason": "length" if k == 0 else "stop",
        "weight_version": step - 1,
        "added": "a column that the view does not know",
        "prompt_ids": [5, 6, 7],
        "response_ids": ids,
        "log_probs": log_probs,
        "advantages": [k - 1.0] * 4,
        "old_log_probs": [x + math.log(1.1) for x in log_probs],
        "entropy": [0.5 * i for i in range(4)],
        "clipped": [0.0, 1.0, 0.0, 1.0],
    }
    if prompt == 1:
        row["sampled"] = [1, 1, 0, 1]
        call = {"name": "count[bold]", "arguments": {}}
        row["turns"] = [
            {"role": "assistant", "content": "", "tokens": 2, "reward": 0.0, "tool_calls": [call]},
            {"role": "tool", "content": "", "tokens": 1},
            {"role": "assistant", "content": "", "tokens": 1, "reward": 0.5},
        ]
    return row
