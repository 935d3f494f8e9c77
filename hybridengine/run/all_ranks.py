"""Values that ranks exchange, and work whose errors all of them raise together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from hybridengine.run.errors import ModelError
from hybridengine.run.messages import decode, encode, sign, verified

T = TypeVar("T")

_BLOCK_BYTES = 512  # exchanged at once: the size of a message and its first bytes
_SIZE_BYTES = 8


def all_gather_values(value: T, expected: Any, group: Any = None) -> list[T]:
    """Return the value of every rank, of type `expected` (see `messages`). Collective.

    group: that of the ranks; None: the default group. Messages are signed (`messages.sign`).
    """
    group = group or dist.group.WORLD
    if group.size() == 1:
        return [value]
    message = sign(f"gathered/{group.rank()}", encode(value))
    blocks = _all_gather_bytes(_block(message), group)
    sizes = [int.from_bytes(block[:_SIZE_BYTES].tobytes(), "little") for block in blocks]
    messages = blocks[:, _SIZE_BYTES:]
    if (longest := max(sizes)) > _BLOCK_BYTES - _SIZE_BYTES:
        messages = _all_gather_bytes(message.ljust(longest, b"\0"), group)
    pairs = enumerate(zip(messages, sizes, strict=True))
    return [_read("gathered", rank, m[:size].data, expected) for rank, (m, size) in pairs]


def broadcast_value(value: T | None, expected: Any, source: int = 0, group: Any = None) -> T:
    """Return the value of rank `source` of the group on every rank. Collective.

    expected, group: see `all_gather_values`.
    """
    group = group or dist.group.WORLD
    is_source = group.rank() == source
    message = b""
    if is_source and group.size() > 1:
        message = sign(f"broadcast/{source}", encode(value))
    if group.size() > 1:
        block = _broadcast_bytes(_block(message), source, group)
        size = int.from_bytes(block[:_SIZE_BYTES].tobytes(), "little")
        data = block[_SIZE_BYTES:][:size]
        if size > _BLOCK_BYTES - _SIZE_BYTES:
            data = _broadcast_bytes(message or bytes(size), source, group)
    if is_source:
        return value  # type: ignore[return-value]
    received: T = _read("broadcast", source, data.data, expected)
    return received


def from_rank0(fn: Callable[[], T], expected: Any, error_type: type[Exception]) -> T:
    """Return on every rank what `fn` returns on rank 0; if it fails, raise `error_type` on all.

    Collective: one broadcast; rank 0 does not wait for the others. expected: see
    `all_gather_values`.
    """
    value, error = None, None
    if dist.get_rank() == 0:
        try:
            value = fn()
        except Exception as caught:
            error = caught
    text = None if error is None else _text(error, error_type)
    value, text = broadcast_value((value, text), tuple[expected | None, str | None])
    if text is not None:
        raise error_type(f"on rank 0: {text}") from error
    return value


def _read(kind: str, rank: int, signed: memoryview, expected: Any) -> Any:
    what = f"the message of rank {rank}"
    return decode(verified(f"{kind}/{rank}", signed, what), expected, what)


def _block(message: bytes) -> bytes:
    start = len(message).to_bytes(_SIZE_BYTES, "little") + message
    return start[:_BLOCK_BYTES].ljust(_BLOCK_BYTES, b"\0")


def _all_gather_bytes(own: bytes, group: Any) -> np.ndarray:
    """Return the bytes of all ranks, which are equally many: uint8 [ranks, bytes]."""
    part = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(host_device(group))
    gathered = part.new_empty(group.size() * part.numel())
    group._allgather_base(gathered, part).wait()
    rows: np.ndarray = gathered.view(group.size(), -1).cpu().numpy()
    return rows


def _broadcast_bytes(own: bytes, source: int, group: Any) -> np.ndarray:
    """Return the bytes of rank `source`; the other ranks pass as many."""
    data = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(host_device(group))
    group.broadcast(data, source).wait()
    received: np.ndarray = data.cpu().numpy()
    return received


def run_on_all_ranks(
    fn: Callable[[], T],
    error_type: type[Exception],
    doing: str = "",
    group: dist.ProcessGroup | None = None,
) -> T:
    """Return `fn()`. If it fails on any rank, raise `error_type` on all of them. Collective.

    The message names each rank that failed and its error. doing: what failed, its first words.
    group: the process group of all ranks; None: the default group.
    """
    error: Exception | None = None
    try:
        value = fn()
    except Exception as caught:
        error = caught
    raise_on_all_ranks(error, error_type, doing, group)
    return value


def raise_on_all_ranks(
    error: Exception | str | None,
    error_type: type[Exception],
    doing: str = "",
    group: dist.ProcessGroup | None = None,
) -> None:
    """Raise `error_type` on every rank if any rank has an error. Collective."""
    text = _text(error, error_type) if isinstance(error, Exception) else error
    texts = all_gather_values(text, str | None, group)
    first: dict[str, int] = {}  # the same error of several ranks is reported once
    for rank, found in enumerate(texts):
        if found is not None:
            first.setdefault(found, rank)
    if first:
        start = f"{doing} failed " if doing else ""
        message = start + "; ".join(f"on rank {rank}: {found}" for found, rank in first.items())
        raise error_type(message) from (error if isinstance(error, Exception) else None)


def _text(error: Exception, expected: type[Exception]) -> str:
    """Return the message of an error; with its type, unless it is a ValueError or `expected`."""
    if isinstance(error, (ValueError, expected)):
        return str(error)
    return f"{type(error).__name__}: {error}"


def host_device(group: Any = None) -> torch.device:
    """Return the device of small tensors that the ranks of a group agree on.

    The CPU where the group has a CPU backend: its collectives wait on the host, so that a lost rank
    is an error there. Else the group's own device. None: the default group.
    """
    group = group or dist.distributed_c10d._get_default_group()
    if isinstance(group, dist.ProcessGroupGloo):
        return torch.device("cpu")
    device: torch.device = min(group._device_types, key=lambda device: device.type != "cpu")
    return device


def group_timeout() -> timedelta:
    """Return the timeout of the default group, for groups of some of its ranks.

    torch gives a new group 10 or 30 minutes, whatever the default group has.
    """
    group = dist.distributed_c10d._get_default_group()
    return group._get_backend(host_device()).options._timeout


def run_on_rank0(
    fn: Callable[[], T],
    doing: str = "",
    group: dist.ProcessGroup | None = None,
    error_type: type[Exception] = ModelError,
) -> T | None:
    """Return `fn()` on rank 0, None elsewhere. If it fails, raise `error_type` on all. Collective.

    doing, group: see `run_on_all_ranks`.
    """
    is_main = dist.get_rank() == 0
    return run_on_all_ranks(lambda: fn() if is_main else None, error_type, doing, group)


def new_write_group() -> dist.ProcessGroup:
    """Return a gloo group whose collectives wait for a write on another rank. Collective.

    They have no limit: the monitor of that rank limits its write, see `writes`.
    """
    group = dist.new_group(backend="gloo", timeout=timedelta(days=365))
    assert isinstance(group, dist.ProcessGroup)
    return group


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
