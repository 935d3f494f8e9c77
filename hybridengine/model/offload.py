"""Device memory given up while it is not needed: values wait in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hybridengine.sharding.shards import local_shard

__all__ = ["Parking", "on_device"]


class Parking:
    """Tensors that have device memory only inside `present()`; all others see them empty.

    The storages are emptied and filled again, not replaced: FSDP2, the optimizer and the reshard
    keep the tensors and views they hold. tensors: asked each time, so state may come into being
    later. What is parked must not be read, written or saved outside `present()`.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]], enabled: bool = True) -> None:
        self._tensors, self._enabled = tensors, enabled
        self._uses = 0
        self._parked: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        if enabled:
            self._park()

    @contextmanager
    def present(self) -> Iterator[None]:
        """The tensors are on their device with their values; nests."""
        self._uses += 1
        self._bring()
        yield
        self._uses -= 1
        if self._enabled and not self._uses:
            self._park()

    def _bring(self) -> None:
        for storage, host in self._parked:
            storage.resize_(host.numel())
            _bytes_of(storage).copy_(host, non_blocking=True)
        self._parked.clear()

    def _park(self) -> None:
        all_storages = (local_shard(tensor).untyped_storage() for tensor in self._tensors())
        storages = {s.data_ptr(): s for s in all_storages if s.nbytes()}
        for storage in storages.values():
            on_device = _bytes_of(storage)
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_device.is_cuda)
            self._parked.append((storage, host.copy_(on_device, non_blocking=True)))
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are made before their sources go
        for storage in storages.values():
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # for the engine, which has an allocator of its own


@contextmanager
def on_device(model: nn.Module) -> Iterator[nn.Module]:
    """`model` (of `load_causal_lm`) with its weights on their device, where they may be parked."""
    with model.parking.present():  # type: ignore[operator, union-attr]
        yield model


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
