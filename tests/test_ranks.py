"""tests.ranks: results, failures, exits and timeouts of ranks."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.multirank


def _sum(rank: int, world_size: int, base: torch.Tensor) -> torch.Tensor:
    value = base + rank
    dist.all_reduce(value)
    return value


def _fail_on_last(rank: int, world_size: int) -> None:
    if rank == world_size - 1:
        raise ValueError("boom")
    dist.barrier()


def _exit_on_last(rank: int, world_size: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    if rank == world_size - 1:
        store.wait(["started"])  # else the others' start may fail first
        os._exit(7)
    store.set("started", "")
    time.sleep(60)


def _sleep(rank: int, world_size: int) -> None:
    time.sleep(60)


def _missing(rank: int, world_size: int, modules: list[str]) -> set[str]:
    return {*modules} - {*sys.modules}


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_in_rank_order(world_size: int) -> None:
    results = run_ranks(_sum, world_size, torch.tensor([1.0]))
    expected = world_size + sum(range(world_size))
    assert [r.item() for r in results] == [expected] * world_size


def test_failure_names_rank_and_ends_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1 of 2(.|\n)*boom"):
        run_ranks(_fail_on_last, 2, timeout_s=300)
    assert time.monotonic() - start < 200


def test_an_exit_is_reported() -> None:
    with pytest.raises(RankFailure, match="rank 1 ended without a result, exit code 7"):
        run_ranks(_exit_on_last, 2)


def test_timeout_is_reported() -> None:
    with pytest.raises(RankFailure, match=r"ranks \[0\] did not finish within 8 s"):
        run_ranks(_sleep, 1, timeout_s=8)


def test_ranks_start_with_the_imports_of_their_server() -> None:
    """A server ignores imports that fail; tests would then only be slow."""
    modules = ["hypothesis", "torch._dynamo", "hybridengine.train.rl", "hybridengine.train.sft"]
    assert run_ranks(_missing, 1, modules) == [set()]
