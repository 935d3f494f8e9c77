"""The parent process of a reward worker, which ends all that the worker has started.

A reward function may start processes that leave its process group (a compiler's daemon, a server).
The guard is their reaper: what loses its parent becomes the guard's child. When the worker ends, or
the rank does, the guard kills its children until there are none.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["fork_guarded"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_END_S = 5.0  # limit for killed processes to end
_POLL_S = 0.01


def fork_guarded(parent: int, files: Sequence[int]) -> None:
    """Go on in a child of this process, which stays its guard and ends as the child does.

    SIGTERM, which the guard also gets when `parent` ends, ends the worker and its processes.
    SIGUSR1 is passed on to the worker. Without Linux's prctl nothing is forked.

    parent: process id of the rank.
    files: descriptors that the worker needs and the guard does not.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:  # the closed connection ends the worker
        return
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    guard = os.getpid()
    if os.getppid() != parent:
        os._exit(0)  # the parent ended before the line above
    worker = os.fork()
    if worker == 0:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(0)
        return
    for number, sent in ((signal.SIGTERM, signal.SIGKILL), (signal.SIGUSR1, signal.SIGUSR1)):
        signal.signal(number, lambda *_, sent=sent: _send(worker, sent))
    for file in files:
        os.close(file)
    _, status = os.waitpid(worker, 0)
    _end_children()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # the rank reads how the worker ended from the guard
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(guard, -code)
    os._exit(code)


def _send(process: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def _end_children() -> None:
    """Kill this process's children, and theirs as they become its own, until there are none."""
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        for child in _children():
            _send(child, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            return
        time.sleep(_POLL_S)


def _children() -> list[int]:
    own, found = str(os.getpid()), list[int]()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended
                after_name = (folder / "stat").read_text(errors="replace").rpartition(")")[2]
                if after_name.split()[1] == own:
                    found.append(int(folder.name))
    return found
