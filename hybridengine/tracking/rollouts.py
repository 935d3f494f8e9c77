"""The rollouts of a step as jsonl: ids as generated, never re-tokenised text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hybridengine.storage import atomic_file

__all__ = ["write_rollouts"]


def write_rollouts(path: Path, rollouts: Iterable[Any]) -> None:
    """Write scored responses (`trainer.rollouts.Rollout`), one a line, a whole file or none."""
    with atomic_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for r in rollouts:
            row = {
                "index": r.sample.index,
                "prompt": r.sample.prompt_text,
                "response": r.response_text,
                "ground_truth": _plain(r.sample.ground_truth),
                "reward": r.score,
                **r.extras,
                **({} if r.pred is None else {"pred": r.pred}),
                "prompt_ids": list(r.sample.prompt_ids),
                "response_ids": list(r.response_ids),
                "log_probs": list(map(float, r.log_probs)),
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _plain(value: Any) -> Any:
    """What parquet has and JSON has not, such as a date, a decimal or bytes, as text."""
    return json.loads(json.dumps(value, default=str))
