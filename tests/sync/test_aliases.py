"""Views of an engine's tensors as trained parameters, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hybridengine.model.shared_weights import parameter_views
from hybridengine.sync.layout import Copy, EngineLayout, LayoutError, Quantized, TensorSpec

SHAPES = {"q": (6, 4), "k": (1, 4), "norm": (4,), "embed": (5, 4)}
WEIGHTS = {
    "qk": torch.arange(28.0).view(7, 4),
    "ln": torch.arange(4.0),
    "table": torch.arange(32.0).view(8, 4),  # padded
}
COPIES = [
    Copy("q", "qk", 0, 0, (6, 4), (4, 1), (4, 1)),
    Copy("k", "qk", 0, 24, (1, 4), (7, 1), (3, 1)),  # the stride of one step has no meaning
    Copy("norm", "ln", 0, 0, (4,), (1,), (1,)),
    Copy("embed", "table", 0, 0, (5, 4), (4, 1), (4, 1)),
]


def layout_of(copies: list[Copy], weights: dict[str, torch.Tensor]) -> EngineLayout:
    return EngineLayout({n: TensorSpec.of(t) for n, t in weights.items()}, copies)


def test_rows_of_fused_and_padded_tensors() -> None:
    views = parameter_views(layout_of(COPIES, WEIGHTS), WEIGHTS, SHAPES, torch.float32)
    assert list(views) == list(SHAPES)
    assert torch.equal(views["q"], WEIGHTS["qk"][:6])
    assert torch.equal(views["k"], WEIGHTS["qk"][6:])
    assert torch.equal(views["embed"], WEIGHTS["table"][:5])
    for name, view in views.items():
        assert view.shape == SHAPES[name] and view.is_contiguous()
    storages = {t.untyped_storage().data_ptr() for t in WEIGHTS.values()}
    assert {view.untyped_storage().data_ptr() for view in views.values()} == storages


def test_parts_that_are_together() -> None:
    """A tower's qkv is loaded in three parts; experts one by one, gate and up in turns."""
    parts = [Copy("q", "qk", at, at + 4, (2, 4), (4, 1), (4, 1)) for at in (0, 16, 8)]
    views = parameter_views(layout_of(parts, WEIGHTS), WEIGHTS, {"q": (6, 4)}, torch.float32)
    assert torch.equal(views["q"], WEIGHTS["qk"][1:])


def test_a_slice_of_a_tensor_that_begins_inside_its_storage() -> None:
    storage = torch.arange(30.0)
    weights = WEIGHTS | {"ln": storage[10:14]}
    views = parameter_views(layout_of(COPIES, weights), weights, SHAPES, torch.float32)
    assert torch.equal(views["norm"], storage[10:14])


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ([Copy("q", "qk", 0, 0, (6, 4), (4, 1), (1, 6))], "'q' in another order"),
        ([Copy("q", "qk", 0, 0, (3, 4), (4, 1), (4, 1))], "'q' in another order, or not all of it"),
        ([Copy("q", "qk", 0, 0, (6, 4), (0, 1), (4, 1))], "'q' in another order"),
        (
            [
                Copy("q", "qk", 0, 4, (3, 4), (4, 1), (4, 1)),
                Copy("q", "qk", 12, 0, (3, 4), (4, 1), (4, 1)),
            ],
            "'q' in another order",
        ),
        ([], "does not hold the values of 'q'"),
        (
            [
                Copy("q", "qk", 0, 0, (6, 4), (4, 1), (4, 1)),
                Copy("q", "table", 0, 0, (6, 4), (4, 1), (4, 1)),
            ],
            "holds 'q' 2 times",
        ),
    ],
)
def test_other_forms_are_refused_by_name(copies: list[Copy], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        parameter_views(layout_of(copies, WEIGHTS), WEIGHTS, {"q": (6, 4)}, torch.float32)


def test_other_values_are_refused_by_name() -> None:
    layout = layout_of(COPIES, WEIGHTS)
    with pytest.raises(LayoutError, match=r"'q' in torch.float32.*computes in torch.bfloat16"):
        parameter_views(layout, WEIGHTS, SHAPES, torch.bfloat16)
    quantized = replace(layout, quantized={"ln": Quantized(torch.bfloat16, "scale")})
    with pytest.raises(LayoutError, match="the values of 'norm'"):
        parameter_views(quantized, WEIGHTS, SHAPES, torch.float32)
    loaded = replace(layout, fallback={"embed": "table: no copy"})
    with pytest.raises(LayoutError, match="the values of 'embed'"):
        parameter_views(loaded, WEIGHTS, SHAPES, torch.float32)


def test_two_names_of_one_tensor_are_one_view() -> None:
    weights = WEIGHTS | {"head": WEIGHTS["table"]}
    copies = [*COPIES, replace(COPIES[3], destination="head")]
    views = parameter_views(layout_of(copies, weights), weights, SHAPES, torch.float32)
    assert views["embed"].data_ptr() == WEIGHTS["table"].data_ptr()


def test_what_a_sync_still_writes() -> None:
    buffer = Copy("bias", "ln", 0, 0, (4,), (1,), (1,))
    layout = layout_of([*COPIES, buffer], WEIGHTS)
    layout.constants = [("table", 20, (12,), (1,), 0.0), ("ln", 0, (4,), (1,), 1.0)]
    rest = layout.without(SHAPES)
    assert list(rest.destinations) == ["ln"] and rest.copies == [buffer]
    assert rest.constants == [("ln", 0, (4,), (1,), 1.0)]
