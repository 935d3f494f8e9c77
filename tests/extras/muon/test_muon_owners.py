"""Every matrix has one owner, all have about as much work, and no byte travels that need not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridengine.muon.exchange import OrthogonalExchange
from hybridengine.muon.owners import assign, matrices_of, rounds
from hybridengine.sync.shards import ShardSpec, Split

FLOAT = torch.float32
SMOLLM2_135M = {  # a layer's matrices
    "q": (576, 576), "k": (192, 576), "v": (192, 576), "o": (576, 576),
    "gate": (1536, 576), "up": (1536, 576), "down": (576, 1536),
}  # fmt: skip


def sharded(shape: tuple[int, ...], ranks: Sequence[int], dim: int = 0) -> ShardSpec:
    return ShardSpec.along(shape, FLOAT, dim, tuple((rank,) for rank in ranks))


def smollm2(world_size: int, layers: int = 30) -> dict[str, ShardSpec]:
    return {
        f"{layer}.{name}": sharded(shape, range(world_size))
        for layer in range(layers)
        for name, shape in SMOLLM2_135M.items()
    }


def work_of(owned: list) -> list[int]:
    return [sum(matrix.flops for matrix in matrices) for matrices in owned]


@pytest.mark.parametrize("world_size", [2, 4, 8, 16])
def test_work_is_balanced_within_a_tenth(world_size: int) -> None:
    owned = assign(smollm2(world_size), world_size)
    work = work_of(owned)
    assert max(work) <= 1.1 * sum(work) / world_size
    # Nor do ranks wait for each other in a round; of a shape some ranks may have one less.
    slowest = sum(max(work_of(part)) for part in rounds(owned, torch.bfloat16))
    if world_size <= 4:
        assert slowest <= 1.1 * sum(work) / world_size


def test_experts_stay_with_their_holders() -> None:
    """Experts divided over two groups of two ranks, each sharded over the two on dimension 1."""
    spec = ShardSpec(
        (8, 6, 10), FLOAT, (Split(0, (2,)), Split(1, (2,))), tuple((rank,) for rank in range(4))
    )
    owned = assign({"experts": spec}, 4)
    assert [{m.number // 4 for m in matrices} for matrices in owned] == [{0}, {0}, {1}, {1}]
    assert len(set(work_of(owned))) == 1


def test_matrices_that_one_rank_holds_in_full_do_not_travel() -> None:
    spec = sharded((8, 6, 10), range(4))
    exchanges = [exchange({"experts": spec}, rank, 4) for rank in range(4)]
    assert [e.bytes_received for e in exchanges] == [0] * 4


def test_work_is_balanced_where_few_ranks_hold_it() -> None:
    owned = assign({"experts": sharded((4, 6, 10), range(8)), "a": sharded((6, 6), range(8))}, 8)
    assert max(map(len, owned)) == 1


def exchange(specs: dict[str, ShardSpec], rank: int, world_size: int) -> OrthogonalExchange:
    return OrthogonalExchange(specs, rank, world_size, torch.device("cpu"), torch.bfloat16)


def test_bytes_are_those_of_the_slices_that_owners_lack() -> None:
    specs, size = smollm2(4, layers=2), 4
    exchanges = [exchange(specs, rank, size) for rank in range(size)]
    elements = sum(rows * columns for rows, columns in SMOLLM2_135M.values()) * 2
    for way in ("bytes_received", "bytes_sent"):
        total = sum(getattr(e, way) for e in exchanges)
        assert total == 2 * elements * 2 * (size - 1) // size, "in bfloat16, to owners and back"
    gathered = elements * 4 * (size - 1) // size  # by each rank, in float32
    assert max(e.bytes_received for e in exchanges) < gathered / 3


SIZES = st.integers(1, 9)
SHAPES = st.one_of(st.tuples(SIZES, SIZES), st.tuples(SIZES, SIZES, SIZES))


@given(st.lists(SHAPES, min_size=1, max_size=6), st.integers(1, 5))
def test_every_matrix_has_one_owner_and_one_round(shapes: list, world_size: int) -> None:
    specs = {str(i): sharded(shape, range(world_size)) for i, shape in enumerate(shapes)}
    owned = assign(specs, world_size)
    expected = sorted(m for name, spec in specs.items() for m in matrices_of(name, spec))
    assert sorted(m for matrices in owned for m in matrices) == expected
    divided = rounds(owned, torch.bfloat16)
    for rank, matrices in enumerate(owned):
        assert sorted(m for part in divided for m in part[rank]) == sorted(matrices)
    for part in divided:
        assert len({m.shape for matrices in part for m in matrices}) == 1
