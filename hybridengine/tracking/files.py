"""The lines of rollout files, with token ids as generated, and summary.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridengine.storage import atomic_file


def rollout_line(rollout: Any) -> str:
    """Format a scored response (`trainer.rollouts.Rollout`) as one line of JSON.

    Results of the reward are columns; one with the name of another column has the prefix reward/.
    """
    r = rollout
    sample = {
        "index": r.sample.index,
        "data_source": r.sample.data_source,
        "prompt": r.sample.prompt_text,
        "response": r.response_text,
        "ground_truth": _plain(r.sample.ground_truth),
        "reward": r.score,
    }
    response = {
        **({} if r.advantage is None else {"advantage": r.advantage}),
        "finish_reason": r.finish_reason,
        "weight_version": r.version,
        **({"weight_versions": list(map(list, r.versions))} if len(r.versions) > 1 else {}),
        "prompt_ids": list(r.prompt_ids),
        "response_ids": list(r.response_ids),
        "log_probs": list(map(float, r.log_probs)),
        **r.trained,
        **({"sampled": list(r.sampled), "turns": list(r.turns)} if r.turns else {}),
        **r.columns_in_files(),
    }
    taken = sample.keys() | response.keys()
    results = {
        f"reward/{name}" if name in taken else name: value
        for name, value in {**r.extras, **r.texts}.items()
    }
    return json.dumps({**sample, **results, **response}, ensure_ascii=False) + "\n"


def _plain(value: Any) -> Any:
    """Convert types of parquet that JSON lacks, such as dates, decimals and bytes, to text."""
    return json.loads(json.dumps(value, default=str))


def steps_of_summary(path: Path) -> int | None:
    """Return how many steps the run of a summary had taken; None if there is no such file."""
    try:
        steps = json.loads(path.read_bytes())["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return steps if isinstance(steps, int) else None


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary` as JSON; non-finite numbers become null."""
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in summary.items()
    }
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(clean, indent=2, allow_nan=False) + "\n")
