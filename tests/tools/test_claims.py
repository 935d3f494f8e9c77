"""The claims of docs/figures.md: every command is of this repository, every record is there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools import claims, claims_page

ROOT = Path(__file__).parents[2]


def test_every_claim_has_a_benchmark_and_a_record() -> None:
    rows = claims.read_claims()
    assert [row.number for row in rows] == [*range(1, len(rows) + 1)]
    lines = [line for line in claims.claims_section().splitlines() if line.startswith("| ")]
    assert len(rows) == len(lines) - 2  # none is skipped for its form; each table has a head
    measured = "\n".join(line for line in lines if "not measured yet" not in line)
    for row in rows:
        name = re.fullmatch(r"-m benchmarks (\w+)", row.arguments)
        assert name is not None and find_spec(f"benchmarks.{name[1]}") is not None, row
        recorded = (ROOT / "benchmarks" / "results" / row.record).is_file()
        assert recorded or f"| {row.number} |" not in measured, row


def test_the_page_has_the_figures_of_the_records() -> None:
    assert claims_page.render() in claims_page.PAGE.read_text()
    assert claims_page.PLOT.is_file()


def test_a_command_of_several_claims_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(claims.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["claims"])
    assert claims.main() == 0
    commands = [row.arguments for row in claims.read_claims()]
    assert len(set(commands)) < len(commands)
    assert [shlex.join(command[1:]) for command in ran] == list(dict.fromkeys(commands))


def test_the_command_fails_where_a_measurement_does(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, len(ran) - 1)

    monkeypatch.setattr(claims.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["claims", "5", "3"])
    assert claims.main() == 1  # the second one fails
    assert [command[1:] for command in ran] == [
        ["-m", "benchmarks", "logprob"],
        ["-m", "benchmarks", "packing"],
    ]
    monkeypatch.setattr(sys, "argv", ["claims", "99"])
    with pytest.raises(SystemExit):
        claims.main()
