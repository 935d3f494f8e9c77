"""A plugin of a vLLM server that makes its steps slow, while a file exists.

What is sampled does not change, so that the server's settings are those of a run.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

__all__ = ["slow_down_steps"]

STEP_S = 0.4  # a response of 450 tokens takes three minutes


def slow_down_steps() -> None:
    """Wait before each step of the scheduler, which all workers of the server follow."""
    from vllm.v1.core.sched.scheduler import Scheduler

    file, schedule = Path(os.environ["SLOW_DECODING_FILE"]), Scheduler.schedule

    @functools.wraps(schedule)
    def schedule_slowly(*args: Any, **kwargs: Any) -> Any:
        if file.exists():
            time.sleep(STEP_S)
        return schedule(*args, **kwargs)

    Scheduler.schedule = schedule_slowly  # type: ignore[method-assign]
