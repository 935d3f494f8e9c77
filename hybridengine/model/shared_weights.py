"""The trained parameters as full tensors made of an engine's own, where it holds their values.

Of a parameter that every rank of the engine holds in full this is a view. One of which each rank
holds a part is joined by the tensor-parallel group.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridengine.sync.blocks import contiguous_strides
from hybridengine.sync.layout import Copy, EngineLayout, LayoutError, Region, Shape

Part = tuple[str, Region]  # parameter, a part of it


def parameter_views(
    layout: EngineLayout,
    weights: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Return every parameter as a contiguous view of the engine's tensors.

    A part of a fused tensor (q, k and v; gate and up) is such a view if its rows are together.

    weights: the engine's tensors by the names of the layout.
    shapes: of the parameters.
    dtype: of the computation.

    Raises LayoutError for a parameter that the engine holds in another form.
    """
    copies = copies_of(layout, weights, shapes, dtype)
    return {
        name: _view(name, shape, weights[copies[name][0].destination], copies[name])
        for name, shape in shapes.items()
    }


def copies_of(
    layout: EngineLayout,
    weights: Mapping[str, Tensor],
    sources: Collection[str],
    dtype: torch.dtype,
) -> dict[str, list[Copy]]:
    """Return for each of the parameters `sources` the copies that write it into the engine, once.

    Raises LayoutError for a parameter whose values the engine does not have in `dtype`, or twice.
    """
    parts: dict[str, dict[str, list[Copy]]] = {name: defaultdict(list) for name in sources}
    for copy in layout.copies:
        if copy.source in parts:
            parts[copy.source][copy.destination].append(copy)
    found = {}
    for name, by_destination in parts.items():
        if (
            name in layout.fallback
            or not by_destination
            or by_destination.keys() & layout.quantized
        ):
            raise LayoutError(f"the engine does not hold the values of {name!r}")
        first, *others = by_destination
        if other := {weights[destination].dtype for destination in by_destination} - {dtype}:
            raise LayoutError(
                f"the engine holds {name!r} in {other.pop()}, and the trainer computes in {dtype}"
            )
        found[name] = by_destination[first]
        written = {(weights[first].data_ptr(), c.read, c.written) for c in found[name]}
        for destination in others:
            own = by_destination[destination]
            if {(weights[destination].data_ptr(), c.read, c.written) for c in own} != written:
                raise LayoutError(f"the engine holds {name!r} {len(by_destination)} times")
    return found


def _view(name: str, shape: Shape, tensor: Tensor, copies: list[Copy]) -> Tensor:
    """Return the view of an engine's tensor into which `copies` write a parameter."""
    # Element i of the parameter has to be element i + offset of the tensor.
    offsets = {copy.destination_offset - copy.source_offset for copy in copies}
    is_complete = sum(copy.numel for copy in copies) == math.prod(shape)
    if len(offsets) > 1 or not is_complete or not all(map(_keeps_distances, copies)):
        raise LayoutError(f"the engine holds {name!r} in another order, or not all of it")
    offset = tensor.storage_offset() + offsets.pop()
    return tensor.as_strided(shape, contiguous_strides(shape), offset)


def _keeps_distances(copy: Copy) -> bool:
    steps = zip(copy.sizes, copy.source_strides, copy.destination_strides, strict=True)
    return all(size == 1 or source == destination for size, source, destination in steps)


class LayeredWeights(Mapping[str, Tensor]):
    """Full parameters by name, of which some have memory from `gather` to `free` only.

    Their memory is not always at the same address. Versions of tensors, by which autograd finds
    changes, stay as they are: a gather restores the same bits.

    origin: how it gets their values, for the plan of a run.
    """

    origin = "joined by its tensor-parallel ranks"
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


class _Started(NamedTuple):
    """A gather that has begun, of a parameter.

    works: of the exchange, which several parameters may share; empty once it has been waited for.
    values: that are received for parts of the parameter.
    """

    works: list[dist.Work]
    values: list[tuple[Region, Tensor]]

    def wait(self) -> None:
        while self.works:
            self.works.pop().wait()


class SlicedWeights(LayeredWeights):
    """Full parameters by name, made of the tensors of the engine ranks of a group.

    One that every rank holds in full is a view of the engine's tensors. Another has memory only
    from `gather` to `free`, and while `writing`, not always at the same address. Versions of
    tensors, by which autograd finds changes, stay as they are: a gather restores the same bits.
    Where the engine's tensors change, call `restart` before the next gather.

    layout: of this rank's engine tensors `weights`.
    parts: of each rank of the group, from `engine_parts`.
    shapes: of the parameters.
    dtype: of the computation.

    Raises LayoutError for a parameter that the group does not hold in full, or in another form.
    """

    def __init__(
        self,
        layout: EngineLayout,
        weights: Mapping[str, Tensor],
        parts: list[list[Part]],
        shapes: Mapping[str, Shape],
        dtype: torch.dtype,
        group: dist.ProcessGroup,
    ) -> None:
        self.group, self._rank = group, group.rank()
        self._started: dict[str, _Started] = {}
        held: dict[str, list[list[Region]]] = {name: [[] for _ in parts] for name in shapes}
        for rank, rank_parts in enumerate(parts):
            for name, region in rank_parts:
                held[name][rank].append(region)
        sizes = {name: {_numel(regions) for regions in held[name]} for name in shapes}
        whole = {name: shape for name, shape in shapes.items() if sizes[name] == {math.prod(shape)}}
        self._tensors = parameter_views(layout, weights, whole, dtype)
        self._own: dict[str, list[tuple[Region, Tensor]]] = {}
        self._sent: dict[str, list[list[Region]]] = {}  # by rank, what a lower one does not have
        by_source = copies_of(layout, weights, [n for n in shapes if n not in whole], dtype)
        for name, copies in by_source.items():
            self._own[name] = [
                (copy.read, _strided(weights[copy.destination], copy.written)) for copy in copies
            ]
            known: set[Region] = set()
            self._sent[name] = sent = []
            for regions in held[name]:
                sent.append([region for region in regions if region not in known])
                known.update(regions)
            _check_complete(name, shapes[name], known)
            device = weights[copies[0].destination].device
            self._tensors[name] = torch.empty(shapes[name], dtype=dtype, device=device)
            self._tensors[name].untyped_storage().resize_(0)
        self._tensors = {name: self._tensors[name] for name in shapes}

    @property
    def sliced(self) -> frozenset[str]:
        """The parameters that are gathered."""
        return frozenset(self._own)

    def start(self, names: Iterable[str]) -> None:
        """Begin to gather those of the parameters that are sliced and have no memory. Collective.

        They are there after `gather`, or `fill` of each of them.
        """
        names = [name for name in self._missing(names) if name not in self._started]
        if not names:
            return
        ranks = range(self.group.size())
        counts = [sum(_numel(self._sent[name][rank]) for name in names) for rank in ranks]
        chunks = list(self._tensors[names[0]].new_empty(sum(counts)).split(counts))
        own = {name: dict(self._own[name]) for name in names}
        sent = [own[name][r].reshape(-1) for name in names for r in self._sent[name][self._rank]]
        if sent:
            torch.cat(sent, out=chunks[self._rank])
        works = self.exchange(chunks)
        self._started |= {name: _Started(works, []) for name in names}
        for rank, chunk in enumerate(chunks):
            regions = [(name, r) for name in names for r in self._sent[name][rank]]
            sizes = [math.prod(region[1]) for _, region in regions]
            for (name, region), values in zip(regions, chunk.split(sizes), strict=True):
                self._started[name].values.append((region, values.view(region[1])))

    def gather(self, names: Iterable[str]) -> None:
        """Fill those of the parameters that are sliced and have no memory. Collective."""
        names = self._missing(names)
        self.start(names)
        for name in names:
            self.fill(name)

    @torch.no_grad()
    def fill(self, name: str) -> None:
        """Write what a started gather has received of a sliced parameter into its memory."""
        started = self._started.pop(name)
        started.wait()
        full = self._allocate(name)
        for region, values in started.values:
            _strided(full, region).copy_(values)
            if values.is_cuda:  # they may be of another stream, on which the gather was started
                values.record_stream(torch.cuda.current_stream(values.device))

    def restart(self) -> None:
        """Begin the started gathers again, as the engine's tensors have changed. Collective."""
        for started in self._started.values():
            started.wait()
        names, self._started = [*self._started], {}
        self.start(names)

    def _missing(self, names: Iterable[str]) -> list[str]:
        """Return those of the parameters that are sliced and have no memory."""
        tensors = self._tensors
        return [n for n in names if n in self._own and not tensors[n].untyped_storage().nbytes()]

    def exchange(self, chunks: list[Tensor]) -> list[dist.Work]:
        """Begin to send this rank's chunk to the others of the group, and to receive theirs."""
        others = [rank for rank in range(self.group.size()) if rank != self._rank]
        operations = [(dist.irecv, chunks[rank], rank) for rank in others if len(chunks[rank])]
        if len(own := chunks[self._rank]):
            operations += [(dist.isend, own, rank) for rank in others]  # type: ignore[misc]
        return dist.batch_isend_irecv(
            [
                dist.P2POp(operation, chunk, group=self.group, group_peer=rank)
                for operation, chunk, rank in operations
            ]
        )

    @contextmanager
    def writing(self, name: str) -> Iterator[Tensor]:
        """Yield memory for a full parameter, and write this rank's part into the engine after."""
        if name not in self._own:
            yield self._tensors[name]
            return
        full = self._allocate(name)
        yield full
        with torch.no_grad():
            for region, tensor in self._own[name]:
                tensor.copy_(_strided(full, region))
        self.free([name])


def engine_parts(
    layout: EngineLayout,
    weights: Mapping[str, Tensor],
    shapes: Mapping[str, Shape],
    dtype: torch.dtype,
) -> list[Part]:
    """Return the parts of parameters that this engine rank holds, as they are in the parameters.

    Raises LayoutError for a parameter that the engine holds in another form.
    """
    by_source = copies_of(layout, weights, shapes, dtype)
    return [(name, copy.read) for name, copies in by_source.items() for copy in copies]


def _check_complete(name: str, shape: Shape, regions: Iterable[Region]) -> None:
    """Raise LayoutError unless the regions are all of a tensor of `shape`."""
    filled = torch.zeros(shape, dtype=torch.bool)
    for region in regions:
        _strided(filled, region).fill_(True)
    if not filled.all():
        raise LayoutError(f"the engine's ranks do not hold all of {name!r}")


def _strided(tensor: Tensor, region: Region) -> Tensor:
    offset, sizes, strides = region
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + offset)


def _numel(regions: Iterable[Region]) -> int:
    return sum(math.prod(sizes) for _, sizes, _ in regions)
