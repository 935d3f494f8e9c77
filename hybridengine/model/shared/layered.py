"""Full parameters that have memory only while a layer computes with them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor


class LayeredWeights(Mapping[str, Tensor]):
    """Full parameters by name, of which some have memory from `gather` to `free` only.

    Their memory is not always at the same address. Versions of tensors, by which autograd finds
    changes, stay as they are: a gather restores the same bits.
    """

    _tensors: dict[str, Tensor]

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    @abstractmethod
    def sliced(self) -> frozenset[str]:
        """The parameters that are gathered."""

    @abstractmethod
    def start(self, names: Iterable[str]) -> None:
        """Begin to gather those of the parameters that have no memory."""

    @abstractmethod
    def gather(self, names: Iterable[str]) -> None:
        """Fill those of the parameters that have no memory."""

    @abstractmethod
    def writing(self, name: str) -> AbstractContextManager[Tensor]:
        """Yield memory for a full parameter, and write it into the engine after."""

    def free(self, names: Iterable[str]) -> None:
        """Free the memory of those of the parameters that are gathered."""
        for name in self.sliced.intersection(names):
            self._tensors[name].untyped_storage().resize_(0)

    def _allocate(self, name: str) -> Tensor:
        """Return an alias, with a version counter of its own, of a parameter's new memory."""
        tensor = self._tensors[name]
        if tensor.untyped_storage().nbytes() != tensor.nbytes:
            tensor.untyped_storage().resize_(tensor.nbytes)
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(tensor.untyped_storage(), 0, tensor.shape, tensor.stride())
