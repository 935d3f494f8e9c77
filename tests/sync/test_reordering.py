"""Permutations after loading are detected by content and applied to the recorded copies."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.sync.blocks import contiguous_strides
from hybridengine.sync.checks import check_coverage
from hybridengine.sync.layout import Copy, EngineLayout, LayoutError, TensorSpec
from hybridengine.sync.reordering import (
    find_reordering,
    reordered_layout,
    undo_reordering,
)


def swap_halves(w: torch.Tensor) -> torch.Tensor:
    """[w1; w3] → [w3; w1]."""
    return torch.cat(w.chunk(2, 1)[::-1], 1)


def interleave(w: torch.Tensor) -> torch.Tensor:
    """Rows of w3 and w1 in turn."""
    return torch.stack(w.chunk(2, 1)[::-1], 2).reshape(w.shape)


def shuffle_rows(w: torch.Tensor) -> torch.Tensor:
    """Inside tiles of eight rows: 0 4 1 5 2 6 3 7."""
    return w.unflatten(1, (-1, 2, 4)).transpose(2, 3).reshape(w.shape)


def block_columns(w: torch.Tensor) -> torch.Tensor:
    """[E, rows, columns] → [E, columns / 4, rows, 4], in the same memory."""
    return w.unflatten(2, (-1, 4)).transpose(1, 2).reshape(w.shape)


def flip_experts(w: torch.Tensor) -> torch.Tensor:
    return w.flip(0)


STEPS = [swap_halves, interleave, shuffle_rows, block_columns, flip_experts]


def find(tensor: torch.Tensor, change) -> list[Copy]:
    return find_reordering({"w": tensor}, lambda: tensor.copy_(change(tensor.clone())))["w"]


def perform(copies: list[Copy], sources: dict[str, torch.Tensor], out: torch.Tensor) -> None:
    for c in copies:
        source = sources[c.source].as_strided(c.sizes, c.source_strides, c.source_offset)
        out.as_strided(c.sizes, c.destination_strides, c.destination_offset).copy_(source)


def assert_followed(steps, experts: int, rows: int, dtype: torch.dtype) -> None:
    """Each expert is loaded from one of a fused parameter, the last columns are padding."""

    def change(w: torch.Tensor) -> torch.Tensor:
        for step in steps:
            w = step(w)
        return w

    shape = (experts, rows, 12)
    engine = torch.randn(shape).to(dtype)
    before = engine.clone()
    reordering = find(engine, change)
    assert torch.equal(engine, before), "the values are put back"
    assert torch.equal(undo_reordering(change(engine), reordering), engine)

    trained = {"fused": torch.randn(experts, rows, 8)}
    strides = contiguous_strides(shape)
    copies = [
        Copy("fused", "w", e * rows * 8, e * rows * 12, (rows, 8), (8, 1), (12, 1))
        for e in range(experts)
    ]
    padding = ("w", 8, (experts, rows, 4), strides, 2.0)
    layout = EngineLayout({"w": TensorSpec(shape, strides, dtype)}, copies, [padding])
    followed = reordered_layout(layout, {"w": reordering}, {"fused": (experts, rows, 8)})
    check_coverage(followed)
    expected = change(torch.cat([trained["fused"], torch.full((experts, rows, 4), 2.0)], 2))
    got = torch.zeros(shape)
    for _, offset, sizes, fill_strides, value in followed.constants:
        got.as_strided(sizes, fill_strides, offset).fill_(value)
    perform(followed.copies, trained, got)
    assert torch.equal(got, expected)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(STEPS), max_size=4),
    st.integers(1, 3),
    st.sampled_from([8, 16, 48]),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_synced_weights_are_what_loading_and_reordering_make(steps, experts, rows, dtype) -> None:
    with suppress(LayoutError):  # refusing is allowed; a wrong answer is not
        assert_followed(steps, experts, rows, dtype)


@pytest.mark.parametrize(
    "steps",
    [[swap_halves], [interleave], [flip_experts], [interleave, shuffle_rows, block_columns]],
    ids=lambda steps: "+".join(step.__name__ for step in steps),
)
def test_orders_of_real_kernels_are_never_refused(steps) -> None:
    assert_followed(steps, 3, 48, torch.bfloat16)


def test_experts_in_a_kernels_layout_are_few_copies() -> None:
    """All of what FlashInfer's TRT-LLM kernel wants, on 64 experts."""
    weight = torch.zeros(64, 64, 32, dtype=torch.bfloat16)
    copies = find(weight, lambda w: block_columns(shuffle_rows(interleave(w))))
    assert len(copies) == 2 and all(c.sizes[0] == 64 for c in copies)


COMPUTED = {
    "scaled": (lambda w: w * 2, "computed"),
    "partly zero": (lambda w: torch.cat([w[:, :-1], 0 * w[:, -1:]], 1), "computed"),
    "doubled": (lambda w: torch.cat([w[:, :8], w[:, :8]], 1), "dropped"),
    "shuffled": (
        lambda w: w.view(-1)[torch.randperm(w.numel(), generator=torch.manual_seed(0))].view(
            w.shape
        ),
        "without a regular pattern",
    ),
}


@pytest.mark.parametrize("how", COMPUTED)
def test_what_is_no_regular_permutation_is_refused_by_name(how: str) -> None:
    change, reason = COMPUTED[how]
    weight = torch.randn(4, 16, 32)
    before = weight.clone()
    with pytest.raises(LayoutError, match=f"^w: .*{reason}"):
        find(weight, change)
    assert torch.equal(weight, before)


def test_a_reordered_tensor_of_the_loader_is_refused() -> None:
    spec = TensorSpec((4, 8, 4), (32, 4, 1), torch.float32)
    layout = EngineLayout({"w": spec}, fallback={"a": "w: exp"}, by_loader={"w"})
    with pytest.raises(LayoutError, match="'w' is made by the engine's own loader and reordered"):
        reordered_layout(layout, {"w": find(torch.zeros(4, 8, 4), swap_halves)}, {"a": (4, 8, 4)})
