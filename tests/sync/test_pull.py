"""The pull transport's tables on random plans, in one process; real ranks are in test_exchange."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from hybridengine.sync.layout import Copy, EngineLayout, TensorSpec
from hybridengine.sync.planner import build_plan
from hybridengine.sync.shards import ShardSpec
from tests.sync.random_plans import (
    Case,
    assert_written,
    exchange_all,
    pull_all,
    random_cases,
    values_of,
)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(random_cases())
def test_pulling_writes_the_same_weights_as_the_all_to_all(case: Case) -> None:
    plan = build_plan(case.sources, case.layouts, 4096, case.nodes)
    full = values_of(case.sources)
    pulled, packed = pull_all(plan, case.sources, case.layouts, full)
    assert_written(case.layouts, full, pulled)
    for ours, theirs in zip(
        pulled, exchange_all(plan, case.sources, case.layouts, full), strict=True
    ):
        for name, tensor in theirs.items():  # elements that no copy writes are NaN in both
            assert torch.equal(ours[name].view(torch.int32), tensor.view(torch.int32))
    assert packed * 4 <= sum(plan.bytes_sent)


def test_a_slice_for_several_ranks_is_packed_once() -> None:
    """Four ranks of TP 2: a shard is needed by the one other rank with its slice; a replicated
    weight by all three others, of both layouts."""
    shape, world = (16, 6), 4
    holders = tuple((rank,) for rank in range(world))
    sources = {n: ShardSpec.along(shape, torch.float32, 0, holders) for n in ("split", "norm")}
    half = TensorSpec((8, 6), (6, 1), torch.float32)
    layouts = [
        EngineLayout(
            {"split": half, "norm": TensorSpec(shape, (6, 1), torch.float32)},
            [
                Copy("split", "split", 48 * tp, 0, (8, 6), (6, 1), (6, 1)),
                Copy("norm", "norm", 0, 0, shape, (6, 1), (6, 1)),
            ],
        )
        for tp in range(2)
    ]
    by_rank = [layouts[0], layouts[1], layouts[0], layouts[1]]
    plan = build_plan(sources, by_rank)
    full = values_of(sources)
    engines, packed = pull_all(plan, sources, by_rank, full)
    assert_written(by_rank, full, engines)
    # Of `split` ranks 0 and 3 hold rows of their own slice, which one other rank needs; ranks 1
    # and 2 hold rows of the other slice, which two ranks need.
    assert sum(plan.bytes_sent) == 4 * ((1 + 2 + 2 + 1) * 24 + 4 * 3 * 24)
    assert packed == (4 + 4) * 24
