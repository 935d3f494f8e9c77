"""Parameters joined from the tensors of a group's engine ranks, and what is refused."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridengine.model.shared_weights import SlicedWeights, engine_parts
from hybridengine.sync.layout import Copy, EngineLayout, LayoutError, TensorSpec
from tests.ranks import message_of, run_ranks

SHAPES = {"down": (3, 4), "k": (2, 4), "embed": (5, 2), "norm": (4,)}
WEIGHTS = {  # of each rank: padded rows of embed; both ranks have the last row of k
    "down": torch.zeros(3, 2),
    "qk": torch.zeros(3, 4),
    "table": torch.zeros(4, 2),
    "ln": torch.zeros(4),
}


def layout_of(rank: int) -> EngineLayout:
    copies = [
        Copy("down", "down", 2 * rank, 0, (3, 2), (4, 1), (2, 1)),
        Copy("k", "qk", 4, 8, (1, 4), (4, 1), (4, 1)),
        Copy("embed", "table", 8 * rank, 0, (1 if rank else 4, 2), (2, 1), (2, 1)),
        Copy("norm", "ln", 0, 0, (4,), (1,), (1,)),
    ]
    if rank == 0:
        copies.append(Copy("k", "qk", 0, 4, (1, 4), (4, 1), (4, 1)))
    return EngineLayout({n: TensorSpec.of(t) for n, t in WEIGHTS.items()}, copies)


def sliced(weights: dict[str, torch.Tensor], group: Any, layouts: list[EngineLayout]) -> Any:
    parts = [engine_parts(layout, weights, SHAPES, torch.float32) for layout in layouts]
    own = layouts[dist.get_rank()]
    return SlicedWeights(own, weights, parts, SHAPES, torch.float32, group)


def body(rank: int, world_size: int) -> dict[str, Any]:
    weights = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    group = dist.new_group(timeout=timedelta(seconds=60))
    memory = sliced(weights, group, [layout_of(0), layout_of(1)])
    full = {
        name: torch.arange(1.0, 1 + tensor.numel()).view(shape)
        for (name, shape), tensor in zip(SHAPES.items(), memory.values(), strict=True)
    }
    for name, values in full.items():
        with memory.writing(name) as tensor:
            tensor.copy_(values)
    freed = [name for name, x in memory.items() if not x.untyped_storage().nbytes()]
    versions = [x._version for x in memory.values()]
    memory.gather(["down", "k"])
    memory.gather(memory)
    equal = {name: torch.equal(x, full[name]) for name, x in memory.items()}
    same = versions == [x._version for x in memory.values()]
    memory.free(memory)
    memory.start(["down"])
    memory.start(["k", "down"])  # two exchanges at once
    weights["down"].add_(1)
    memory.restart()
    memory.gather(["down"])
    restarted = torch.equal(memory["down"], full["down"] + 1)
    weights["down"].sub_(1)
    memory.gather(["k"])
    equal["k after a restart"] = torch.equal(memory["k"], full["k"])
    hasty = dist.new_group(timeout=timedelta(seconds=1))
    memory = sliced(weights, hasty, [layout_of(0), layout_of(1)])
    alone = message_of(lambda: memory.gather(["down"])) if rank == 0 else ""
    dist.barrier()
    return {
        "order": list(memory) == list(SHAPES),
        "freed": freed,
        "equal": equal,
        "versions": same,
        "restarted": restarted,
        "view": memory["norm"].data_ptr() == weights["ln"].data_ptr(),
        "own": weights["down"].tolist(),
        "alone": alone,
    }


@pytest.mark.multirank
def test_parts_are_joined_and_written(tmp_path: Any) -> None:
    """Of columns, of rows that both ranks have, and of padded rows; `norm` is whole."""
    results = run_ranks(body, 2)
    for rank, result in enumerate(results):
        assert result["order"] and result["versions"] and result["view"] and result["restarted"]
        assert result["freed"] == ["down", "k", "embed"]
        assert all(result["equal"].values()), result["equal"]
        columns = torch.arange(1.0, 13.0).view(3, 4)[:, 2 * rank : 2 * rank + 2]
        assert result["own"] == columns.tolist()
    assert "RuntimeError" in results[0]["alone"], "a gather without the other rank has to end"


def refusal(rank: int, world_size: int) -> str:
    layout = layout_of(1)
    return message_of(lambda: sliced(dict(WEIGHTS), dist.group.WORLD, [layout, layout]))


@pytest.mark.multirank
def test_missing_parts_are_named() -> None:
    for message in run_ranks(refusal, 2):
        assert message == f"{LayoutError.__name__}: the engine's ranks do not hold all of 'down'"
