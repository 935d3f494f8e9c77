"""Metrics of a run, without those that differ between equal runs."""

from __future__ import annotations

import json
from pathlib import Path

# Metrics that differ between equal runs: times, memory, rates, and what a sync moves (the first one
# of a process moves everything).
_UNEQUAL = ("timing_s/", "perf/", "reshard/")


def metrics(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if not k.startswith(_UNEQUAL)} for row in rows]
    return [row for row in rows if len(row) > 1]
