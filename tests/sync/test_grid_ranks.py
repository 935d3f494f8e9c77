"""Trainers with FSDP2 over tensor and expert parallelism, on real gloo ranks."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from hybridengine.lab.layouts import TrainerLayout
from hybridengine.sync.adapter import Adapter
from hybridengine.sync.resharder import Resharder
from hybridengine.sync.shards import ShardSpec, unite_holders
from tests.ranks import message_of, run_ranks
from tests.sync.brute_force import brute_force_bound, fused_layout
from tests.sync.memory_engine import MemoryEngine, expected, pulling, shapes_of

pytestmark = pytest.mark.multirank

# Sizes that 2 × 2 ranks do not divide, where FSDP2 allows it (dimension 0).
SHAPES = shapes_of(
    column={"up.weight": (22, 10), "gate.weight": (14, 10)},
    row={"down.weight": (9, 22)},
    replicated={"norm.weight": (13,), "bias": (7, 3)},
)
EXPERTS = shapes_of(
    column={"w13": (6, 40)},
    row={"w2": (6, 24)},
    replicated={"router": (6, 5)},
)


class Mlp(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(10, 22, bias=False)
        self.gate = torch.nn.Linear(10, 14, bias=False)
        self.down = torch.nn.Linear(22, 9, bias=False)
        self.norm = torch.nn.RMSNorm(13)
        self.bias = torch.nn.Parameter(torch.empty(7, 3))


BOX = [0, 2, 1, 3]  # rank → shard of a weight that FSDP2 divides after tensor parallelism


def values(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Fill the parameters, the same on every rank, and return them."""
    generator = torch.Generator().manual_seed(0)
    full = {n: torch.randn(p.shape, generator=generator) for n, p in module.named_parameters()}
    module.load_state_dict(full)
    return full


def tensor_parallel(mesh: DeviceMesh) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """An FSDP2 model over tensor parallelism, and its full parameters."""
    model = Mlp()
    full = values(model)
    plan = {"up": ColwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["fsdp"])
    return dict(model.named_parameters()), full


def expert_parallel(mesh: DeviceMesh) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Fused experts divided over the EP ranks, then by FSDP2 on dimension 1 or again on 0."""
    model = torch.nn.ParameterDict({n: torch.empty(s) for n, (_, s) in EXPERTS.items()})
    full = values(model)
    for name in ("w13", "w2"):
        model[name] = torch.nn.Parameter(distribute_tensor(full[name], mesh["tp"], [Shard(0)]))
    columns = model["w2"]
    fully_shard(
        model, mesh=mesh["fsdp"], shard_placement_fn=lambda p: Shard(1) if p is columns else None
    )
    return dict(model.named_parameters()), full


def lora_body(rank: int, world_size: int) -> list[bool]:
    """Merge adapters into weights sharded on two dimensions, or on one dimension twice."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    shards, full = tensor_parallel(mesh)
    shards = {name: tensor.detach() for name, tensor in shards.items()}
    generator = torch.Generator().manual_seed(1)
    adapters = {}
    for name in ("up.weight", "down.weight"):
        rows, columns = full[name].shape
        left, right = (torch.randn(s, generator=generator) for s in ((rows, 2), (2, columns)))
        if name == "up.weight":  # placed as its weight: no rank needs another's rows of it
            left = DTensor.from_local(
                left[tuple(slice(*r) for r in ShardSpec.of(name, shards[name], 4).box(BOX[rank]))],
                *(shards[name].device_mesh, shards[name].placements),
                shape=left.shape,
                stride=left.stride(),
            )
        adapters[name] = Adapter(left, right, 0.5)
        whole = left.full_tensor() if isinstance(left, DTensor) else left
        full[name] = full[name] + 0.5 * whole.double() @ right.double()
        full[name] = full[name].float()
    right = []
    for transport in ("pull", "all-to-all"):
        engine = MemoryEngine(fused_layout(SHAPES, rank // 2, 2), rank // 2, 2)
        with pulling(transport == "pull"):
            resharder = Resharder(lambda: shards, engine, 4096, lambda: adapters)
        resharder.sync(1, verify=True)
        want = expected(engine, full)
        right.append(all(torch.equal(engine.tensors[n], t) for n, t in want.items()))
    return right


def calculated(kind: str) -> dict[str, ShardSpec]:
    """The placements that the advisor assumes for the same trainer."""
    shapes, inner_dims, on_dim1 = {
        "tensor": (SHAPES, {"up.weight": 0, "gate.weight": 0, "down.weight": 1}, ()),
        "expert": (EXPERTS, {"w13": 0, "w2": 0}, ("w2",)),
    }[kind]
    layout = TrainerLayout(4, 4, 2, inner_dims, shares_inner=False)
    return layout.sources({n: shape for n, (_, shape) in shapes.items()}, on_dim1)


def sync_body(rank: int, world_size: int, transport: str) -> dict[str, dict]:
    results = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    for name, make, shapes in (
        ("tensor", tensor_parallel, SHAPES),
        ("expert", expert_parallel, EXPERTS),
    ):
        shards, full = make(mesh)
        for grouping, tp_rank in (("strided", rank // 2), ("contiguous", rank % 2)):
            layouts = [fused_layout(shapes, r, 2) for r in range(2)]
            fallback = "bias" if grouping == "contiguous" and name == "tensor" else ""
            for layout in layouts:
                layout.fallback = {fallback: f"{fallback}: computed by mul"} if fallback else {}
                layout.by_loader = {fallback} - {""}
                layout.copies = [c for c in layout.copies if c.source != fallback]
            engine = MemoryEngine(layouts[tp_rank], tp_rank, 2)
            with pulling(transport == "pull"):
                resharder = Resharder(lambda shards=shards: shards, engine, 4096)
            report = resharder.sync(1, verify=True)
            want = expected(engine, full)
            plan = resharder.plan
            by_rank = [layouts[r // 2 if grouping == "strided" else r % 2] for r in range(4)]
            results[f"{name} {grouping}"] = {
                "right": all(torch.equal(engine.tensors[n], t) for n, t in want.items()),
                "received": report.bytes_received,
                "bound": brute_force_bound(plan.sources, by_rank)[rank],
                "planned": plan.lower_bound[rank],
                "gathered": {n: torch.equal(t.full_tensor(), full[n]) for n, t in shards.items()},
                "placements": {n: str(t.placements) for n, t in shards.items()},
                "holders": {n: s.holders for n, s in plan.sources.items()},
                "as_advised": calculated(name) == plan.sources,
            }
    return results


@pytest.mark.parametrize("transport", ["pull", "all-to-all"])
def test_trainers_with_two_sharded_dimensions(transport: str) -> None:
    ranks = run_ranks(sync_body, 4, transport)
    for name in ranks[0]:
        for result in (results[name] for results in ranks):
            assert result["right"] and result["as_advised"], name
            assert all(result["gathered"].values()), result["gathered"]
            assert result["received"] == result["bound"] == result["planned"], name
        assert any(results[name]["received"] for results in ranks)
    tensor, expert = (ranks[0][f"{kind} strided"] for kind in ("tensor", "expert"))
    strided = "(_StridedShard(dim=0, sf=2), Shard(dim=0))"
    assert tensor["placements"]["up.weight"] == expert["placements"]["w13"] == strided
    assert tensor["placements"]["down.weight"] == "(Shard(dim=0), Shard(dim=1))"
    assert expert["placements"]["w2"] == "(Shard(dim=1), Shard(dim=0))"
    assert tensor["holders"]["up.weight"] == ((0,), (2,), (1,), (3,))
    assert tensor["holders"]["norm.weight"] == ((0, 1), (2, 3)), "each rank knows one of two meshes"


def test_adapters_merge_into_weights_sharded_on_two_dimensions() -> None:
    assert run_ranks(lora_body, 4) == [[True, True]] * 4


def refused_body(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,))
    local, shape = torch.zeros(2, 4), torch.Size((4, 4))

    def placed(placement, of: torch.Tensor = local) -> DTensor:
        return DTensor.from_local(of, mesh, [placement], shape=shape, stride=(4, 1))

    given = [
        placed(Partial(), torch.zeros(4, 4)),
        placed(_StridedShard(0, split_factor=3)),
        placed(Shard(0), torch.zeros(3, 4)),
    ]
    messages = [message_of(lambda t=t: ShardSpec.of("w", t, world_size)) for t in given]
    halves, alone = ((0,), (1,)), ((0, 1),)
    spec = ShardSpec.along((4, 4), torch.float32, 0, halves if rank else alone)
    other = {f"of rank {rank}": spec}
    same = unite_holders(other) == other
    return [*messages, message_of(lambda: unite_holders({"w": spec})), str(same)]


def test_placements_that_are_no_grid_are_refused() -> None:
    for partial, strided, uneven, differ, same in run_ranks(refused_body, 2):
        assert "parameter 'w' has placements (Partial(sum),) on a mesh of shape (2,)" in partial
        assert "(_StridedShard(dim=0, sf=3),)" in strided and "only as fully_shard" in strided
        assert "give this rank a shard of shape (2, 4), but it holds (3, 4)" in uneven
        assert "'w' is sharded differently on different ranks: ((0, 1),) and ((0,), (1,))" in differ
        assert same == "True", "other names: the digests of the plans differ"
