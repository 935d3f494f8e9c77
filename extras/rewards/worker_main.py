"""The loop of a reward worker: load a function, call it on responses, send the scores.

Requests arrive pickled over one connection:

    ("load", key, path, name, arguments)    → FunctionSource or Failure
    ("call", key, kwargs of N calls)        → (i, seconds, Outcome) when each call ends
    ("batch", key, kwargs with lists, N)    → (0, seconds, list of Outcome, or Failure)

The process ends when the connection is closed. With it, and when the rank ends, all processes end
that it has started (`guard`).
"""

from __future__ import annotations

import faulthandler
import random
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from hybridengine.rewards.guard import fork_guarded
from hybridengine.run.errors import RewardError
from hybridengine.run.host_memory import memory_limit
from hybridengine.train.rewards.calls import Calls, Failure
from hybridengine.train.rewards.function import (
    CPU_LIMIT_S,
    TIMED_OUT,
    FunctionSource,
    import_reward_function,
)

GIVEN_UP: dict[str, float | str] = {"score": 0.0, TIMED_OUT: 1.0}

_EXTRA_BYTES = 2 << 30  # that a call with a limit of its own may allocate


def main(connection_fd: int, stack_fd: int, parent: int, index: int) -> None:
    """Serve requests until the connection is closed.

    stack_fd: descriptor of the file to which SIGUSR1 writes the stack of the running call.
    parent: process id of the rank.
    index: the number of this worker, which is the seed of `random`.
    """
    fork_guarded(parent, (connection_fd, stack_fd))
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
    calls = Calls(functions, send)
    while True:
        kind, key, *request = connection.recv()
        if kind == "call":
            calls.each(key, *request)
        elif kind == "batch":
            calls.batch(key, *request)
        else:
            try:
                function, source = import_reward_function(*request)
            except RewardError as error:
                send(Failure(str(error)))
                continue
            if source.rule:
                function = partial(_limited, function)
            functions[key] = function, source
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
