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
            # float32 sums of bfloat16, into the tensor that FSDP2 allocates in bfloat16
            sent = [chunk(r, len(members) * size, torch.bfloat16) for r in members]
            out = reduce.allocate((size,), dtype=torch.bfloat16, device=cpu)
            reduce(out, sent[group.rank()].clone(), group, dist.ReduceOp.AVG)
            parts = [x.view(len(members), -1)[group.rank()].float() for x in sent]
            assert out.dtype == torch.float32
            assert torch.equal(out, sum(parts[1:], parts[0]) / len(members))


def gradients(rank: int, world_size: int) -> None:
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from hybridengine.model.fsdp import shard_model, sharding_mesh
    from hybridengine.run.config.common import ShardingConfig

    for size in (world_size, 2, 1):
        mesh = sharding_mesh("cpu", world_size, size)
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 48, bias=False)))
        ours, plain = models
        state = {name: value.clone() for name, value in ours.state_dict().items()}
        load = shard_model(
            ours, [*ours], mesh, ShardingConfig(dtype="bfloat16"), shard_dim1=lambda name: True,
            ignored=set(),
        )  # fmt: skip
        load(state)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in (*plain, plain):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        for micro_batch in range(2):  # the second one is added
            x = chunk(10 * micro_batch + rank, 32 * 64).view(32, 64)
            for model in models:
                model(x).float().square().sum().backward()
        for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None
            torch.testing.assert_close(
                a.grad.full_tensor(), b.grad.full_tensor(), rtol=1e-6, atol=1e-6, msg=name
            )
            assert a.grad.dtype == torch.float32


def test_gradients_sent_in_bfloat16_are_added_in_float32() -> None:
    run_ranks(gradients, 4)


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
