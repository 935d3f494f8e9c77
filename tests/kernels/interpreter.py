"""Triton's interpreter has to be chosen before Triton is imported: its tests run in a process."""

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(name: str) -> None:
    """Run the tests of interpreted_<name>.py beside this file."""
    tests = Path(__file__).parent / f"interpreted_{name}.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]
