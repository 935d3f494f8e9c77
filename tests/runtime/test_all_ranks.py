"""What one rank finds wrong, all ranks raise."""

from __future__ import annotations

import pytest

from hybridengine.errors import ModelError
from hybridengine.runtime.all_ranks import run_on_all_ranks, run_on_rank0
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
