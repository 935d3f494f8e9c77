"""What `dtype: auto` stands for: bfloat16 where the hardware multiplies it fast, else float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hybridengine.config import JobConfig
from hybridengine.config.loading import keys_of
from hybridengine.config.types import Dtype
from hybridengine.kernels import has_fast_products

__all__ = ["describe_precision", "resolve_dtypes"]

_Config = TypeVar("_Config", bound=JobConfig)


def resolve_dtypes(config: _Config) -> _Config:
    """The configuration with a type in place of every `auto`.

    Inside a process group all ranks call and get the same one: float32 unless bfloat16 is fast on
    every rank.
    """
    fast = torch.tensor(int(_fast_bfloat16()))
    if dist.is_initialized():
        dist.all_reduce(fast, op=dist.ReduceOp.MIN)
    chosen = "bfloat16" if fast else "float32"
    for key, kind in keys_of(type(config)):
        if kind == Dtype and _get(config, key) == "auto":
            config = _put(config, key, chosen)
    return config


def describe_precision(*dtypes: tuple[str, str]) -> str:
    """Which part computes in which type, and why: dtypes are pairs (part, type)."""
    text = ", ".join(f"{part} {dtype}" for part, dtype in dtypes)
    if torch.cuda.is_available():
        return text
    if _fast_bfloat16():
        return f"{text}; this CPU has fast bfloat16 products (AVX512-BF16)"
    text += "; this CPU has no fast bfloat16 products (AVX512-BF16 or AMX)"
    if any(dtype != "float32" for _, dtype in dtypes):
        text += ", expect it to be slow: dtype=auto takes float32 here"
    return text


def _fast_bfloat16() -> bool:
    return has_fast_products(torch.bfloat16, "cuda" if torch.cuda.is_available() else "cpu")


def _get(group: Any, key: str) -> Any:
    for name in key.split("."):
        group = getattr(group, name)
    return group


def _put(group: Any, key: str, value: Any) -> Any:
    name, _, rest = key.partition(".")
    return replace(group, **{name: _put(getattr(group, name), rest, value) if rest else value})
