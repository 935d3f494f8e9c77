"""How trained parameters are sharded over the training ranks, and how that suits an engine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hybridengine.run.messages import all_gather_values, broadcast_value
from hybridengine.sync.layout import LayoutError


class RowRange(NamedTuple):
    """Positions [start, stop) on one dimension of a tensor."""

    start: int
    stop: int


Box = tuple[RowRange, ...]
"""A part of a tensor: the product of one range on every dimension."""

Holders = tuple[tuple[int, ...], ...]
"""For each shard, the ranks that hold it."""


class Split(NamedTuple):
    """Division of one dimension: into `counts[0]` chunks, each of them into `counts[1]`, and so on.

    Each time as torch.chunk does: the last chunks may be smaller or empty.
    """

    dim: int
    counts: tuple[int, ...]


@dataclass(frozen=True)
class ShardSpec:
    """Placement of one trained parameter on the training ranks: a grid of boxes.

    shape: global shape, (1,) for a scalar.
    splits: the sharded dimensions, one Split each (a replicated parameter has one chunk on
      dimension 0). A shard is one chunk of every split; shards are numbered row-major, the last
      split fastest.
    holders: for each shard, the ranks that hold it (several under HSDP or replication).
    frozen: the parameter is not trained.
    merged: every sync sends the sum of the parameter and its adapter; computing it takes memory of
      the bucket.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    splits: tuple[Split, ...]
    holders: Holders
    frozen: bool = False
    merged: bool = False

    @classmethod
    def along(
        cls, shape: tuple[int, ...], dtype: torch.dtype, dim: int, holders: Holders, **how: bool
    ) -> ShardSpec:
        """Return the placement of a parameter sharded on one dimension, one chunk per holder.

        how: `frozen`, `merged`.
        """
        return cls(shape, dtype, (Split(dim, (len(holders),)),), holders, **how)

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, world_size: int) -> ShardSpec:
        """Read the placement of a DTensor, or of a tensor that is replicated on all ranks.

        Of a DTensor, each mesh dimension shards one dimension or replicates: FSDP2, alone, over
        tensor or expert parallelism, or with replicas (HSDP), and what `distribute_tensor` makes.
        `holders` are those of this rank's mesh; see `unite_holders`.

        Raises LayoutError for other placements, and where this rank's shard has not the shape that
        they give.
        """
        shape = tuple(tensor.shape) or (1,)
        if not isinstance(tensor, DTensor):
            return cls.along(shape, tensor.dtype, 0, _replicated(world_size))
        mesh, axes = tensor.device_mesh, _sharding_axes(name, tensor)
        splits = tuple(Split(d, tuple(mesh.shape[a] for a in on)) for d, on in axes.items())
        ordered = tuple(a for on in axes.values() for a in on)
        holders = _holders(mesh, ordered)
        spec = cls(shape, tensor.dtype, splits or (Split(0, (1,)),), holders)
        if (shard := spec.shard_of(mesh.get_rank())) is not None:
            actual = tuple(tensor.to_local().shape) or (1,)
            planned = tuple(stop - start for start, stop in spec.box(shard))
            if actual != planned and math.prod(actual) + math.prod(planned):
                raise LayoutError(
                    f"parameter {name!r} of shape {shape} has placements {tensor.placements}, "
                    f"which give this rank a shard of shape {planned}, but it holds {actual}: its "
                    "dimension is not divided evenly. Use sizes that the mesh divides."
                )
        return spec

    @property
    def split_dims(self) -> tuple[int, ...]:
        return tuple(split.dim for split in self.splits)

    @cached_property
    def row_dim(self) -> int:
        """The sharded dimension on which shards are longest; parts of a shard divide it."""
        return max(self.splits, key=lambda s: int(_edges(self.shape[s.dim], s.counts)[1])).dim

    @property
    def num_rows(self) -> int:
        """Positions of the largest shard on `row_dim`."""
        start, stop = self.box(0)[self.row_dim]
        return stop - start

    def box(self, shard: int | None, part: int = 0, num_parts: int = 1) -> Box:
        """Return the positions of a shard, or of one of `num_parts` nearly equal parts of it.

        shard: None for no positions.
        """
        if shard is None:
            return (RowRange(0, 0),) * len(self.shape)
        ranges = [RowRange(0, size) for size in self.shape]
        for split in reversed(self.splits):
            shard, chunk = divmod(shard, math.prod(split.counts))
            low, high = _edges(self.shape[split.dim], split.counts)[chunk : chunk + 2].tolist()
            ranges[split.dim] = RowRange(low, high)
        low, high = ranges[self.row_dim]
        ranges[self.row_dim] = RowRange(
            *(low + (high - low) * p // num_parts for p in (part, part + 1))
        )
        return tuple(ranges)

    def chunk_ranges(self, split: Split, part: int = 0, num_parts: int = 1) -> np.ndarray:
        """Starts and stops of the C chunks of a split, of one part on `row_dim`: int64 [2, C]."""
        edges = _edges(self.shape[split.dim], split.counts)
        if split.dim != self.row_dim:
            return np.stack([edges[:-1], edges[1:]])
        return np.stack([edges[:-1] + np.diff(edges) * p // num_parts for p in (part, part + 1)])

    def num_elements(self, part: int = 0, num_parts: int = 1) -> np.ndarray:
        """Elements of every shard, or of one part of it: int64 [S]."""
        rest = [size for dim, size in enumerate(self.shape) if dim not in self.split_dims]
        lengths = [np.diff(self.chunk_ranges(s, part, num_parts), axis=0)[0] for s in self.splits]
        return grid_product(lengths) * math.prod(rest)

    def shard_of(self, rank: int) -> int | None:
        """The shard that `rank` holds, None if it holds none."""
        return next((s for s, ranks in enumerate(self.holders) if rank in ranks), None)


def grid_product(per_split: list[np.ndarray]) -> np.ndarray:
    """Return the products of one entry of each array, for all shards in order: [S]."""
    product = per_split[0]
    for factors in per_split[1:]:
        product = np.multiply.outer(product, factors).ravel()
    return product


@lru_cache(maxsize=1 << 12)
def _edges(size: int, counts: tuple[int, ...]) -> np.ndarray:
    """Return the borders of all chunks of a dimension, ascending: int64 [chunks + 1]."""
    edges = np.array([0, size])
    for count in counts:
        low, high = edges[:-1, None], edges[1:, None]
        length = np.maximum(-(-(high - low) // count), 1)
        edges = np.append(np.minimum(low + np.arange(count) * length, high), size)
    edges.setflags(write=False)
    return edges


def _sharding_axes(name: str, tensor: DTensor) -> dict[int, list[int]]:
    """Return sharded dimension → the mesh dimensions that divide it, in their order of division.

    DTensor divides by mesh dimensions from left to right. FSDP2 over tensor or expert parallelism
    divides what those have left, though its mesh dimension is to the left: _StridedShard, whose
    `split_factor` is the number of chunks that are there already.
    """
    sizes, axes = tensor.device_mesh.shape, dict[int, list[int]]()
    placements: list[tuple[int, Any]] = list(enumerate(tensor.placements))
    for axis, placement in reversed(placements):
        if isinstance(placement, Replicate):
            continue
        strided = hasattr(placement, "split_factor")
        if type(placement) is not Shard and not strided:
            break
        order = axes.setdefault(placement.dim, [])
        before, chunks = 0, 1
        while strided and chunks < placement.split_factor and before < len(order):
            chunks *= sizes[order[before]]
            before += 1
        if strided and chunks != placement.split_factor:
            break
        order.insert(before, axis)
    else:
        return dict(sorted(axes.items()))
    raise LayoutError(
        f"parameter {name!r} has placements {tensor.placements} on a mesh of shape {sizes}; "
        "expected Replicate, Shard, and _StridedShard only as fully_shard makes it over tensor or "
        "expert parallelism"
    )


@lru_cache(maxsize=64)  # one object for many parameters: it has an entry for every rank
def _holders(mesh: DeviceMesh, axes: tuple[int, ...]) -> Holders:
    """Return the ranks that hold each shard of a tensor sharded along `axes` of the mesh."""
    num_shards = math.prod(mesh.shape[axis] for axis in axes)
    by_shard = mesh.mesh.movedim(axes, tuple(range(len(axes)))).reshape(num_shards, -1)
    return tuple(tuple(shard) for shard in by_shard.tolist())


@lru_cache(maxsize=16)
def _replicated(world_size: int) -> Holders:
    return (tuple(range(world_size)),)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a parameter without a copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_shard(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return `local`, wherever it is, as this rank's shard of a tensor placed like `tensor`."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor(local, tensor._spec, requires_grad=False)  # from_local would move it


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the unsharded parameter on every rank; collective for a DTensor, else no copy."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


_View = tuple[list[Holders], dict[str, int]]  # what a rank knows; parameter → index in the list


def unite_holders(specs: Mapping[str, ShardSpec]) -> dict[str, ShardSpec]:
    """Return `specs` with the holders that any rank knows of; collective.

    Raises LayoutError, on every rank, if ranks divide a parameter differently.
    """
    distinct: dict[Holders, int] = {}
    by_id = {id(s.holders): s.holders for s in specs.values()}  # compare each object once
    index = {i: distinct.setdefault(holders, len(distinct)) for i, holders in by_id.items()}
    own: _View = list(distinct), {name: index[id(s.holders)] for name, s in specs.items()}
    digests = all_gather_values(hashlib.sha256(repr(own).encode()).hexdigest(), str)
    if len(set(digests)) == 1:
        return dict(specs)
    firsts = sorted({digests.index(digest) for digest in digests})
    views = [broadcast_value(own, _View, first) for first in firsts]
    if any(numbers.keys() != specs.keys() for _, numbers in views):
        return dict(specs)  # ranks train different models: their plans' digests will tell
    united: dict[tuple[int, ...], Holders] = {}
    result = {}
    for name, spec in specs.items():
        key = tuple(numbers[name] for _, numbers in views)
        if key not in united:
            parts = [known[i] for (known, _), i in zip(views, key, strict=True)]
            united[key] = _union(name, parts)
        result[name] = replace(spec, holders=united[key])
    return result


def _union(name: str, known: Sequence[Holders]) -> Holders:
    """Return all holders of each shard, ascending."""
    if len({len(holders) for holders in known}) == 1:
        union = tuple(tuple(sorted(set().union(*h))) for h in zip(*known, strict=True))
        ranks = [rank for shard in union for rank in shard]
        if len(set(ranks)) == len(ranks) and len({len(shard) for shard in union}) == 1:
            return union
    raise LayoutError(
        f"parameter {name!r} is sharded differently on different ranks: "
        f"{' and '.join(str(h) for h in known[:2])} are the holders of its shards. Shard it on "
        "meshes of equal shape on all ranks."
    )


def dim1_parameters(
    shapes: Mapping[str, tuple[int, ...]],
    sliced: Mapping[str, int],
    num_shards: int,
    *,
    row_parallel: bool = True,
    experts: bool = True,
) -> set[str]:
    """Return the parameters for which sharding on dim 1 instead of dim 0 saves traffic.

    FSDP2 shards dim 1 only where its size is a multiple of the number of shards.

    shapes: parameter → global shape.
    sliced: parameter → dimension that tensor parallelism slices (`EngineLayout.sliced_dims`).
    num_shards: FSDP shards.
    row_parallel: include matrices that the engine slices on dim 1; the columns that a rank trains
      then lie inside its own engine slice.
    experts: include weights of three or more dimensions that the engine slices on dim 1 or that
      have fewer rows (experts) than there are shards; on dim 0 only the first ranks would hold and
      send them.
    """

    def saves(name: str, shape: tuple[int, ...]) -> bool:
        if len(shape) < 2 or shape[1] % num_shards:
            return False
        if len(shape) == 2:
            return row_parallel and sliced.get(name) == 1
        return experts and (sliced.get(name) == 1 or shape[0] < num_shards)

    return {name for name, shape in shapes.items() if saves(name, shape)}


def tp_groups(world_size: int, tp_size: int, ranks_per_node: int | None = None) -> list[list[int]]:
    """Tensor-parallel groups over the training ranks, strided: group j is {j, j+N/t, j+2N/t, …}.

    Rank r then is TP rank r // (N/t), so the dim-0 rows FSDP2 gives it lie inside its TP slice
    (HybridFlow's zero-redundancy grouping, arXiv 2409.19256, section 5.3). With several nodes the
    groups are strided inside each node if they fit there: generation reduces over a group twice per
    layer and token, which must not cross nodes.
    """
    if tp_size < 1 or world_size % tp_size:
        raise ValueError(
            f"tensor_model_parallel_size: got {tp_size}, expected a divisor of the {world_size} "
            "ranks. Change it or the number of ranks."
        )
    span = ranks_per_node or world_size
    if span % tp_size or world_size % span:
        span = world_size
    stride = span // tp_size
    return [
        list(range(node + j, node + span, stride))
        for node in range(0, world_size, span)
        for j in range(stride)
    ]
