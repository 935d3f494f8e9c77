"""Run tests with Triton's interpreter, which must be enabled before Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(*arguments: str) -> None:
    """Run pytest in a new process with TRITON_INTERPRET=1.

    arguments: test files, relative to tests/kernels, and options of pytest.
    """
    folder = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=folder,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]
