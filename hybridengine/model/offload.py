"""Offload tensors to host memory while their device memory is needed elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hybridengine.sync.shards import local_shard


class Offloader:
    """Tensors that are on their device inside `on_device()` only, and empty outside of it.

    FSDP2's `CPUOffloadPolicy` streams every all-gather from host memory and steps there; this moves
    all tensors once per phase. Storages are resized to zero and back, not replaced, so the views
    and references that FSDP2, the optimizer and the reshard hold stay valid. Do not read, write or
    save an offloaded tensor.

    tensors: called at every offload, so that optimizer state may be created later.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]], enabled: bool = True) -> None:
        self._tensors, self._enabled = tensors, enabled
        self._depth = 0
        self._offloaded: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        if enabled:
            self._offload()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Onload the tensors; offload them again at the end of the outermost block."""
        self._depth += 1
        for storage, host in self._offloaded:
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host, non_blocking=True)
        self._offloaded.clear()
        yield
        self._depth -= 1
        if self._enabled and not self._depth:
            self._offload()

    def _offload(self) -> None:
        all_storages = (local_shard(tensor).untyped_storage() for tensor in self._tensors())
        storages = {s.data_ptr(): s for s in all_storages if s.nbytes()}
        for storage in storages.values():
            device_bytes = _bytes_of(storage)
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=device_bytes.is_cuda)
            self._offloaded.append((storage, host.copy_(device_bytes, non_blocking=True)))
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # finish the copies before their sources are freed
        for storage in storages.values():
            storage.resize_(0)
        torch.cuda.empty_cache()  # the engine has an allocator of its own


@contextmanager
def on_device(model: nn.Module) -> Iterator[nn.Module]:
    """Yield `model` (of `load_causal_lm`) with its weights onloaded."""
    with model.offloader.on_device():  # type: ignore[operator, union-attr]
        yield model


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
