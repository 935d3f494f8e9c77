"""Reward functions given from Python: lambdas, closures, functions of a notebook.

    with given_functions([my_function]) as paths:        # ["python:my_function"]
        config = load_config(…, {"reward.custom_reward_function.path": paths})

They run in a thread of this process, one call at a time, so that they share the variables they
were written with. Time-outs, checks and messages are those of worker processes. A call that takes
too long ends the run; its thread cannot be killed and is left behind.
"""

from __future__ import annotations

import copy
import inspect
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from hybridengine.rewards.calls import Calls, Failure, late, source_of
from hybridengine.run.errors import RewardError
from hybridengine.train.rewards.function import (
    ARGUMENTS,
    BATCH_ARGUMENTS,
    CallError,
    FunctionSource,
    Results,
    RewardFunction,
)

_PREFIX = "python:"  # of the name of such a function in reward.custom_reward_function.path

_GIVEN: dict[str, Callable[..., Any]] = {}  # by the name with its prefix
_PROMPT: dict[tuple[str, ...], str] = {ARGUMENTS: "prompt", BATCH_ARGUMENTS: "prompts"}


@contextmanager
def given_functions(functions: Sequence[Callable[..., Any]]) -> Iterator[list[str]]:
    """While open, the functions can be named in reward.custom_reward_function.path."""
    names: list[str] = []
    for function in functions:
        while isinstance(function, partial):
            function = function.func
        name = getattr(function, "__name__", type(function).__name__)
        own = _PREFIX + ("lambda" if name == "<lambda>" else name)
        numbered = (f"{own}_{k}" for k in count(2))
        names.append(next(n for n in chain([own], numbered) if n not in names))
    _GIVEN.update(zip(names, functions, strict=True))
    try:
        yield names
    finally:
        for name in names:
            _GIVEN.pop(name, None)


def is_given(path: str | Path) -> bool:
    """Return whether `path` is the name of a function given from Python."""
    return str(path).startswith(_PREFIX)


def given_function(path: str) -> Callable[..., Any]:
    """Return the function of a name with the prefix; RewardError where none was given."""
    if path not in _GIVEN:
        raise RewardError(
            f"reward function {path!r} is not in this process; a run whose reward was given as "
            "hybridengine.Trainer(reward=...) is continued in the same way"
        )
    return _GIVEN[path]


class LocalFunctions:
    """A `Caller` of functions of this process, in one thread, in the order of the responses."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self._timeout_s = timeout_s
        self._functions: list[Callable[..., Any]] = []  # by the key of a `RewardFunction`
        self._thread: _Thread | None = None

    def load(
        self, path: str | Path, name: str = "compute_score", arguments: Sequence[str] = ARGUMENTS
    ) -> RewardFunction:
        """Return the function given as `path`, called with those of `arguments` that it takes.

        `prompt`, the chat, may be among them. Raises RewardError where it requires others.
        arguments: () does not check what it takes.
        """
        function = given_function(str(path))
        source = source_of(function, str(path).removeprefix(_PREFIX))
        if source.columns is None and arguments:
            arguments = _accepted(function, source.name, tuple(arguments))
        self._functions.append(function)
        return RewardFunction(source, len(self._functions) - 1, self, arguments)

    def call(
        self, function: RewardFunction, columns: Mapping[str, Sequence[Any]], size: int
    ) -> list[Results]:
        """Call `function` on `size` responses; columns: its arguments, which it gets a copy of.

        Raises CallError for a call that raises, takes longer than the time-out or has no valid
        result.
        """
        thread = self._thread = self._thread or _Thread()
        source, limit = function.source, self._timeout_s
        own = copy.deepcopy(dict(columns))
        thread.requests.put(
            (self._functions[function.key], source, own, size, function.takes_lists)
        )
        results: dict[int, Results] = {}
        deadline = time.monotonic() + limit
        try:
            while len(results) < size:
                try:
                    wait_s = max(0.0, deadline - time.monotonic())
                    index, seconds, outcome = thread.replies.get(timeout=wait_s)
                except Empty:
                    missing = next(i for i in range(size) if i not in results)
                    raise late(function, limit, thread.running_line(source), missing) from None
                if seconds > limit:
                    raise late(function, limit, f"{source.file}:{source.line}", index)
                if isinstance(outcome, Failure):
                    raise CallError(outcome.message, index)
                results[index] = outcome
                if not source.is_async:  # async calls all started together
                    deadline = time.monotonic() + limit
        finally:
            if len(results) < size:  # late replies would be taken for those of the next call
                thread.end()
                self._thread = None
        return [results[i] for i in range(size)]


class _Thread:
    """A thread that makes calls, one request after the other.

    requests: arguments of `Calls.run`; None ends it, after the call that it is in.
    replies: (index, seconds, outcome), see `Calls`.
    """

    def __init__(self) -> None:
        self.requests, self.replies = SimpleQueue[Any](), SimpleQueue[Any]()
        queues = self.requests, self.replies
        self._thread = threading.Thread(
            target=_serve, args=queues, name="reward-functions", daemon=True
        )
        self._thread.start()
        self.end = weakref.finalize(self, self.requests.put, None)

    def running_line(self, source: FunctionSource) -> str:
        """Return `file:line` of the running call, of the function where it is elsewhere."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        lines = [x.lineno for x in traceback.extract_stack(frame) if x.filename == str(source.file)]
        return f"{source.file}:{lines[-1] if frame and lines else source.line}"


def _serve(requests: SimpleQueue[Any], replies: SimpleQueue[Any]) -> None:
    calls = Calls(replies.put)
    while (request := requests.get()) is not None:
        calls.run(*request)


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
