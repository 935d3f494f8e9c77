"""What the tests of the documentation share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import ROOT


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what git tracks, as links, in which a reader starts."""
    for name in ("examples", "docs", "tests", "benchmarks", "tools", "Makefile", "setup.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path
