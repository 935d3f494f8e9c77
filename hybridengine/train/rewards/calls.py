"""Call a reward function on responses; what its callers share: a thread, processes, a service.

Reward workers import this module: it needs only the standard library.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from hybridengine.run.errors import RewardError, shorten
from hybridengine.train.rewards.function import (
    ARGUMENTS,
    LIST_ARGUMENTS,
    FunctionSource,
    error_line,
    show,
    to_results,
    to_rows,
)


class Caller(Protocol):
    """Loads reward functions and calls them on responses."""

    def load(
        self, path: str | Path, name: str = "compute_score", arguments: Sequence[str] = ARGUMENTS
    ) -> RewardFunction:
        """Load the function `name` of `path`, which takes `arguments` by name.

        Raises RewardError where it cannot be loaded.
        """
        ...

    def call(
        self, function: RewardFunction, columns: Mapping[str, Sequence[Any]], size: int
    ) -> list[dict[str, float | str]]:
        """Call `function` on `size` responses; return its results (`to_results`).

        columns: its arguments, a value for each response.
        Raises CallError for a call without a valid result.
        """
        ...


class CallError(RewardError):
    """Call number `index` of a function (None: the call with lists) has no result."""

    def __init__(self, message: str, index: int | None) -> None:
        super().__init__(message)
        self.index = index


@dataclass(frozen=True)
class RewardFunction:
    """A reward function, loaded by `caller`, and the names of the arguments it is called with."""

    source: FunctionSource
    key: int
    caller: Caller = field(repr=False)
    arguments: Sequence[str] = ARGUMENTS

    @property
    def takes_lists(self) -> bool:
        """Whether one call scores all responses, as in verl's batch manager and in TRL."""
        return self.source.columns is not None or any(x in LIST_ARGUMENTS for x in self.arguments)


@dataclass(frozen=True)
class Failure:
    """Why a function could not be loaded, or a call has no result."""

    message: str


Outcome = dict[str, float | str] | Failure


def rows_of(results: Sequence[Outcome] | Failure) -> list[dict[str, float | str]]:
    """Return the results of a call with lists; raise CallError where one is a failure."""
    if isinstance(results, Failure):
        raise CallError(results.message, None)
    rows: list[dict[str, float | str]] = []
    for i, result in enumerate(results):
        if isinstance(result, Failure):
            raise CallError(result.message, i)
        rows.append(result)
    return rows


class Calls:
    """Calls functions in this thread.

    functions: with their sources, by key.
    send: takes (index, seconds, outcome) as soon as a call ends.
    """

    def __init__(
        self,
        functions: Mapping[int, tuple[Callable[..., Any], FunctionSource]],
        send: Callable[[tuple[int, float, Any]], None],
    ) -> None:
        self._functions, self._send = functions, send

    def each(self, key: int, calls: Sequence[Mapping[str, Any]]) -> None:
        """Call a function once for each response; calls of a coroutine function run together."""
        if self._functions[key][1].is_async:
            self.event_loop.run_until_complete(self._gather(key, calls))
            return
        for i, arguments in enumerate(calls):
            started = time.perf_counter()
            outcome = self._call(key, arguments)
            self._send((i, time.perf_counter() - started, outcome))

    def batch(self, key: int, arguments: Mapping[str, Sequence[Any]], size: int) -> None:
        """Call a function once with lists; its outcome is a list of those of the responses."""
        started = time.perf_counter()
        outcomes = self._call_with_lists(key, arguments, size)
        self._send((0, time.perf_counter() - started, outcomes))

    @cached_property
    def event_loop(self) -> Any:
        """One event loop for all calls, for clients that functions keep."""
        import asyncio  # takes longer than the rest of a worker's imports

        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop

    def _call(self, key: int, arguments: Mapping[str, Any]) -> Outcome:
        function, source = self._functions[key]
        try:
            return _outcome(self._result(function(**arguments)), source)
        except BaseException as error:  # also SystemExit, which would end the worker
            return _raised(error, source)

    def _call_with_lists(
        self, key: int, arguments: Mapping[str, Sequence[Any]], size: int
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

    async def _gather(self, key: int, calls: Sequence[Mapping[str, Any]]) -> None:
        """Run all calls concurrently; send each outcome when it is ready."""
        import asyncio

        function, source = self._functions[key]
        started = time.perf_counter()

        async def one(i: int, arguments: Mapping[str, Any]) -> None:
            try:
                outcome = _outcome(await function(**arguments), source)
            except BaseException as error:
                outcome = _raised(error, source)
            self._send((i, time.perf_counter() - started, outcome))

        await asyncio.gather(*(one(i, arguments) for i, arguments in enumerate(calls)))

    def _result(self, value: Any) -> Any:
        """Return the value, awaited if it is an awaitable."""
        return self.event_loop.run_until_complete(value) if hasattr(value, "__await__") else value


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
