"""The starts of a run: the time of the first one, and the number of each.

Torchrun's agent may restart the ranks. Its store outlives them, with all that they have written, so
keys are prefixed by the number of the start. TORCHELASTIC_RESTART_COUNT is no such number: every
node's agent counts for itself, and not each restart
(https://github.com/pytorch/pytorch/issues/108158).
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybridengine.run.messages import SignedStore

_PREFIX = "hybridengine/starts"
_POLL_S = 0.02
_STARTED = "HYBRIDENGINE_RUN_START"  # in the environment, which started processes inherit


def run_start() -> datetime:
    """Return the time of the first call in this run: chat templates read the date.

    Processes inherit it from the one that started them.
    """
    now = datetime.now().isoformat(timespec="seconds")
    return datetime.fromisoformat(os.environ.setdefault(_STARTED, now))


def agree_on_run_start(store: dist.Store) -> None:
    """Let ranks that torchrun started have one `run_start`, also after it restarts them."""
    values = SignedStore(store, "hybridengine/run")
    os.environ[_STARTED] = values.claim("start", run_start().isoformat(), str)


def connect_store(timeout_s: float) -> dist.Store:
    """Return a new connection to the store whose address torchrun puts in the environment."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def number_of_start(store: Any, rank: int, world_size: int, timeout_s: float) -> int:
    """Return how often the ranks have been started, the same number on all of them.

    Rank 0 counts, and answers the questions of the others; their numbers tell these from those of
    ranks of earlier starts. store: not used by another thread.

    Raises DistError, a timeout, if rank 0 does not start.
    """
    counters: Any = dist.PrefixStore(_PREFIX, store)
    if rank == 0:
        number: int = counters.add("number", 1)
        arguments = store.clone(), number, world_size - 1
        threading.Thread(target=_answer, args=arguments, name="start-number", daemon=True).start()
        return number
    answer = f"answer/{counters.add('questions', 1)}"
    try:
        counters.wait([answer], timedelta(seconds=timeout_s))
    except dist.DistStoreError as error:
        raise dist.DistError(
            f"timed out: rank 0 has not started within {timeout_s:g} s (trainer.timeout_s)"
        ) from error
    number = SignedStore(store, _PREFIX).read(answer, int)
    counters.add(f"{number}/joined", 1)
    return number


def _answer(store: Any, number: int, others: int) -> None:
    """Answer questions until all other ranks of this start have theirs."""
    counters, answers = dist.PrefixStore(_PREFIX, store), SignedStore(store, _PREFIX)
    answered = 0
    with suppress(RuntimeError):  # the store is gone
        while counters.add(f"{number}/joined", 0) < others:
            asked = counters.add("questions", 0)
            for question in range(answered + 1, asked + 1):
                answers.set(f"answer/{question}", number)
            answered = asked
            time.sleep(_POLL_S)


class RunMark:
    """Whether the run in `folder` has begun, known also after a restart of its ranks.

    store: see `number_of_start`.

    Attributes:
        was_set: whether it had begun as this object was made.
    """

    def __init__(self, store: Any, folder: str | Path) -> None:
        self._store = SignedStore(store, _PREFIX)
        self._key = f"begun/{Path(folder).resolve()}"
        self.was_set = bool(self._store.get(self._key, bool))

    def set(self) -> None:
        self._store.set(self._key, True)
