"""Shorter timeouts than those of the process groups, for some of their collectives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist


def default_groups() -> list[dist.ProcessGroup]:
    return [dist.distributed_c10d._get_default_group()]


@contextmanager
def limited(groups: Iterable[dist.ProcessGroup], timeout_s: float) -> Iterator[None]:
    """While open, collectives that begin fail after `timeout_s`, if not earlier.

    groups: only gloo's groups are limited. NCCL keeps its own timeout, at which its watchdog ends
    the process.
    """
    backends = {group._get_backend(device) for group in groups for device in group._device_types}
    limits = [(b, b.options._timeout) for b in backends if isinstance(b, dist.ProcessGroupGloo)]
    limit = timedelta(seconds=timeout_s)
    for backend, before in limits:
        backend._set_default_timeout(min(limit, before))
    try:
        yield
    finally:
        for backend, before in limits:
            backend._set_default_timeout(before)
