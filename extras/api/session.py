"""The process group of one process alone, such as a notebook's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from hybridengine.run.rank import own_interfaces
from hybridengine.run.session import PhaseStatus, Session, World


@contextmanager
def script_session(run_dir: str | Path) -> Iterator[Session]:
    """Open a process group of this process alone, such as a notebook's, and its session.

    Signals keep their meaning: Ctrl-C raises KeyboardInterrupt. Torchrun's variables are set as
    long as it is open. A process group that exists already is used instead, and left open.
    """
    if dist.is_initialized():
        yield Session(PhaseStatus(run_dir, dist.get_rank()))
        return
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    alone = {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        **own_interfaces(),
    }
    before = {name: os.environ.get(name) for name in alone}
    os.environ.update(alone)
    try:
        dist.init_process_group(World().backend, store=store, rank=0, world_size=1)
        status = PhaseStatus(run_dir, 0)
        yield Session(status)
        status.end("finished")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
