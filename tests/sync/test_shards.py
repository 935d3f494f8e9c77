"""ShardSpec against torch: what ranks of 1-D to 3-D meshes hold, element by element."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hybridengine.sync.shards import ShardSpec, Split
from tests.ranks import run_ranks


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=3),
    st.permutations([0, 1]),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_shards_are_torchs_chunks_and_parts_divide_them(shape, dims, counts, other, parts) -> None:
    splits = (Split(dims[0], tuple(counts)), Split(dims[1], (other,)))
    num_shards = math.prod(counts) * other
    spec = ShardSpec(tuple(shape), torch.float32, splits, tuple((r,) for r in range(num_shards)))
    full = torch.arange(math.prod(shape)).view(shape)
    chunks = [full]
    for split in splits:
        for count in split.counts:
            chunks = [part for chunk in chunks for part in chunked(chunk, count, split.dim)]
    sizes = [spec.num_elements(part, parts) for part in range(parts)]
    for shard, chunk in enumerate(chunks):
        assert torch.equal(full[tuple(slice(*r) for r in spec.box(shard))], chunk)
        of_parts = [full[tuple(slice(*r) for r in spec.box(shard, p, parts))] for p in range(parts)]
        assert torch.equal(torch.cat(of_parts, spec.row_dim), chunk)
        assert [t.numel() for t in of_parts] == [size[shard] for size in sizes]
        assert chunk.shape[spec.row_dim] <= spec.num_rows


def chunked(tensor: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """torch.chunk, with the empty chunks at the end that it leaves out."""
    length = max(1, -(-tensor.shape[dim] // count))
    starts = [min(i * length, tensor.shape[dim]) for i in range(count + 1)]
    return [tensor.narrow(dim, a, b - a) for a, b in itertools.pairwise(starts)]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 21)
        self.down = torch.nn.Linear(21, 8)
        self.norm = torch.nn.LayerNorm(7)
        self.experts = torch.nn.Parameter(torch.empty(8, 12, 4))
        self.more_experts = torch.nn.Parameter(torch.empty(10, 3))
        with torch.no_grad():
            for tensor in self.parameters():
                tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))


def placed(ndim: int) -> dict[str, DTensor]:
    """A model on 8 ranks: FSDP2 (HSDP on three mesh dimensions) over TP and EP; any placements."""
    model = Block()
    shape, names = {2: ((4, 2), ("fsdp", "tp")), 3: ((2, 2, 2), ("replicas", "fsdp", "tp"))}[ndim]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
    for name in ("experts", "more_experts"):
        expert_parallel = distribute_tensor(
            getattr(model, name), mesh["tp"], [Shard(0)], src_data_rank=None
        )
        setattr(model, name, torch.nn.Parameter(expert_parallel))
    dim1 = (model.experts,)
    fully_shard(
        model,
        mesh=mesh[names[:-1]],
        shard_placement_fn=lambda p: Shard(1) if any(p is e for e in dim1) else None,
    )
    tensors = dict(model.named_parameters())
    full = torch.arange(7.0 * 9 * 2).view(7, 9, 2)
    for placements in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=ndim):
        tensors[f"any {placements}"] = distribute_tensor(full, mesh, placements, src_data_rank=None)
    return tensors


def boxes_body(rank: int, world_size: int) -> int:
    originals, checked = dict(Block().named_parameters()), 0
    for name, tensor in (*placed(2).items(), *placed(3).items()):
        spec = ShardSpec.of(name, tensor, world_size)
        local = tensor.to_local()
        full = originals[name] if name in originals else torch.arange(126.0).view(7, 9, 2)
        want = full[tuple(slice(*r) for r in spec.box(spec.shard_of(rank)))]
        assert want.numel() == local.numel(), (name, tensor.placements)
        assert torch.equal(want.reshape(local.shape), local), (name, tensor.placements)
        checked += 1
    return checked


@pytest.mark.multirank
def test_a_spec_tells_what_every_rank_of_a_mesh_holds() -> None:
    assert run_ranks(boxes_body, 8) == [8 + 9 + 8 + 27] * 8
