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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any

from hybridengine.rewards.guard import fork_guarded
from hybridengine.run.errors import RewardError, shorten
from hybridengine.run.host_memory import memory_limit
from hybridengine.train.rewards.function import FunctionSource, error_line, import_reward_function
from hybridengine.train.rewards.results import show, to_results, to_rows

TIMED_OUT = "timed_out"  # result of a built-in rule: 1 for a response that it gave up on
GIVEN_UP: dict[str, float | str] = {"score": 0.0, TIMED_OUT: 1.0}

_EXTRA_BYTES = 2 << 30  # that a call with a limit of its own may allocate


@dataclass(frozen=True)
class Failure:
    """Why a function could not be loaded, or a call has no result."""

    message: str


Outcome = dict[str, float | str] | Failure


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
        CallServer(Connection(connection_fd), {}).serve()


class CallServer:
    """Serves the requests that arrive on `connection`, with the functions loaded so far."""

    def __init__(
        self,
        connection: Connection,
        functions: dict[int, tuple[Callable[..., Any], FunctionSource]],
    ) -> None:
        self._connection, self._functions = connection, functions

    def serve(self) -> None:
        while True:
            kind, key, *request = self._connection.recv()
            if kind == "load":
                self._send(self._load(key, *request))
            elif kind == "batch":
                started = time.perf_counter()
                results = self._batch(key, *request)
                self._send((0, time.perf_counter() - started, results))
            elif self._functions[key][1].is_async:
                self._loop.run_until_complete(self._gather(key, *request))
            else:
                for i, arguments in enumerate(*request):
                    started = time.perf_counter()
                    outcome = self._call(key, arguments)
                    self._send((i, time.perf_counter() - started, outcome))

    def _send(self, message: Any) -> None:
        for stream in (sys.stdout, sys.stderr):  # print the function's output first
            if stream is not None and not stream.closed:
                stream.flush()
        self._connection.send(message)

    def _load(self, key: int, *where: Any) -> FunctionSource | Failure:
        try:
            self._functions[key] = import_reward_function(*where)
        except RewardError as error:
            return Failure(str(error))
        if self._functions[key][1].is_async:
            _ = self._loop  # so that importing asyncio is no part of a call's time
        return self._functions[key][1]

    def _call(self, key: int, arguments: dict[str, Any]) -> Outcome:
        function, source = self._functions[key]
        try:
            with _limits(source.cpu_limit_s):
                result = self._result(function(**arguments))
            return _outcome(result, source)
        except BaseException as error:  # also SystemExit, which would end the worker
            if source.cpu_limit_s and isinstance(error, MemoryError | RecursionError):
                return GIVEN_UP
            return _raised(error, source)

    def _batch(
        self, key: int, arguments: dict[str, Sequence[Any]], size: int
    ) -> list[Outcome] | Failure:
        function, source = self._functions[key]
        try:
            results = self._result(function(**arguments))
        except BaseException as error:
            return _raised(error, source)
        try:
            return [_outcome(result, source) for result in to_rows(results, size)]
        except ValueError as error:
            return _invalid(error, source)

    async def _gather(self, key: int, calls: Sequence[dict[str, Any]]) -> None:
        """Run all calls concurrently; send each outcome when it is ready."""
        import asyncio

        function, source = self._functions[key]
        started = time.perf_counter()

        async def one(i: int, arguments: dict[str, Any]) -> None:
            try:
                outcome = _outcome(await function(**arguments), source)
            except BaseException as error:
                outcome = _raised(error, source)
            self._send((i, time.perf_counter() - started, outcome))

        await asyncio.gather(*(one(i, arguments) for i, arguments in enumerate(calls)))

    def _result(self, value: Any) -> Any:
        """Return the value, awaited if it is an awaitable."""
        return self._loop.run_until_complete(value) if hasattr(value, "__await__") else value

    @cached_property
    def _loop(self) -> Any:
        """One event loop for all calls, for clients that functions keep."""
        import asyncio

        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop


@contextmanager
def _limits(cpu_s: float | None) -> Iterator[None]:
    """Limit what a call takes; None: it has no limits of its own.

    After `cpu_s` seconds of CPU time the kernel ends the process (SIGPROF): neither an integer of a
    billion digits nor a parser without end returns to the interpreter, and the time of a busy
    machine does not count. Memory above _EXTRA_BYTES is a MemoryError.
    """
    if cpu_s is None:
        yield
        return
    with memory_limit(_EXTRA_BYTES):
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)


def _outcome(result: Any, source: FunctionSource) -> Outcome:
    try:
        return to_results(result)
    except ValueError as error:
        return _invalid(error, source)


def _invalid(error: ValueError, source: FunctionSource) -> Failure:
    return Failure(f"reward function {source}: {error}")


def _raised(error: BaseException, source: FunctionSource) -> Failure:
    if isinstance(error, RewardError):  # of a built-in rule, already a full message
        return Failure(str(error))
    try:
        text = str(error)
    except Exception:
        text = show(error)
    where = error_line(error, source.file, source.line)
    what = f"{type(error).__name__}: {shorten(text, 1000)}"
    return Failure(f"reward function {source.name} raised {what} at {where}")
