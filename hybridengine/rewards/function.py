"""Loading a `compute_score` function, with verl's signature, from a Python file."""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridengine.errors import UserError

__all__ = [
    "ARGUMENTS",
    "BATCH_ARGUMENTS",
    "RewardError",
    "RewardFunction",
    "import_file",
    "load_reward_function",
]

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_BUILT_IN = {"math_verify": Path(__file__).with_name("math_rule.py")}


class RewardError(UserError):
    """A reward function that cannot be loaded, raised, or gave no number."""


@dataclass(frozen=True)
class RewardFunction:
    """A user's function with the place it came from."""

    call: Callable[..., Any]
    file: Path
    name: str
    line: int

    def __str__(self) -> str:
        return f"{self.name} ({self.file}:{self.line})"

    @property
    def label(self) -> str:
        """What its score is called beside those of other functions."""
        return self.file.stem if self.name == "compute_score" else self.name

    def error_line(self, error: BaseException) -> str:
        """`file:line` of the deepest frame of the user's file in the traceback of `error`."""
        return _error_line(error, self.file, self.line)


def load_reward_function(
    path: str | Path, name: str = "compute_score", arguments: Sequence[str] = ARGUMENTS
) -> RewardFunction:
    """Import `name` from the file `path` and check that it takes `arguments`, as verl calls it.

    path: a Python file, or "math_verify", the rule that comes with this package.

    Raises RewardError for a missing file, a file that fails to import, a missing function, and a
    signature that does not take the arguments by name.
    """
    file = _BUILT_IN.get(str(path), Path(path).expanduser().resolve())
    if not file.is_file():
        raise RewardError(
            f"reward file {file} does not exist; check reward.custom_reward_function.path"
        )
    module = import_file(file)
    call = getattr(module, name, None)
    if not callable(call):
        functions = [n for n, v in vars(module).items() if inspect.isfunction(v)]
        raise RewardError(
            f"reward file {file} has no function {name!r}; functions there: "
            f"{', '.join(functions) or 'none'} (reward.custom_reward_function.name)"
        )
    try:
        signature = inspect.signature(call)
        signature.bind(**dict.fromkeys(arguments))
    except TypeError as error:
        raise RewardError(
            f"reward function {name} in {file} must accept {', '.join(arguments)} by name, "
            f"but its signature is {name}{signature}: {error}"
        ) from None
    code = getattr(inspect.unwrap(call), "__code__", None)
    return RewardFunction(call, file, name, code.co_firstlineno if code else 1)


def import_file(file: Path) -> Any:
    """The user's file as a module; RewardError with its line where it cannot be imported."""
    spec = importlib.util.spec_from_file_location(f"_hybridengine_user_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling in the user's file look it up
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise RewardError(
            f"file {error.filename}:{error.lineno} is not Python: {error.msg}"
        ) from None
    except Exception as error:
        where = _error_line(error, file, 1)
        raise RewardError(
            f"file {where} fails to import: {type(error).__name__}: {error}"
        ) from error
    return module


def _error_line(error: BaseException, file: Path, default: int) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    return f"{file}:{lines[-1] if lines else default}"
