"""Call reward functions on responses, and convert what they return.

Reward workers import this module: it needs only the standard library.
"""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Real
from pathlib import Path
from typing import Any

from hybridengine.run import error_line
from hybridengine.run.errors import RewardError, shorten
from hybridengine.train.rewards.function import (
    CallError,
    FunctionSource,
    Results,
    RewardFunction,
    to_text,
)

__all__ = ["Calls", "Failure", "late", "source_of", "to_results", "to_rows"]


def source_of(call: Callable[..., Any], name: str, file: Path | None = None) -> FunctionSource:
    """Return the source of a function, partial function, method or callable object.

    file: None: where its code is.
    """
    own = call
    while isinstance(own, partial):
        own = own.func
    own = own if hasattr(own, "__code__") else getattr(own, "__call__", own)  # noqa: B004
    code = getattr(inspect.unwrap(own), "__code__", None)
    file = file or Path(code.co_filename if code else "<builtin>")
    line, is_async = code.co_firstlineno if code else 1, inspect.iscoroutinefunction(own)
    label = file.stem if name == "compute_score" else name
    return FunctionSource(file, name, line, label, is_async, _trl_columns(call))


def _trl_columns(call: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the arguments of a function in TRL's form, ("*",) for any; None for another form.

    Its form is `(prompts, completions, **columns) -> list[float]`; an argument without a default
    has to be a column of every row.
    """
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError):  # a builtin without a signature
        return None
    if "completions" not in parameters:
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return ("*",)
    return tuple(parameters)


def late(function: RewardFunction, limit_s: float, where: str, index: int | None) -> CallError:
    """Return the error of the call for response `index`, which takes too long at `where`."""
    limit = f"reward.timeout_s = {limit_s:g} s"
    what = f"reward function {function.source.name} returned no result within {limit} at {where}"
    return CallError(what, None if function.takes_lists else index)


@dataclass(frozen=True)
class Failure:
    """Why a function could not be loaded, or a call has no result."""

    message: str


class Calls:
    """Calls functions in this thread.

    send: takes (index, seconds, outcome) as soon as a response is scored; the outcome is `Results`
      or a Failure, and its index is None where it is that of a call with lists.
    """

    def __init__(self, send: Callable[[tuple[int | None, float, Any]], None]) -> None:
        self._send = send

    def run(
        self,
        call: Callable[..., Any],
        source: FunctionSource,
        columns: Mapping[str, Sequence[Any]],
        size: int,
        takes_lists: bool,
    ) -> None:
        """Call a function on `size` responses: once with lists, or once for each.

        Calls of a coroutine function run together.
        """
        started = time.perf_counter()
        if takes_lists:
            outcomes = _outcomes(self._result(call, source, columns), source, size)
            for index, outcome in outcomes.items():
                self._send((index, time.perf_counter() - started, outcome))
            return
        rows = [{name: column[i] for name, column in columns.items()} for i in range(size)]
        if source.is_async:
            self.event_loop.run_until_complete(self._run_together(call, source, rows))
            return
        for i, row in enumerate(rows):
            started = time.perf_counter()
            outcome = _outcome(self._result(call, source, row), source)
            self._send((i, time.perf_counter() - started, outcome))

    @cached_property
    def event_loop(self) -> Any:
        """One event loop for all calls, for clients that functions keep."""
        import asyncio  # takes longer than the rest of a worker's imports

        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop

    def _result(
        self, call: Callable[..., Any], source: FunctionSource, arguments: Mapping[str, Any]
    ) -> Any:
        """Return what the function returns, awaited; a Failure where it raises."""
        try:
            value = call(**arguments)
            is_awaitable = hasattr(value, "__await__")
            return self.event_loop.run_until_complete(value) if is_awaitable else value
        except BaseException as error:  # also SystemExit, which would end the worker
            return _raised(error, source)

    async def _run_together(
        self, call: Callable[..., Any], source: FunctionSource, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        import asyncio

        started = time.perf_counter()

        async def run(i: int, row: Mapping[str, Any]) -> None:
            try:
                result = await call(**row)
            except BaseException as error:
                result = _raised(error, source)
            self._send((i, time.perf_counter() - started, _outcome(result, source)))

        await asyncio.gather(*map(run, range(len(rows)), rows))


def _outcomes(
    results: Any, source: FunctionSource, size: int
) -> Mapping[int | None, Results | Failure]:
    """Return the outcome of each response of a call with lists, by its number."""
    if isinstance(results, Failure):
        return {None: results}
    try:
        return {i: _outcome(x, source) for i, x in enumerate(to_rows(results, size))}
    except ValueError as error:
        return {None: Failure(f"reward function {source}: {error}")}


def _outcome(result: Any, source: FunctionSource) -> Results | Failure:
    try:
        return result if isinstance(result, Failure) else to_results(result)
    except ValueError as error:
        return Failure(f"reward function {source}: {error}")


def _raised(error: BaseException, source: FunctionSource) -> Failure:
    if isinstance(error, RewardError):  # of a built-in rule, already a full message
        return Failure(str(error))
    try:
        text = str(error)
    except Exception:
        text = _show(error)
    where = error_line(error, source.file, source.line)
    what = f"{type(error).__name__}: {shorten(text, 1000)}"
    return Failure(f"reward function {source.name} raised {what} at {where}")


def to_rows(results: Any, size: int) -> list[Any]:
    """Return the results of one call with lists of `size` responses as a list.

    Raises ValueError for anything but a sequence with one result for each.
    """
    if hasattr(results, "tolist"):
        results = results.tolist()  # an array or a tensor
    is_list = isinstance(results, Sequence) and not isinstance(results, str | bytes)
    if not is_list or len(results) != size:
        given = f"{len(results)} results" if is_list else f"{type(results)}"
        raise ValueError(f"returned {given} for {size} responses; expected a list with one each")
    return list(results)


def to_results(result: Any) -> Results:
    """Return "score", a number, and the further numbers and texts of one result, by name.

    "pred", the answer that majority votes count, is always a text.

    result: a number (NumPy scalars and tensors of one element, too), or a mapping with "score".

    Raises ValueError for anything that is neither a finite number nor a text.
    """
    given = result if isinstance(result, Mapping) else {"score": result}
    if "score" not in given:
        raise ValueError(f"returned a dict without 'score' (keys {sorted(map(str, given))})")
    results: Results = {}
    for name, value in given.items():
        number = _finite(value)
        if isinstance(value, str) and name != "score":
            results[str(name)] = to_text(value)
        elif name == "pred" and (number is not None or value is None):
            results["pred"] = to_text(number)
        elif number is not None:
            results[str(name)] = number
        else:
            what = repr(name) if given is result else "its result"
            kind = type(value).__name__
            raise ValueError(f"{what} is {_show(value)} ({kind}), expected a finite number")
    return results


def _finite(value: Any) -> float | None:
    if not isinstance(value, Real) and getattr(value, "size", None) is not None:
        try:
            value = value.item()  # a NumPy scalar, or an array or tensor with one element
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return None
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except (OverflowError, ValueError):  # an integer above 1.8e308
        return None
    return number if math.isfinite(number) else None


def _show(value: Any) -> str:
    """Return repr(value), cut in the middle; its type where repr fails (an int of 5,000 digits)."""
    try:
        return shorten(repr(value), 200)
    except Exception as error:
        return f"<{type(value).__name__}: {type(error).__name__}>"
