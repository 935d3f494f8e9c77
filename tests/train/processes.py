"""Processes of a run that a test kills."""

from __future__ import annotations

import time
from pathlib import Path

from hybridengine.run.session import read_status

START_S = 300  # of a run on two ranks, up to its second step
WITHIN_S = 240  # of the end after a failure; far less than trainer.timeout_s


def pid_of_training_rank(folder: Path, rank: int) -> int:
    """Wait until `rank` is in the middle of a step."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        status = read_status(folder).get(rank)
        if status is not None and status.step >= 2:
            return status.pid
        time.sleep(0.05)
    raise AssertionError(f"the run did not reach step 2 within {START_S} s")
