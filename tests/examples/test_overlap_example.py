"""The configuration of examples/overlap in each mode, and the table that compares runs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from hybridengine.run.config import load_config

FOLDER = Path(__file__).parents[2] / "examples" / "overlap"


def test_modes_have_the_same_number_of_ranks() -> None:
    compare = runpy.run_path(str(FOLDER / "compare.py"))
    for settings in ((), ("trainer.mode=async",), compare["SYNC"]):
        assert load_config(FOLDER / "config.yaml", settings).ranks_per_node == 2


def test_a_row_of_the_table(tmp_path: Path) -> None:
    compare = runpy.run_path(str(FOLDER / "compare.py"))
    sync = {"timing_s/step": 8.0, "timing_s/gen": 3.0, "timing_s/update_weights": 1.0}
    split = {"timing_s/step": 4.0, "trainer/idle_ratio": 0.25, "rollouter/idle_ratio": 0.1}
    split["fully_async/trajectory_staleness/mean"] = 1.0
    for name, step in (("sync", sync), ("split", split)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps({"val_strict_end": 0.5}))
        rows = [{"val/strict": 0.2}, *[step | {"perf/throughput": 10.0}] * 3]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ends = ["0.500", "0.500 to 0.500, std 0.000"]
    two = [tmp_path / "sync"] * 2
    assert compare["row"](two, "strict") == [*ends, "8.00", "10", "50%", "50%", "0.00"]
    other = compare["row"]([tmp_path / "split"], "strict")
    assert other[2:] == ["4.00", "10", "25%", "10%", "1.00"]
    assert compare["idle_shares"](sync) == pytest.approx((0.5, 0.5))
