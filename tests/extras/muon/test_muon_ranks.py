"""Muon on shards: updates of torch on full matrices, each orthogonalized on one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.extras.muon.muon_cases import (
    MATRICES,
    gradients,
    optimizer_of,
    set_gradients,
    small,
    train,
    trained_by_torch,
)
from tests.ranks import run_ranks
from tests.tensors import part, whole

pytestmark = pytest.mark.multirank

DIM1 = {"wide.weight", "square.weight", "experts"}  # where the ranks divide dimension 1
SPLIT = {"square.weight": 4, "again.weight": 2, "experts": 2}  # rows of a matrix


def sharded(world_size: int, replicas: int = 1, dim1: bool = False) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    shape, names = (world_size // replicas,), ("shard",)
    if replicas > 1:
        shape, names = (replicas, *shape), ("replica", *names)
    model = small()
    chosen = {id(p) for n, p in model.named_parameters() if n in DIM1}
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", shape, mesh_dim_names=names),
        shard_placement_fn=lambda p: (
            Shard(1) if dim1 and id(p) in chosen and p.shape[1] % shape[-1] == 0 else None
        ),
    )
    return model


def updates_body(rank: int, world_size: int, ways: dict[str, dict[str, Any]]) -> None:
    for way, options in ways.items():
        model = sharded(world_size, **options)
        split = SPLIT if "split" in way else {}
        optimizer = optimizer_of(model, split=split)
        train(model, optimizer, range(3))
        expected = trained_by_torch(3, "match_rms_adamw", True, split=split)
        for name, parameter in model.named_parameters():
            full = whole(parameter.detach())
            torch.testing.assert_close(
                full, expected[name], rtol=1e-6, atol=1e-7, msg=f"{way}: {name}"
            )
        momentum = optimizer.moments()["wide.weight/momentum_buffer"]
        assert part(momentum).shape == part(model.wide.weight).shape
        owned = [m for matrices in optimizer.adamw.exchange().owned for m in matrices]
        count = 2 + 2 + 4 + 12 if split else len(MATRICES) - 1 + 6  # the experts
        assert len(owned) == len(set(owned)) == count


@pytest.mark.parametrize("world_size", [2, 4])
def test_updates_are_those_of_torch(world_size: int) -> None:
    ways: dict[str, dict[str, Any]] = {"dim 0": {}, "dim 1": {"dim1": True}}
    ways |= {f"{way}, split": options for way, options in ways.items()}
    if world_size == 4:
        ways["replicas"] = {"replicas": 2}
    run_ranks(updates_body, world_size, ways)


def replicated_body(rank: int, world_size: int) -> list[torch.Tensor]:
    model = small()
    optimizer = optimizer_of(model)
    train(model, optimizer, range(3))
    work = [sum(m.flops for m in matrices) for matrices in optimizer.adamw.exchange().owned]
    assert min(work) > 0, "divided, though every rank has all"
    return [p.detach() for p in model.parameters()]


def test_full_parameters_on_every_rank_stay_equal() -> None:
    first, second = run_ranks(replicated_body, 2)
    expected = trained_by_torch(3, "match_rms_adamw", True)
    for a, b, torchs in zip(first, second, expected.values(), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, torchs, rtol=1e-6, atol=1e-7)


def skipped_body(rank: int, world_size: int) -> None:
    model = sharded(world_size)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(1))
    state = {**dict(model.named_parameters()), **optimizer.moments()}
    before = {name: part(x).detach().clone() for name, x in state.items()}
    wrong = gradients(small(), 1)
    wrong["tall.weight"][12, 3] = torch.nan  # in the last rank's shard
    set_gradients(model, wrong)
    optimizer.step(1.0)
    assert optimizer.skipped_in_a_row == 1
    assert all(torch.equal(part(x), before[name]) for name, x in state.items())


def test_a_skipped_update_changes_no_bit_on_any_rank() -> None:
    run_ranks(skipped_body, 2)


def checkpoint_body(rank: int, world_size: int, folder: Path, phase: str) -> None:
    """Train two steps and save; or resume and take a third, as without a break."""
    from hybridengine.model.fsdp import Offloader
    from hybridengine.train.checkpoint.tensors import TensorFiles

    model = sharded(world_size) if world_size > 1 else small()
    model.offloader = Offloader(lambda: (), False)  # as load_model does
    optimizer = optimizer_of(model)
    files = TensorFiles({"actor": (model, optimizer)})
    if phase == "save":
        train(model, optimizer, range(2))
        files.save(folder).result()
    else:
        files.load(folder)
    train(model, optimizer, range(2, 3))
    full = {n: whole(p.detach()).clone() for n, p in model.named_parameters()}
    full |= {n: whole(x).clone() for n, x in optimizer.moments().items()}
    if phase == "save" and rank == 0:
        torch.save(full, folder / "expected.pt")
    dist.barrier()
    expected = torch.load(folder / "expected.pt")
    assert expected.keys() == full.keys()
    for name, tensor in full.items():
        if phase == "resume":
            assert torch.equal(tensor, expected[name]), name
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7, msg=name)


def test_checkpoints_resume_bit_for_bit_and_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    run_ranks(checkpoint_body, 2, tmp_path, "save")
    run_ranks(checkpoint_body, 2, tmp_path, "resume")
    for world_size in (1, 4):
        run_ranks(checkpoint_body, world_size, tmp_path, "resume elsewhere")
