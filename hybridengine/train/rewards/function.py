"""Import a `compute_score` function, with verl's signature; convert what it returns.

Reward workers import this module: it needs only the standard library.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridengine.run.errors import RewardError, shorten
from hybridengine.train.rewards import rules

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
LIST_ARGUMENTS = (*BATCH_ARGUMENTS, "prompts")

CPU_LIMIT_S = 5.0  # of a call of a built-in rule
TIMED_OUT = "timed_out"  # result of a built-in rule: 1 for a response that it gave up on


@dataclass(frozen=True)
class FunctionSource:
    """Where a reward function is defined.

    is_async: whether it is a coroutine function.
    columns: of a function in TRL's form, the arguments that it takes, ("*",) for all; else None.
    rule: the name of a built-in rule, whose score is 0 for a call above CPU_LIMIT_S; "": the only
      limit is reward.timeout_s, which ends the run.
    checks_ground_truth: whether it is a built-in rule that has `rules.CHECK`.
    label: the name of its score among those of several functions.
    """

    file: Path
    name: str
    line: int
    label: str
    is_async: bool = False
    columns: tuple[str, ...] | None = None
    rule: str = ""
    checks_ground_truth: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.file}:{self.line})"


def reward_file(path: str | Path) -> Path:
    """Return the file of `path`, a Python file or the name of a built-in rule.

    Raises RewardError where it does not exist.
    """
    if str(path) in rules.BUILT_IN:
        return Path(rules.__file__)
    file = Path(path).expanduser().resolve()
    if file.is_dir():
        raise RewardError(
            f"reward file {file} is a folder; name the Python file in "
            "reward.custom_reward_function.path"
        )
    if not file.is_file():
        raise RewardError(
            f"reward file {file} does not exist; check reward.custom_reward_function.path"
        )
    return file


def import_reward_function(
    path: str | Path, name: str = "compute_score", arguments: Sequence[str] | None = ARGUMENTS
) -> tuple[Callable[..., Any], FunctionSource]:
    """Import `name` from the file `path` into this process, and check that it takes `arguments`.

    path: a Python file, or the name of a built-in rule.
    arguments: None does not check the signature.

    Raises RewardError for a missing file, a file that fails to import, a missing function, and a
    signature that does not take the arguments by name.
    """
    rule = rules.BUILT_IN.get(str(path))
    file = reward_file(path)
    module = rule() if rule else _module(file)
    call = getattr(module, name, None)
    if not callable(call):
        given = vars(module if isinstance(module, ModuleType) else type(module))
        functions = [n for n, v in given.items() if inspect.isfunction(v)]
        raise RewardError(
            f"reward file {file} has no function {name!r}; functions there: "
            f"{', '.join(functions) or 'none'} (reward.custom_reward_function.name)"
        )
    columns = trl_columns(call)
    if arguments is not None and columns is None:
        _check_signature(call, name, file, arguments)
    code = getattr(inspect.unwrap(call), "__code__", None)
    label = getattr(module, "label", file.stem) if rule else file.stem
    return call, FunctionSource(
        file,
        name,
        code.co_firstlineno if code else 1,
        label if name == "compute_score" else name,
        is_async=inspect.iscoroutinefunction(call),
        columns=columns,
        rule=str(path) if rule else "",
        checks_ground_truth=rule is not None and hasattr(module, rules.CHECK),
    )


def trl_columns(call: Callable[..., Any]) -> tuple[str, ...] | None:
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


def _check_signature(
    call: Callable[..., Any], name: str, file: Path, arguments: Sequence[str]
) -> None:
    signature: inspect.Signature | str = "(?)"
    try:
        signature = inspect.signature(call)
        signature.bind(**dict.fromkeys(arguments))
    except (TypeError, ValueError) as error:  # ValueError: a builtin without a signature
        raise RewardError(
            f"reward function {name} in {file} must accept {', '.join(arguments)} by name, "
            f"but its signature is {name}{signature}: {error}"
        ) from None


@cache
def _module(file: Path) -> Any:
    """Import the module of `file` once for all functions in it."""
    return import_file(file)


def import_file(file: Path) -> Any:
    """Import the user's file as a module.

    Raises RewardError, with the line, where it cannot be imported or ends the process.
    """
    spec = importlib.util.spec_from_file_location(f"_hybridengine_user_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise RewardError(f"file {file} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling in the user's file look it up
    try:
        spec.loader.exec_module(module)
    except RewardError:  # of a built-in rule, already a full message
        raise
    except SyntaxError as error:
        raise RewardError(
            f"file {error.filename}:{error.lineno} is not Python: {error.msg}"
        ) from None
    except (Exception, SystemExit) as error:
        where = error_line(error, file, 1)
        raise RewardError(
            f"file {where} fails to import: {type(error).__name__}: {error}"
        ) from error
    return module


def error_line(error: BaseException, file: Path, default: int) -> str:
    """`file:line` of the deepest frame of `file` in the traceback of `error`."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    return f"{file}:{lines[-1] if lines else default}"


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


def to_results(result: Any) -> dict[str, float | str]:
    """Return "score", a number, and the further numbers and texts of one result, by name.

    "pred", the answer that majority votes count, is always a text.

    result: a number (NumPy scalars and tensors of one element, too), or a mapping with "score".

    Raises ValueError for anything that is neither a finite number nor a text.
    """
    given = result if isinstance(result, Mapping) else {"score": result}
    if "score" not in given:
        raise ValueError(f"returned a dict without 'score' (keys {sorted(map(str, given))})")
    results: dict[str, float | str] = {}
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
            raise ValueError(f"{what} is {show(value)} ({kind}), expected a finite number")
    return results


def to_text(value: str | float | None) -> str:
    """Return a text that can be encoded; 42.0 as 42."""
    text = value if isinstance(value, str) else str(value).removesuffix(".0")
    return text.encode(errors="backslashreplace").decode()  # half surrogate pairs


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


def show(value: Any) -> str:
    """Return repr(value), cut in the middle; its type where repr fails (an int of 5,000 digits)."""
    try:
        return shorten(repr(value), 200)
    except Exception as error:
        return f"<{type(value).__name__}: {type(error).__name__}>"
