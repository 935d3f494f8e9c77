"""Reward functions given from Python: lambdas, closures, functions of a notebook.

    with given_functions([my_function]) as paths:        # ["python:my_function"]
        config = load_config(…, {"reward.custom_reward_function.path": paths})

They run in a thread of this process, one call at a time, so that they share the variables they
were written with. Time-outs, checks and messages are those of the worker processes. A call that
takes too long ends the run; its thread cannot be killed and is left behind.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from hybridengine.rewards.worker_main import CallServer
from hybridengine.rewards.workers import RewardFunction, RewardWorkers, Worker, WorkerError
from hybridengine.run.errors import RewardError
from hybridengine.train.rewards.function import (
    ARGUMENTS,
    BATCH_ARGUMENTS,
    FunctionSource,
    trl_columns,
)

PREFIX = "python:"  # of the name of such a function in reward.custom_reward_function.path

_GIVEN: dict[str, Callable[..., Any]] = {}  # by the name with its prefix
_PROMPT: dict[tuple[str, ...], str] = {ARGUMENTS: "prompt", BATCH_ARGUMENTS: "prompts"}


@contextmanager
def given_functions(functions: Sequence[Callable[..., Any]]) -> Iterator[list[str]]:
    """While open, the functions can be named in reward.custom_reward_function.path."""
    names: list[str] = []
    for function in functions:
        own = PREFIX + function_name(function)
        taken = (f"{own}_{k}" for k in range(2, len(functions) + 2))
        names.append(own if own not in names else next(n for n in taken if n not in names))
    _GIVEN.update(zip(names, functions, strict=True))
    try:
        yield names
    finally:
        for name in names:
            _GIVEN.pop(name, None)


def given_function(path: str) -> Callable[..., Any]:
    """Return the function of a name with the prefix; RewardError where none was given."""
    if path not in _GIVEN:
        raise RewardError(
            f"reward function {path!r} is not in this process; a run whose reward was given as "
            "hybridengine.Trainer(reward=...) is continued in the same way"
        )
    return _GIVEN[path]


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function, or of the class of another callable."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    return "lambda" if name == "<lambda>" else str(name)


class LocalFunctions(RewardWorkers):
    """Calls functions of this process in one thread, in the order of the responses."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        super().__init__(1, timeout_s)
        self._functions: dict[int, tuple[Callable[..., Any], FunctionSource]] = {}

    def load(
        self, path: str | Path, name: str = "compute_score", arguments: Sequence[str] = ARGUMENTS
    ) -> RewardFunction:
        """Return the function given as `path`, called with those of `arguments` that it takes.

        `prompt`, the chat, may be among them. Raises RewardError where it requires others.
        """
        function = given_function(str(path))
        source = _source_of(function, str(path).removeprefix(PREFIX))
        if source.columns is None:
            arguments = _accepted(function, source.name, tuple(arguments))
        key = len(self._functions)
        self._functions[key] = (function, source)
        return RewardFunction(source, key, self, arguments)

    def _start(self, indices: Collection[int]) -> None:
        if not self._workers or self._workers[0].has_ended():
            self._workers[0] = _Thread(self._functions)


class _Thread(Worker):
    """A worker that is a thread: its functions are there, and it cannot be killed."""

    def __init__(self, functions: dict[int, tuple[Callable[..., Any], FunctionSource]]) -> None:
        self.index, self.loaded = 0, [source for _, source in functions.values()]
        self.deadline = time.monotonic()
        self.connection, theirs = Pipe()
        self._thread = threading.Thread(
            target=_serve, args=(theirs, functions), name="reward-functions", daemon=True
        )
        self._thread.start()

    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)

    def kill(self) -> None:
        self.connection.close()  # on which the thread ends, after the call that it is in

    def _ended(self) -> WorkerError:
        return WorkerError("ended its thread")

    def _running_line(self, file: Path) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        for call in reversed(traceback.extract_stack(frame) if frame else []):
            if call.filename == str(file):
                return f"{file}:{call.lineno}"
        return ""


def _serve(
    connection: Connection, functions: dict[int, tuple[Callable[..., Any], FunctionSource]]
) -> None:
    with suppress(EOFError, OSError):  # closed, maybe while a late result is sent
        CallServer(connection, functions).serve()


def _accepted(
    function: Callable[..., Any], name: str, arguments: tuple[str, ...]
) -> tuple[str, ...]:
    """Return which of `arguments`, and the prompt, the function takes by name."""
    offered = (*arguments, _PROMPT[arguments])
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        parameters = ()  # type: ignore[assignment]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in named if p.default is p.empty and p.name not in offered]
    required += [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    accepted = offered if takes_any else tuple(p.name for p in named if p.name in offered)
    if required or not accepted:
        what = f"requires {required[0]!r}" if required else "takes none of them"
        raise RewardError(
            f"reward function {name} {what}; it is called with those of {', '.join(offered)} "
            "that it takes by name"
        )
    return accepted


def _source_of(given: Callable[..., Any], name: str) -> FunctionSource:
    function = given
    while isinstance(function, functools.partial):
        function = function.func
    own = function if hasattr(function, "__code__") else getattr(function, "__call__", function)  # noqa: B004
    code = getattr(inspect.unwrap(own), "__code__", None)
    file, line = (code.co_filename, code.co_firstlineno) if code else ("<builtin>", 1)
    is_async = inspect.iscoroutinefunction(own)
    return FunctionSource(Path(file), name, line, is_async, trl_columns(given))
