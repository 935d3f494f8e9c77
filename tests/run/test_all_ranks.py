"""What one rank finds wrong, all ranks raise."""

from __future__ import annotations

import pytest

from hybridengine.run.errors import ModelError
from hybridengine.run.messages import run_on_all_ranks, run_on_rank0
from tests.ranks import run_ranks

pytestmark = pytest.mark.multirank


def failing_body(rank: int, world_size: int) -> list[str]:
    def fail_on_rank_1() -> int:
        if rank == 1:
            raise OSError("no space")
        return rank

    def fail() -> None:
        raise ValueError("no model")

    messages = []
    for call in (
        lambda: run_on_all_ranks(fail_on_rank_1, ModelError, "loading"),
        lambda: run_on_all_ranks(fail, RuntimeError),
        lambda: run_on_rank0(fail, "saving"),
    ):
        with pytest.raises((ModelError, RuntimeError)) as error:
            call()
        messages.append(f"{type(error.value).__name__}: {error.value}")
    return [*messages, str(run_on_rank0(lambda: "value", "loading"))]


def test_all_ranks_raise_what_any_rank_finds() -> None:
    for rank, messages in enumerate(run_ranks(failing_body, 2)):
        assert messages == [
            "ModelError: loading failed on rank 1: OSError: no space",
            "RuntimeError: on rank 0: no model",
            "ModelError: saving failed on rank 0: no model",
            "None" if rank else "value",
        ]


def groups_body(rank: int, world_size: int) -> list[float]:
    """Return the timeouts of the groups of HSDP and of Ulysses, and that of the world, last."""
    from types import SimpleNamespace
    from typing import Any

    import torch
    import torch.distributed as dist

    from hybridengine.model import sharding_mesh
    from hybridengine.run.messages import group_timeout
    from hybridengine.train.batch import DataParallel

    def timeout_s(group: Any) -> float:
        return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()

    mesh = sharding_mesh("cpu", world_size, fsdp_size=1)
    assert mesh.mesh.tolist() == [[0], [1]] and mesh.mesh_dim_names == ("replica", "shard")
    assert dist.get_process_group_ranks(mesh.get_group("replica")) == [0, 1]
    assert dist.get_process_group_ranks(mesh.get_group("shard")) == [rank]
    session: Any = SimpleNamespace(world_size=world_size, rank=rank)
    parallel = DataParallel(session, sp_size=2)
    groups = (*mesh.get_all_groups(), parallel.sp_group, parallel.group)
    return [*map(timeout_s, groups), group_timeout().total_seconds()]


def test_groups_have_the_timeout_of_the_world() -> None:
    for timeouts in run_ranks(groups_body, 2, timeout_s=123.0):
        assert timeouts == [123.0] * 5
