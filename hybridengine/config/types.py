"""The types of settings: ranges, paths, lists, names."""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

__all__ = [
    "Count",
    "Discount",
    "Dtype",
    "Flag",
    "KLLossType",
    "KLType",
    "Loggers",
    "Natural",
    "NotNegative",
    "Number",
    "Options",
    "OrOff",
    "PathText",
    "PathTexts",
    "Positive",
    "Seed",
    "Share",
    "Texts",
    "Truncation",
]

Count = Annotated[int, Field(ge=1, strict=True)]
Natural = Annotated[int, Field(ge=0, strict=True)]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1, strict=True)]  # numpy and vLLM take 32 bits
OrOff = Annotated[int, Field(ge=-1, strict=True)]  # -1: off, or all
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1, strict=True)]
Discount = Annotated[float, Field(ge=0, le=1, strict=True)]
Flag = Annotated[bool, Field(strict=True)]


def _listed(given: Any) -> Any:
    """A text alone is a list of one."""
    return ((given,) if given else ()) if isinstance(given, str) else given


def _home_expanded(given: Any) -> Any:
    """`~` at the start of a path, or of each of several, is the home folder."""
    if isinstance(given, tuple):
        return tuple(map(_home_expanded, given))
    return os.path.expanduser(given) if isinstance(given, str) else given


Texts = Annotated[tuple[str, ...], BeforeValidator(_listed)]
PathText = Annotated[str, AfterValidator(_home_expanded)]
PathTexts = Annotated[Texts, AfterValidator(_home_expanded)]
Options = Mapping[str, Any]  # free keys, handed on to another library
Logger = Literal["console", "jsonl", "tensorboard", "wandb"]
Loggers = Annotated[tuple[Logger, ...], BeforeValidator(_listed)]
Truncation = Literal["error", "left", "right"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
KLType = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
KLLossType = Literal[KLType, "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"]
