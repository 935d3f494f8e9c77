"""The rows of a run and their JSON document, which is written after every row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
UNFINISHED = "the process ended while it ran"


class Results:
    """Rows of this run, and of an earlier run of the same commit and device that it continues."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.finished: list[str] = []  # benchmarks that ran to their end
        self.peaks: dict[str, float] = {}  # of a GPU: GB/s or TFLOP/s
        self.states: list[dict[str, str]] = []  # clocks and temperature of a GPU over the run
        self._header: dict[str, Any] = {}
        self.path: Path | None = None
        self._earlier: dict[tuple, Row] = {}

    def open(self, path: Path, header: dict[str, Any], resume: bool) -> None:
        """Write to `path` from now on; with `resume`, keep what an earlier run measured.

        An earlier run of another commit, device or library version is not kept.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._header = path, header
        if not resume or not path.exists():
            return
        earlier = json.loads(path.read_text())
        if all(earlier.get(key) == value for key, value in header.items()):
            self._earlier = {_key(row): row for row in earlier["rows"]}
            self.finished = earlier.get("finished", [])
            self.peaks, self.states = earlier.get("peaks", {}), earlier.get("states", [])

    def append(self, row: Row) -> None:
        self._earlier.pop(_key(row), None)
        self.rows.append(row)
        self.save()

    def measured(self, row: Row, measure: Callable[[], Row], may_crash: bool = False) -> Row:
        """Append and return the earlier row that `row` repeats, else `row | measure()`.

        may_crash: a process that `measure` ends leaves a row that says so, and a run that continues
            this one keeps it.
        """
        known = self._earlier.get(_key(row))
        if known is None and may_crash:
            self._earlier[_key(row)] = row | {"note": UNFINISHED}
            self.save()
        try:
            row = known or row | measure()
        except KeyboardInterrupt:
            self._earlier.pop(_key(row), None)
            self.save()
            raise
        self.append(row)
        return row

    def keep(self, last: Row, **of_run: str) -> bool:
        """Append the earlier rows of a run of several, if the `last` one is among them.

        of_run: values that all of its rows have. last: values that only the last one has.
        """
        rows = [row for row in self._earlier.values() if of_run.items() <= row.items()]
        if not any(last.items() <= row.items() for row in rows):
            return False
        for row in rows:
            self.append(row)
        return True

    def save(self) -> None:
        """Write the document; an interrupted write leaves the last one."""
        if self.path is None:
            return
        document: dict[str, Any] = {**self._header, "finished": self.finished}
        if self.states:
            document |= {"peaks": self.peaks, "states": self.states}
        document["rows"] = [*self.rows, *self._earlier.values()]
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(document, indent=1) + "\n")
        partial.replace(self.path)


def _key(row: Row) -> tuple:
    return tuple(row[key] for key in ("op", "pass", "impl", "shape", "dtype"))
