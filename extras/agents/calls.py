"""Run a user's function or coroutine function with a time-out, without blocking the engine."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

__all__ = ["call"]


async def call(function: Callable[..., Any], *args: Any, timeout_s: float, **kwargs: Any) -> Any:
    """Return `await function(...)`, or `function(...)` of a function that is not async.

    The latter runs in a thread of its own. A call that takes longer than `timeout_s` is left alone:
    a coroutine is cancelled, a thread runs on and its result is dropped.

    Raises what the function raises, RuntimeError for sys.exit in it, TimeoutError.
    """
    if inspect.iscoroutinefunction(function):
        task = asyncio.ensure_future(_guard(function(*args, **kwargs)))
    else:
        task = asyncio.ensure_future(_in_thread(lambda: function(*args, **kwargs)))
    done, _ = await asyncio.wait({task}, timeout=timeout_s)
    if not done:
        task.cancel()  # and not awaited: a coroutine may ignore it
        raise TimeoutError(f"no result within {timeout_s:g} s")
    result = task.result()
    if inspect.isawaitable(result):  # of a plain function that returns a coroutine
        return await call(_guard, result, timeout_s=timeout_s)
    return result


async def _guard(coroutine: Any) -> Any:
    try:
        return await coroutine
    except SystemExit as error:
        raise RuntimeError(f"it called sys.exit({error.code!r})") from None


async def _in_thread(function: Callable[[], Any]) -> Any:
    # Not a pool: its threads would be used up by calls that never return, and joined at exit.
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def resolve(outcome: tuple[Any, BaseException | None]) -> None:
        if not finished.done():
            finished.set_result(outcome)

    def run() -> None:
        try:
            outcome: tuple[Any, BaseException | None] = (function(), None)
        except BaseException as error:
            outcome = (None, error)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(resolve, outcome)

    threading.Thread(target=run, daemon=True, name="tool").start()
    result, error = await finished
    if isinstance(error, Exception):
        raise error
    if error is not None:
        raise RuntimeError(f"it ended with {type(error).__name__}: {error}")
    return result
