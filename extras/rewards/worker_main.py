"""The loop of a reward worker: load a function, call it on responses, send the scores.

Requests arrive pickled over one connection:

    ("load", key, path, name, arguments)            → FunctionSource or Failure
    ("call", key, columns, number of responses,
        whether one call gets lists)                → (i, seconds, outcome) of each, see `Calls`

The process ends when the connection is closed. With it, and when the rank ends, all processes end
that it has started.

The parent of a worker is its guard. A reward function may start processes that leave its process
group (a compiler's daemon, a server). The guard is their reaper: what loses its parent becomes the
guard's child. When the worker ends, or the rank does, the guard kills its children until there are
none.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hybridengine.rewards.calls import Calls, Failure
from hybridengine.rewards.functions import import_reward_function
from hybridengine.run.errors import RewardError
from hybridengine.run.storage import memory_limit
from hybridengine.train.rewards.function import (
    TIMED_OUT,
    FunctionSource,
    Results,
)

GIVEN_UP: Results = {"score": 0.0, TIMED_OUT: 1.0}
CPU_LIMIT_S = 5.0  # of a call of a built-in rule

_EXTRA_BYTES = 2 << 30  # that a call with a limit of its own may allocate
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_END_S = 5.0  # limit for killed processes to end
_POLL_S = 0.01


def main(connection_fd: int, stack_fd: int, parent: int, index: int) -> None:
    """Serve requests until the connection is closed.

    stack_fd: descriptor of the file to which SIGUSR1 writes the stack of the running call.
    parent: process id of the rank.
    index: the number of this worker, which is the seed of `random`.
    """
    _fork_guarded(parent, (connection_fd, stack_fd))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stack_fd, all_threads=False)
    random.seed(index)
    with suppress(EOFError, ConnectionError):  # closed or reset: the rank has ended
        _serve(Connection(connection_fd))


def _serve(connection: Connection) -> None:
    def send(message: Any) -> None:
        for stream in (sys.stdout, sys.stderr):  # print the function's output first
            if stream is not None and not stream.closed:
                stream.flush()
        connection.send(message)

    functions = dict[int, tuple[Callable[..., Any], FunctionSource]]()
    calls = Calls(send)
    while True:
        kind, key, *request = connection.recv()
        if kind == "call":
            calls.run(*functions[key], *request)
            continue
        try:
            function, source = import_reward_function(*request)
        except RewardError as error:
            send(Failure(str(error)))
            continue
        functions[key] = partial(_limited, function) if source.rule else function, source
        if source.is_async:
            _ = calls.event_loop  # so that importing asyncio is no part of a call's time
        send(source)


def _limited(function: Callable[..., Any], **arguments: Any) -> Any:
    """Call a built-in rule, which may take CPU_LIMIT_S seconds of CPU time and _EXTRA_BYTES.

    The kernel ends the process after the time (SIGPROF): neither an integer of a billion digits
    nor a parser without end returns to the interpreter, and the time of a busy machine does not
    count.
    """
    try:
        with memory_limit(_EXTRA_BYTES):
            signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
            try:
                return function(**arguments)
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
    except (MemoryError, RecursionError):
        return GIVEN_UP


def _fork_guarded(parent: int, files: Sequence[int]) -> None:
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
