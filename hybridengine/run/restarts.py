"""Number the starts of the ranks, which torchrun's agent may restart.

The agent's store outlives the ranks, with all that they have written. Keys are therefore prefixed
by the number of the start. TORCHELASTIC_RESTART_COUNT is no such number: every node's agent counts
for itself, and not each restart (https://github.com/pytorch/pytorch/issues/108158).
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from hybridengine.run.signed_store import SignedStore

_PREFIX = "hybridengine/starts"
_POLL_S = 0.02


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
