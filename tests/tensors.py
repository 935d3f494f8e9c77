"""Parts and wholes of parameters, which are DTensors on several ranks and plain on one."""

from __future__ import annotations

from typing import Any

__all__ = ["part", "whole"]


def whole(tensor: Any) -> Any:
    """Return the whole of `tensor`; collective if it is sharded."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def part(tensor: Any) -> Any:
    """Return this rank's part of `tensor`, not copied."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
