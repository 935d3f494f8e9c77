"""The runner of other trainers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools.trainers import __main__ as trainers


def add_part(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    """Make a part "extra" of the package, also for the processes that it starts."""
    (folder / "extra.py").write_text(text)
    import tools.trainers

    monkeypatch.setattr(tools.trainers, "__path__", [*tools.trainers.__path__, str(folder)])
    monkeypatch.setattr(trainers, "CACHE", folder / "cache")
    monkeypatch.delitem(sys.modules, "tools.trainers.extra", raising=False)


def test_parts_are_the_modules_with_run(monkeypatch, tmp_path):
    add_part(monkeypatch, tmp_path, "def run(folder):\n    return {'folder': folder.name}\n")
    (tmp_path / "_helper.py").write_text("raise ImportError")
    assert {"extra", "verl"} <= set(trainers.parts())
    assert "_helper" not in trainers.parts()
    assert trainers.run_here("extra") == {"folder": "extra"}


def test_results_of_other_parts_stay(monkeypatch, tmp_path):
    results = tmp_path / "trainers.json"
    results.write_text('{"trl": {"passed": true}}')

    def run(command: list[str], **options: object) -> SimpleNamespace:
        file = next(Path(a.removeprefix("--json=")) for a in command if a.startswith("--json="))
        file.write_text('{"passed": 1}')
        return SimpleNamespace(returncode=int("broken" in command))

    monkeypatch.setattr(trainers.subprocess, "run", run)
    assert trainers.run("verl", results) and not trainers.run("broken", results)
    assert json.loads(results.read_text()) == {"trl": {"passed": True}, "verl": {"passed": 1}}
