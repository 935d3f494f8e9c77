"""The loop of a reward worker: load a function, call it on responses, send numbers back.

Requests arrive over one connection, pickled:

    ("load", key, path, name, arguments)    → FunctionSource, or Fault
    ("call", key, kwargs of N calls)        → (i, seconds, Outcome) as each ends
    ("batch", key, kwargs with lists, N)    → (0, seconds, list of Outcome)

The process ends when the connection is closed, and is killed when its parent is.
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
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from hybridengine.reward_worker.function import (
    FunctionSource,
    RewardError,
    error_line,
    import_reward_function,
)
from hybridengine.reward_worker.results import shorten, to_numbers, to_rows

__all__ = ["Fault", "Outcome", "main"]

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Fault:
    """Why there are no numbers; goes on from the function's name, unless is_complete."""

    text: str
    is_complete: bool = False


Outcome = dict[str, float] | Fault


def main(connection_fd: int, stack_fd: int, parent: int, index: int) -> None:
    """Serve requests until the connection is closed.

    stack_fd: where SIGUSR1 writes the stack of the running call; parent: the process to end with;
    index: of this worker, the seed of `random`.
    """
    if hasattr(ctypes.CDLL(None), "prctl"):  # Linux; elsewhere a closed connection has to do
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return  # it ended before the line above
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stack_fd, all_threads=False)
    random.seed(index)
    with suppress(EOFError, ConnectionError):  # closed or reset: the rank has ended
        _Worker(Connection(connection_fd)).serve()


class _Worker:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._functions: dict[int, tuple[Callable[..., Any], FunctionSource]] = {}
        self._loop: Any = None  # one event loop for all calls: clients that they keep belong to it

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
                self._event_loop().run_until_complete(self._gather(key, *request))
            else:
                for i, arguments in enumerate(*request):
                    started = time.perf_counter()
                    outcome = self._call(key, arguments)
                    self._send((i, time.perf_counter() - started, outcome))

    def _send(self, message: Any) -> None:
        for stream in (sys.stdout, sys.stderr):  # what the function printed comes first
            if stream is not None and not stream.closed:
                stream.flush()
        self._connection.send(message)

    def _load(self, key: int, *where: Any) -> FunctionSource | Fault:
        try:
            self._functions[key] = import_reward_function(*where)
        except RewardError as error:
            return Fault(str(error), is_complete=True)
        if self._functions[key][1].is_async:
            self._event_loop()  # whose import is no part of a call's time
        return self._functions[key][1]

    def _call(self, key: int, arguments: dict[str, Any]) -> Outcome:
        function, source = self._functions[key]
        try:
            return _outcome(self._result(function(**arguments)), source)
        except BaseException as error:  # SystemExit must not end the worker without a word
            return _raised(error, source)

    def _batch(
        self, key: int, arguments: dict[str, Sequence[Any]], wanted: int
    ) -> list[Outcome] | Fault:
        function, source = self._functions[key]
        try:
            results = self._result(function(**arguments))
        except BaseException as error:
            return _raised(error, source)
        try:
            return [_outcome(result, source) for result in to_rows(results, wanted)]
        except ValueError as error:
            return _no_numbers(error, source)

    async def _gather(self, key: int, calls: Sequence[dict[str, Any]]) -> None:
        """All calls at once; each outcome is sent as soon as it is there."""
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

    def _result(self, given: Any) -> Any:
        """Await what has to be awaited."""
        if not hasattr(given, "__await__"):
            return given

        async def awaited() -> Any:
            return await given

        return self._event_loop().run_until_complete(awaited())

    def _event_loop(self) -> Any:
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop


def _outcome(result: Any, source: FunctionSource) -> Outcome:
    try:
        return to_numbers(result)
    except ValueError as error:
        return _no_numbers(error, source)


def _no_numbers(error: ValueError, source: FunctionSource) -> Fault:
    return Fault(f"({source.file}:{source.line}): {error}")


def _raised(error: BaseException, source: FunctionSource) -> Fault:
    if isinstance(error, RewardError):  # of a built-in rule, in words of its own
        return Fault(str(error), is_complete=True)
    try:
        text = str(error)
    except Exception:
        text = shorten(error)
    if len(text) > 1000:
        text = f"{text[:500]}…{text[-499:]}"
    where = error_line(error, source.file, source.line)
    return Fault(f"raised {type(error).__name__}: {text} at {where}")
