"""What the run knows of a reward function, and of what calls it.

A `Caller`, which an optional package registers, loads functions and calls them: in a thread of
this process, or in another one. Reward workers import this module: it needs only the standard
library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hybridengine.run.errors import RewardError

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
LIST_ARGUMENTS = (*BATCH_ARGUMENTS, "prompts")
TIMED_OUT = "timed_out"  # result of a built-in rule: 1 for a response that it gave up on

Results = dict[str, float | str]  # of a response: "score", a number, and further results


@dataclass(frozen=True)
class FunctionSource:
    """Where a reward function is defined.

    is_async: whether it is a coroutine function.
    columns: of a function in TRL's form, the arguments that it takes, ("*",) for all; else None.
    rule: the name of a built-in rule, whose score is 0 for a call that takes too long; "": the only
      limit is reward.timeout_s, which ends the run.
    label: the name of its score among those of several functions.
    """

    file: Path
    name: str
    line: int
    label: str
    is_async: bool = False
    columns: tuple[str, ...] | None = None
    rule: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.file}:{self.line})"


@dataclass(frozen=True)
class RewardFunction:
    """A reward function, loaded by `caller`, and the names of the arguments it is called with.

    check_rows: takes samples; raises RewardError for one to which no response can be right.
    """

    source: FunctionSource
    key: int
    caller: Caller = field(repr=False)
    arguments: Sequence[str] = ARGUMENTS
    check_rows: Callable[[Iterable[Any]], None] = field(default=lambda samples: None, repr=False)

    @property
    def takes_lists(self) -> bool:
        """Whether one call scores all responses, as in verl's batch manager and in TRL."""
        return self.source.columns is not None or any(x in LIST_ARGUMENTS for x in self.arguments)


class Caller(Protocol):
    """Loads reward functions and calls them on responses."""

    def load(
        self, path: str | Path, name: str = "compute_score", arguments: Sequence[str] = ARGUMENTS
    ) -> RewardFunction:
        """Load the function `name` of `path`, which takes `arguments` by name.

        arguments: () does not check what it takes.
        Raises RewardError where it cannot be loaded.
        """
        ...

    def call(
        self, function: RewardFunction, columns: Mapping[str, Sequence[Any]], size: int
    ) -> list[Results]:
        """Call `function` on `size` responses; return its results.

        columns: its arguments, a value for each response.
        Raises CallError for a call without a valid result.
        """
        ...


class CallError(RewardError):
    """Call number `index` of a function (None: the call with lists) has no result."""

    def __init__(self, message: str, index: int | None) -> None:
        super().__init__(message)
        self.index = index


def to_text(value: str | float | None) -> str:
    """Return a text that can be encoded; 42.0 as 42."""
    text = value if isinstance(value, str) else str(value).removesuffix(".0")
    return text.encode(errors="backslashreplace").decode()  # half surrogate pairs
