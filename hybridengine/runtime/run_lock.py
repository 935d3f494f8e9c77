"""One run at a time in a run's folder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TextIO

from hybridengine.config import ConfigError

__all__ = ["RunLock"]


class RunLock:
    """An exclusive lock on `<dir>/.lock`, held inside the context.

    The launcher holds it, or under torchrun rank 0. The operating system releases it when its
    holder ends, however that happens, so a lock is never left behind.

    Raises:
        ConfigError: another process holds it; the message names that one, its host and its start.
    """

    def __init__(self, dir: str | Path) -> None:
        self._file = Path(dir) / ".lock"
        self._held: TextIO | None = None

    def __enter__(self) -> RunLock:
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            held = self._file.open("a+")  # "w" would empty it before the lock is ours
        except OSError as error:
            raise ConfigError(
                f"trainer.default_local_dir {str(self._file.parent)!r} cannot be written: {error}"
            ) from None
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held.seek(0)
            message = _in_use(self._file.parent, held.read())
            held.close()
            raise ConfigError(message) from None
        except OSError as error:  # a file system without locks
            print(
                f"warning: {self._file} cannot be locked ({error}); start no second run in its "
                "folder",
                file=sys.stderr,
            )
        held.seek(0)
        held.truncate()
        started = datetime.now().isoformat(sep=" ", timespec="seconds")
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "started": started}, held)
        held.flush()
        self._held = held
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._held is not None:
            self._held.close()


def _in_use(dir: Path, written: str) -> str:
    try:
        holder = json.loads(written)
        who = f"process {holder['pid']} on {holder['host']}, since {holder['started']}"
    except (ValueError, KeyError, TypeError):  # it has only just taken the lock
        who = "another process"
    return (
        f"another run is using {str(dir)!r} ({who}); wait for it, stop it, or set another "
        "trainer.default_local_dir"
    )
