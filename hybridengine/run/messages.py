"""Messages between processes, through a store or among ranks: typed and signed.

Messages are msgpack, decoded as the type that the reader expects: numbers, texts, lists, mappings,
dataclasses and tensors. Reading one runs no code; whatever else it contains is an error.

Everybody who reaches a store can write to it, and who is between machines can send. A signed
message therefore carries an HMAC over its name and its bytes, with a key that the launcher hands
out in HYBRIDENGINE_SECRET. One that was not signed, or was signed for another name, is refused. The
name of a value is its key in the store.
"""

from __future__ import annotations

import hmac
import math
import os
import secrets
import time
import zlib
from array import array
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path, PurePath
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from hybridengine.run.errors import ModelError, UserError

T = TypeVar("T")
SECRET = "HYBRIDENGINE_SECRET"  # of the environment
_MIN_LENGTH = 16  # characters of a secret
_MAC_BYTES = 32
_SIZE_BYTES, _BLOCK_BYTES = 8, 512  # ranks exchange a message's size and its first bytes at once
secret_file: Path | None = None  # with the secret of this machine's ranks, see `share_secret`
_SHORT_S, _LONG_S, _GROWTH = 1e-3, 2e-2, 1.1  # between two looks at a store
_DTYPES = {str(x)[6:]: x for x in vars(torch).values() if isinstance(x, torch.dtype)}


class MessageError(RuntimeError):
    """A message is not from this run, or is not what its reader expects."""


class SecretError(UserError):
    """Processes that are started apart have no common secret."""


def encode(value: object) -> bytes:
    """Return the message of a value.

    Dataclasses, named tuples, numbers, texts, bytes, lists, tuples, sets and mappings of these, and
    data types, paths, ranges, arrays and tensors, which arrive on the CPU.
    """
    return msgspec.msgpack.encode(value, enc_hook=_to_plain)


def decode(message: Any, expected: Any, what: str) -> Any:
    """Return the value of a message, of type `expected`.

    message: bytes, or another buffer.
    what: names the message in a MessageError.
    """
    try:
        return _decoder(expected).decode(message)
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError) as error:
        raise MessageError(f"{what} is no {expected}: {error}") from None


@cache
def _decoder(expected: Any) -> Any:
    return msgspec.msgpack.Decoder(expected, dec_hook=_from_plain)


def _to_plain(value: Any) -> object:
    """Return what msgpack stores of a value that msgspec does not know."""
    match value:
        case torch.Tensor():
            data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            return value.dtype, tuple(value.shape), data
        case torch.dtype():
            return str(value)[6:]
        case range():
            return value.start, value.stop, value.step
        case PurePath():
            return str(value)
        case array() | np.ndarray() | np.generic():
            return value.tolist()
    raise TypeError(f"a message cannot contain a {type(value).__name__}")


def _from_plain(expected: Any, value: Any) -> object:
    """Return the value of a type that msgspec does not know; the inverse of `_to_plain`."""
    if expected is torch.Tensor:
        name, shape, data = value
        dtype = _DTYPES[name]
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError(f"a tensor {name}{shape} of {len(data)} bytes")
        tensor = torch.empty(tuple(shape), dtype=dtype)
        if data:
            tensor.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
        return tensor
    if expected is torch.dtype:
        return _DTYPES[value]
    if expected is range:
        return range(*value)
    if isinstance(expected, type) and issubclass(expected, PurePath):
        return expected(value)
    raise TypeError(f"{expected} is no type of a message")


def new_secret() -> str:
    return secrets.token_hex(32)


def check_secret(why: str) -> None:
    """Raise SecretError, with the reason `why` it is needed, if the environment has no secret."""
    if len(os.environ.get(SECRET, "")) < _MIN_LENGTH:
        raise SecretError(
            f"{SECRET} is not set, or has less than {_MIN_LENGTH} characters: {why}. Set it to the "
            f"same random text for all of them, such as that of `openssl rand -hex 32`"
        )


def share_secret(file: Path, is_owner: bool) -> None:
    """Let ranks of one machine that were not given a secret share one by a file of this user.

    is_owner: this rank makes it. The others read the file when they first need it, which must be
    after the owner's call.
    """
    global secret_file
    if SECRET in os.environ:
        return
    if not is_owner:
        secret_file = file
        return
    file.unlink(missing_ok=True)
    os.environ[SECRET] = new_secret()
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(os.environ[SECRET])


def shared_secret(is_required: bool) -> bytes:
    if SECRET not in os.environ and secret_file is not None:
        os.environ[SECRET] = secret_file.read_text()
    if is_required or SECRET in os.environ:
        check_secret("processes that are started apart sign their messages by it")
    return os.environ.get(SECRET, "").encode()


def sign(name: str, message: bytes, is_required: bool = False) -> bytes:
    """Return the message with its HMAC in front.

    name: the kind of the message, which the reader knows.
    is_required: whether a secret is required. Without one, messages of a single world are checked
      for accidental changes only.
    """
    return _mac(name, message, is_required) + message


def verified(name: str, signed: Any, what: str, is_required: bool = False) -> Any:
    """Return the message of `sign`, of the same kind as `signed`, bytes or another buffer.

    what: names the message in the MessageError that is raised where it is not of this run.
    """
    mac, message = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(name, message, is_required)):
        raise MessageError(
            f"rank {_rank()}: {what} was refused: it is not signed by the {SECRET} of this "
            "process. Either a process of the run has another one, or it is from somebody else"
        )
    return message


def _mac(name: str, message: Any, is_required: bool) -> bytes:
    key = name.encode()
    mac = hmac.new(shared_secret(is_required), len(key).to_bytes(4, "little") + key, "sha256")
    mac.update(message)
    return mac.digest()


def _rank() -> str:
    return str(dist.get_rank()) if dist.is_initialized() else os.environ.get("RANK", "?")


class SignedStore:
    """The values under `name` in a `torch.distributed` store; for is_required see `sign`."""

    def __init__(self, store: dist.Store, name: str, is_required: bool = True) -> None:
        # Any: torch's stubs know neither values of bytes nor `clone`.
        self.base: Any = store
        self._store: Any = dist.PrefixStore(name, store)
        self.name, self._is_required = name, is_required

    def set(self, key: str, value: object) -> None:
        self._store.set(key, self._signed(key, value))

    def get(self, key: str, expected: Any) -> Any:
        """Return the value of type `expected` under `key`, None if there is none.

        Raises MessageError for a value that no process of this run has written.
        """
        return self.read(key, expected) if self.has(key) else None

    def read(self, key: str, expected: Any) -> Any:
        """As `get` for a key that exists; waits for one that does not."""
        return self._verified(key, self._store.get(key), expected)

    def has(self, key: str) -> bool:
        found: bool = self._store.check([key])
        return found

    def claim(self, key: str, value: object, expected: Any) -> Any:
        """Write a value unless there is one; return the one that is there now."""
        return self._verified(
            key, self._store.compare_set(key, "", self._signed(key, value)), expected
        )

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._store.delete_key(key)

    def substore(self, name: str) -> dist.Store:
        """Return the part of the store under a longer name, such as for a process group."""
        return dist.PrefixStore(name, self._store)

    def _signed(self, key: str, value: object) -> bytes:
        name, data = f"{self.name}/{key}", zlib.compress(encode(value), 1)
        return sign(name, data, self._is_required)

    def _verified(self, key: str, signed: bytes, expected: Any) -> Any:
        name = f"{self.name}/{key}"
        what = f"the value of {name} in the rendezvous store"
        message = verified(name, signed, what, self._is_required)
        return decode(zlib.decompress(message), expected, f"rank {_rank()}: {what}")


def wait_for(read: Callable[[], T | None], check: Callable[[], None] = lambda: None) -> T:
    """Return the first result of `read` that is not None.

    check: called between two tries; raises when there is nothing to wait for any more.
    """
    pause = _SHORT_S
    while (value := read()) is None:
        check()
        time.sleep(pause)
        pause = min(_GROWTH * pause, _LONG_S)
    return value


def all_gather_values(value: T, expected: Any, group: Any = None) -> list[T]:
    """Return the value of every rank, of type `expected` (see `decode`). Collective.

    group: that of the ranks; None: the default group. Messages are signed (`sign`).
    """
    group = group or dist.group.WORLD
    if group.size() == 1:
        return [value]
    messages = _exchange(sign(f"gathered/{group.rank()}", encode(value)), group)
    return [_read("gathered", rank, message, expected) for rank, message in enumerate(messages)]


def broadcast_value(value: T | None, expected: Any, source: int = 0, group: Any = None) -> T:
    """Return the value of rank `source` of the group on every rank. Collective.

    expected, group: see `all_gather_values`.
    """
    group = group or dist.group.WORLD
    is_source, received = group.rank() == source, b""
    if group.size() > 1:
        own = sign(f"broadcast/{source}", encode(value)) if is_source else b""
        [received] = _exchange(own, group, source)
    if is_source:
        return value  # type: ignore[return-value]
    result: T = _read("broadcast", source, received, expected)
    return result


def _read(kind: str, rank: int, signed: Any, expected: Any) -> Any:
    what = f"the message of rank {rank}"
    return decode(verified(f"{kind}/{rank}", signed, what), expected, what)


def _exchange(own: bytes, group: Any, source: int | None = None) -> list[Any]:
    """Return the bytes of each rank, or of rank `source` alone. Collective."""
    start = (len(own).to_bytes(_SIZE_BYTES, "little") + own)[:_BLOCK_BYTES]
    blocks = _exchange_equal(start.ljust(_BLOCK_BYTES, b"\0"), group, source)
    sizes = [int.from_bytes(block[:_SIZE_BYTES].tobytes(), "little") for block in blocks]
    rows = blocks[:, _SIZE_BYTES:]
    if (longest := max(sizes)) > _BLOCK_BYTES - _SIZE_BYTES:
        rows = _exchange_equal(own.ljust(longest, b"\0"), group, source)
    return [row[:size].data for row, size in zip(rows, sizes, strict=True)]


def _exchange_equal(own: bytes, group: Any, source: int | None) -> np.ndarray:
    """As `_exchange` for equally many bytes of each rank: uint8 [ranks or 1, bytes]."""
    data = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(host_device(group))
    if source is None:
        part, data = data, data.new_empty(group.size() * len(own))
        group._allgather_base(data, part).wait()
    else:
        group.broadcast(data, source).wait()
    rows: np.ndarray = data.view(-1, len(own)).cpu().numpy()
    return rows


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
    texts = all_gather_values(error_text(error, error_type), str | None, group)
    if all(text is None for text in texts):
        return
    first: dict[str, int] = {}  # the same error of several ranks is reported once
    for rank, found in enumerate(texts):
        if found is not None:
            first.setdefault(found, rank)
    start = f"{doing} failed " if doing else ""
    message = start + "; ".join(f"on rank {rank}: {found}" for found, rank in first.items())
    raise error_type(message) from (error if isinstance(error, Exception) else None)


def error_text(error: Exception | str | None, expected: type[Exception]) -> str | None:
    """Return the message of an error; with its type, unless it is a ValueError or `expected`."""
    if error is None or isinstance(error, (str, ValueError, expected)):
        return None if error is None else str(error)
    return f"{type(error).__name__}: {error}"


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


def host_device(group: Any = None) -> torch.device:
    """Return the device of small tensors that the ranks of a group agree on.

    The CPU where the group has a CPU backend: its collectives wait on the host, so that a lost rank
    is an error there. Else the group's own device. None: the default group.
    """
    group = group or dist.group.WORLD
    if isinstance(group, dist.ProcessGroupGloo):
        return torch.device("cpu")
    device: torch.device = min(group._device_types, key=lambda device: device.type != "cpu")
    return device


def group_timeout(device: torch.device | None = None) -> timedelta:
    """Return the timeout of the default group, for groups of some of its ranks.

    torch gives a new group 10 or 30 minutes, whatever the default group has.
    device: of the collectives; None: `host_device()`.
    """
    backend = dist.distributed_c10d._get_default_group()._get_backend(device or host_device())
    return backend.options._timeout
