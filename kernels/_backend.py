"""Which implementation of an operator runs: chosen by device, or by name.

An operator registers its backends per device in order of preference. `HYBRIDENGINE_BACKEND` or
an operator's `backend=` picks one; a choice that cannot work here is an error that says why.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import NamedTuple

import torch

_REGISTERED: dict[str, dict[str, tuple[str, ...]]] = {}


class BackendRow(NamedTuple):
    """One line of `backend_table()`."""

    op: str
    device: str
    backend: str
    why: str


@functools.cache
def native():
    """The extension module `hybridengine._C`, or None where it was not built.

    Raises:
        ValueError: HYBRIDENGINE_ISA names no instruction set.
    """
    isa = os.environ.get("HYBRIDENGINE_ISA") or "avx512"
    if isa not in ("portable", "avx2", "avx512"):
        raise ValueError(f"HYBRIDENGINE_ISA is {isa!r}; expected portable, avx2 or avx512.")
    try:
        from hybridengine import _C
    except ImportError:
        return None
    return _C


@functools.cache
def _missing(backend: str, device: str) -> str | None:
    """Why `backend` cannot run on `device`, or None if it can."""
    if backend == "reference":
        return None
    if backend == "cpp":
        if device != "cpu":
            return f"it runs on CPU tensors, these are on {device}"
        return None if native() else "hybridengine._C is not built (pip install -e .)"
    if device != "cuda":
        return f"it runs on CUDA tensors, these are on {device}"
    if backend == "cuda":
        if native() is None:
            return "hybridengine._C is not built (pip install -e .)"
        return None if native().with_cuda else "hybridengine._C was built without CUDA"
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def register_backends(op: str, **by_device: tuple[str, ...]) -> None:
    """Declare the backends of `op` per device type, best first: cpu=("cpp", "reference")."""
    _REGISTERED[op] = by_device


def choose_backend(op: str, device: torch.device, requested: str | None = None) -> str:
    """The backend that runs `op` on `device`.

    Raises:
        ValueError: the requested backend (argument or HYBRIDENGINE_BACKEND) does not exist for
            this operator or cannot run here; the message names what is missing.
    """
    requested = requested or os.environ.get("HYBRIDENGINE_BACKEND") or None
    return _choose(op, device.type, requested)[0]


@functools.cache
def _choose(op: str, device: str, requested: str | None) -> tuple[str, str]:
    offered = _REGISTERED[op].get(device, ("reference",))
    if requested is not None:
        known = sorted({name for names in _REGISTERED[op].values() for name in names})
        if requested not in known:
            raise ValueError(
                f"{op}: backend {requested!r} does not exist; expected one of {', '.join(known)}."
            )
        reason = _missing(requested, device)
        if reason is not None:
            raise ValueError(
                f"{op}: backend {requested!r} cannot run here: {reason}. "
                "Leave backend= and HYBRIDENGINE_BACKEND unset to take the best one."
            )
        return requested, "requested"
    skipped = []
    for name in offered:
        reason = _missing(name, device)
        if reason is None:
            return name, "; ".join(skipped) or f"best for {device}"
        skipped.append(f"{name}: {reason}")
    return "reference", "; ".join(skipped)


def backend_table() -> list[BackendRow]:
    """Rows (op, device, backend, why) for every operator and every device of this machine."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    requested = os.environ.get("HYBRIDENGINE_BACKEND") or None
    rows = []
    for op in sorted(_REGISTERED):
        for device in devices:
            try:
                rows.append(BackendRow(op, device, *_choose(op, device, requested)))
            except ValueError as error:
                rows.append(BackendRow(op, device, "none", str(error)))
    return rows
