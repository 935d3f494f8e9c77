"""The hook that checks the subject of a commit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HOOK = Path(__file__).parents[2] / "tools" / "check_subject.sh"


@pytest.mark.parametrize(
    ("subject", "fault"),
    [
        ("logprob: bound peaked rows to 1 ULP", ""),
        ("rollout/vllm, docs: name the version", ""),
        ("Merge branch 'delta'", ""),
        ("a: " + "x" * 69, ""),
        ("a: " + "x" * 70, "73 characters, expected at most 72"),
        ("Bound peaked rows", "expected 'area: what it does'"),
        ("logprob: bound peaked rows.", "without a full stop"),
        ("docs: what a step costs", "in the imperative, not 'what'"),
        ("delta: fixes the order of rows", "in the imperative, not 'fixes'"),
        ("tests: added a hostile case", "in the imperative, not 'added'"),
        ("logprob:", "expected 'area: what it does'"),
        ("", "expected 'area: what it does'"),
    ],
)
def test_subject(subject: str, fault: str, tmp_path: Path) -> None:
    message = tmp_path / "message"
    message.write_text(f"{subject}\n\nA body of any length.\n")
    result = subprocess.run([HOOK, message], capture_output=True, text=True)
    assert (result.returncode == 0) == (not fault)
    assert fault in result.stderr
