"""The choice of an operator's backend, by device or by name.

An operator registers its backends per device in order of preference. `HYBRIDENGINE_BACKEND` or
an operator's `backend=` requests one; if it is not available, the error says why. The environment
is read once, at the import. The functions have no caches: torch.compile traces through them, and
warns of each cache that it meets.
"""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

ISAS = ("portable", "avx2", "avx512", "avx512_bf16")  # of the CPU kernels, narrowest first


def load_extension() -> tuple[Any, str]:
    """Import `hybridengine._C`; return it, or None and why it is missing.

    An extension that exists but does not load is warned of: everything still runs, but slowly. One
    that was built from older sources raises an error where a function that it lacks is called.

    Raises:
        ValueError: HYBRIDENGINE_ISA, which the extension reads, is no instruction set's name.
    """
    isa = os.environ.get("HYBRIDENGINE_ISA") or ISAS[-1]
    if isa not in ISAS:
        raise ValueError(
            f"HYBRIDENGINE_ISA is {isa!r}; expected {', '.join(ISAS[:-1])} or {ISAS[-1]}."
        )
    if importlib.util.find_spec("hybridengine._C") is None:
        return None, "hybridengine._C is not built (pip install -e .)"
    try:
        from hybridengine import _C
    except ImportError as error:
        reason = (
            f"hybridengine._C does not load with torch {torch.__version__} ({error}): install "
            "hybridengine again"
        )
        warnings.warn(reason, RuntimeWarning, stacklevel=2)
        return None, reason
    setattr(_C, "__getattr__", _refuse_missing)  # noqa: B010 (the stub does not have it)
    return _C, ""


def _refuse_missing(name: str) -> Any:
    """Raise the error for a name that the extension lacks: the module calls this."""
    if name.startswith("__"):  # Python asks modules for such names
        raise AttributeError(f"module 'hybridengine._C' has no attribute {name!r}")
    raise ImportError(
        f"hybridengine._C has no {name}: it was built from older sources than the Python files: "
        "build it again with `make setup`, or install hybridengine again."
    )


EXTENSION, WHY_NO_EXTENSION = load_extension()
_HAS_TRITON = importlib.util.find_spec("triton") is not None
REGISTERED: dict[str, dict[str, tuple[str, ...]]] = {}
_requested = os.environ.get("HYBRIDENGINE_BACKEND") or None


@contextmanager
def requested_backend(name: str | None) -> Iterator[None]:
    """Request this backend of every operator, as HYBRIDENGINE_BACKEND does; None: the best one."""
    global _requested
    before, _requested = _requested, name
    try:
        yield
    finally:
        _requested = before


class BackendRow(NamedTuple):
    """A row of `backend_table()`."""

    op: str
    device: str
    backend: str
    why: str


def native() -> Any:
    """Return the extension module `hybridengine._C`, or None if it cannot be used."""
    return EXTENSION


def has_triton() -> bool:
    """Return whether Triton is installed."""
    return _HAS_TRITON


def why_unavailable(backend: str, device: str) -> str | None:
    """Return why `backend` cannot run on `device`, or None if it can."""
    if backend in ("reference", "torch"):
        return None
    needs = "cpu" if backend == "cpp" else "cuda"
    if device != needs:
        return f"it runs on {needs.upper()} tensors, these are on {device}"
    if backend == "triton":
        return None if _HAS_TRITON else "triton is not installed"
    if EXTENSION is None:
        return WHY_NO_EXTENSION
    if backend == "cuda" and not EXTENSION.with_cuda:
        return "hybridengine._C was built without CUDA"
    return None


def register_backends(op: str, **by_device: tuple[str, ...]) -> None:
    """Declare the backends of `op` per device type, best first: cpu=("cpp", "reference")."""
    REGISTERED[op] = by_device


def choose_backend(
    op: str, device: torch.device, requested: str | None = None, dtype: torch.dtype | None = None
) -> str:
    """Return the backend that runs `op` on `device`; `reference` if `dtype` is float64.

    Raises:
        ValueError: the requested backend (argument or HYBRIDENGINE_BACKEND) does not exist for
            this operator or is not available; the message says what is missing.
    """
    requested, kind = requested or _requested, device.type
    chosen: str = REGISTERED[op].get(kind, ("reference",))[0]
    if requested is not None or why_unavailable(chosen, kind) is not None:
        chosen, _ = _choose(op, kind, requested)
    return "reference" if dtype == torch.float64 else chosen


def _choose(op: str, device: str, requested: str | None) -> tuple[str, str]:
    """Return the backend and the reason for it."""
    offered = REGISTERED[op].get(device, ("reference",))
    if requested is not None:
        known = sorted({name for names in REGISTERED[op].values() for name in names})
        if requested not in known:
            raise ValueError(
                f"{op}: backend {requested!r} does not exist; expected one of {', '.join(known)}."
            )
        reason = why_unavailable(requested, device)
        if reason is not None:
            raise ValueError(
                f"{op}: backend {requested!r} cannot run here: {reason}. "
                "Unset backend= and HYBRIDENGINE_BACKEND to use the best one."
            )
        return requested, "requested"
    skipped: list[str] = []
    for name in offered:
        reason = why_unavailable(name, device)
        if reason is None:
            return name, "; ".join(skipped) or f"best for {device}"
        skipped.append(f"{name}: {reason}")
    return "reference", "; ".join(skipped)


def backend_table() -> list[BackendRow]:
    """Return a row (op, device, backend, why) per operator and device of this machine."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    rows = []
    for op in sorted(REGISTERED):
        for device in devices:
            try:
                rows.append(BackendRow(op, device, *_choose(op, device, _requested)))
            except ValueError as error:
                rows.append(BackendRow(op, device, "none", str(error)))
    return rows
