"""FSDP2's collectives as direct sends: what they give, in groups of all ranks and of some."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks

pytestmark = pytest.mark.multirank


def chunk(rank: int, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def body(rank: int, world_size: int) -> None:
    from hybridengine.model.fsdp import DirectAllGather, DirectReduceScatter

    pairs, _ = dist.new_subgroups(2)
    gather, reduce = DirectAllGather(), DirectReduceScatter()
    cpu = torch.device("cpu")
    for group in (dist.group.WORLD, pairs):
        members = dist.get_process_group_ranks(group)
        for size in (0, 1, 1000):
            expected = torch.cat([chunk(r, size, torch.bfloat16) for r in members])
            for in_place in (True, False):
                out = gather.allocate((len(members) * size,), dtype=torch.bfloat16, device=cpu)
                own = out.view(len(members), size)[group.rank()]
                own.copy_(chunk(rank, size, torch.bfloat16))
                gather(out, own if in_place else own.clone(), group)
                assert torch.equal(out, expected)
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
                sent = chunk(rank, len(members) * size)
                inputs = [chunk(r, len(members) * size).view(len(members), -1) for r in members]
                parts = torch.stack([x[group.rank()] for x in inputs]).double()
                total = parts.amax(0) if op == dist.ReduceOp.MAX else parts.sum(0)
                out = reduce.allocate((size,), dtype=torch.float32, device=cpu)
                reduce(out, sent.clone(), group, op)
                mean = total / len(members) if op == dist.ReduceOp.AVG else total
                torch.testing.assert_close(out.double(), mean, rtol=1e-6, atol=1e-6)


def test_direct_collectives_in_the_world_and_in_pairs() -> None:
    run_ranks(body, 4)


def overlapped(rank: int, world_size: int) -> None:
    from hybridengine.model.fsdp import DirectAllGather

    out = torch.empty(world_size * 5)
    work = DirectAllGather()(out, chunk(rank, 5), dist.group.WORLD, async_op=True)
    work.wait()
    assert torch.equal(out, torch.cat([chunk(r, 5) for r in range(world_size)]))


def test_an_asynchronous_gather_returns_its_work() -> None:
    run_ranks(overlapped, 2)
