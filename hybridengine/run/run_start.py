"""The time at which a run started, one for all of its processes: chat templates read the date."""

from __future__ import annotations

import os
from datetime import datetime

import torch.distributed as dist

from hybridengine.run.signed_store import SignedStore

_STARTED = "HYBRIDENGINE_RUN_START"  # in the environment, which started processes inherit


def run_start() -> datetime:
    """Return the time of the first call in this run, in this process or the one that started it."""
    now = datetime.now().isoformat(timespec="seconds")
    return datetime.fromisoformat(os.environ.setdefault(_STARTED, now))


def agree_on_run_start(store: dist.Store) -> None:
    """Let ranks that torchrun started have one `run_start`, also after it restarts them."""
    values = SignedStore(store, "hybridengine/run")
    os.environ[_STARTED] = values.claim("start", run_start().isoformat(), str)
