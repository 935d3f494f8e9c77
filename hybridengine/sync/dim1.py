"""Which parameters FSDP2 should shard on dim 1, so that a weight sync moves fewer bytes."""

from __future__ import annotations

from collections.abc import Mapping


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
