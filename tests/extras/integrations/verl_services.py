"""verl's own modules in a process without its services (Ray, tensordict, …)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["empty_services"]


@contextmanager
def empty_services() -> Iterator[None]:
    """While open, verl can be imported: its services are empty, and Ray's remote does nothing.

    The process keeps the empty Ray.
    """
    from benchmarks import _verl
    from hybridengine.conformance.libraries.services import Empty

    ray = Empty("ray")
    ray.__path__ = []
    vars(ray).update(
        remote=lambda *args, **options: args[0] if args else lambda cls: cls,
        is_initialized=lambda: False,
        actor=Empty("ray.actor"),
    )
    sys.modules["ray"] = ray
    with _verl.empty_services():
        yield
