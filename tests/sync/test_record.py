"""Recording and composing copies: they do what the recorded program did."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridengine.model.parameters import checkpoint_layout_from_config
from hybridengine.sync.blocks import NotABlock, contiguous_strides
from hybridengine.sync.layout import Copy, LayoutError, compose, merge
from hybridengine.sync.loader import (
    compose_with_checkpoint,
    record_checkpoint,
    record_layout,
)
from tests.tiny_models import tiny_config


def walk(offset: int, sizes, strides) -> np.ndarray:
    address = np.array([offset])
    for size, stride in zip(sizes, strides, strict=True):
        address = (address[:, None] + np.arange(size) * stride).reshape(-1)
    return address


def run(copies, sources: dict[str, torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """The copies, performed one element at a time."""
    for c in copies:
        read = sources[c.source].reshape(-1)[walk(c.source_offset, c.sizes, c.source_strides)]
        out.view(-1)[walk(c.destination_offset, c.sizes, c.destination_strides)] = read
    return out


def draw_view(draw, view: torch.Tensor, steps: int = 3) -> torch.Tensor:
    for _ in range(draw(st.integers(0, steps))):
        if not view.dim():
            break
        kind = draw(st.sampled_from(["narrow", "transpose", "split", "select", "step"]))
        dim = draw(st.integers(0, view.dim() - 1))
        size = view.shape[dim]
        if kind == "narrow":
            start = draw(st.integers(0, size - 1))
            view = view.narrow(dim, start, draw(st.integers(1, size - start)))
        elif kind == "transpose":
            view = view.transpose(dim, draw(st.integers(0, view.dim() - 1)))
        elif kind == "split":
            parts = draw(st.sampled_from([p for p in range(1, size + 1) if size % p == 0]))
            view = view.unflatten(dim, (parts, size // parts))
        elif kind == "select" and view.dim() > 1:
            view = view.select(dim, draw(st.integers(0, size - 1)))
        elif kind == "step" and size > 2:
            view = view[(slice(None),) * dim + (slice(None, None, 2),)]
    return view


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.data())
def test_compose_reads_through_any_writes(data) -> None:
    """Tensor ← views of two sources; a view of it is then read: compose against doing it."""
    middle = torch.full(data.draw(shapes), -1)
    sources, writes = {}, []
    regions = [middle]
    if middle.shape[0] > 1:  # two writes that do not overlap
        at = data.draw(st.integers(1, middle.shape[0] - 1))
        regions = [middle[:at], middle[at:]]
    for i, region in enumerate(regions):
        target = draw_view(data.draw, region)
        source = torch.arange(target.numel()).reshape(target.shape) + 1000 * (i + 1)
        order = data.draw(st.permutations(range(source.dim())))
        stored = source.permute(order).contiguous()  # the source's memory, in some axis order
        read = stored.permute([list(order).index(d) for d in range(source.dim())])
        sources[str(i)] = stored
        target.copy_(read)
        writes.append(
            Copy(
                str(i),
                "",
                0,
                target.storage_offset(),
                tuple(target.shape),
                read.stride(),
                target.stride(),
            )
        )
    view = draw_view(data.draw, middle)
    dense = contiguous_strides(tuple(view.shape))
    copy = Copy("", "out", view.storage_offset(), 0, tuple(view.shape), view.stride(), dense)
    try:
        composed = compose(copy, writes)
    except NotABlock:
        return  # an error is allowed; a wrong result is not
    got = run(composed, sources, torch.full((view.numel(),), -1))
    assert got.tolist() == view.reshape(-1).tolist()
    assert all(c.destination == "out" for c in composed)


def test_views_of_plain_writes_never_refuse() -> None:
    """An expert of a fused weight, in full or as a tensor-parallel slice, must compose."""
    experts, rows, width = 4, 6, 8
    fused = torch.arange(experts * rows * width).reshape(experts, rows, width)
    for e in range(experts):
        gate = fused[e, : rows // 2]
        cut = Copy("fused", "gate", gate.storage_offset(), 0, gate.shape, gate.stride(), (width, 1))
        for view in (torch.arange(24).view(3, 8)[1:], torch.arange(24).view(3, 8)[:, 2:5]):
            part = Copy(
                "gate",
                "out",
                view.storage_offset(),
                0,
                view.shape,
                view.stride(),
                contiguous_strides(tuple(view.shape)),
            )
            got = run(compose(part, [cut]), {"fused": fused}, torch.empty(view.numel()).long())
            assert got.tolist() == gate.reshape(-1)[view.reshape(-1)].tolist()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_merge_does_the_same_in_fewer_copies(experts, rows, width, reverse) -> None:
    fused = torch.arange(experts * rows * width)
    copies = [
        Copy("s", "d", e * rows * width, e * rows * width, (rows, width), (width, 1), (width, 1))
        for e in range(experts)
    ][:: -1 if reverse else 1]
    shape = {"s": (experts, rows, width)}
    merged = merge(copies, shape, {"d": (experts, rows, width)})
    assert len(merged) == 1
    assert run(merged, {"s": fused}, torch.zeros_like(fused)).equal(fused)
    copies.append(Copy("s", "d", 0, 7 * rows * width, (rows, width), (width, 1), (width, 1)))
    out = torch.zeros(8 * rows * width).long()
    again = merge(copies, shape, {"d": (8, rows, width)})
    assert run(again, {"s": fused}, out.clone()).equal(run(copies, {"s": fused}, out.clone()))


class Engine(torch.nn.Module):
    """Parameters on the meta device and a loader under test."""

    def __init__(self, load, buffers=(), **shapes) -> None:
        super().__init__()
        for name, shape in shapes.items():
            tensor = torch.empty(shape, device="meta", dtype=torch.bfloat16)
            if name in buffers:
                self.register_buffer(name, tensor)
            else:
                setattr(self, name, torch.nn.Parameter(tensor))
        self.load = load

    def load_weights(self, weights) -> None:
        self.load(self, weights)


def record(load, checkpoint, buffers=(), **shapes):
    engine = Engine(load, buffers, **shapes)
    return record_layout(engine, engine.load_weights, checkpoint, torch.bfloat16)


PURE = {
    "view": lambda w: w[2:, 1:4],
    "clone": lambda w: w.clone()[2:, 1:4],
    "cast": lambda w: w.float()[2:, 1:4],
    "contiguous transpose": lambda w: w.t().contiguous().t()[2:, 1:4],
    "transpose": lambda w: w.t().contiguous()[2:, 1:4],
    "moved to a device": lambda w: w.to("cpu")[2:, 1:4],
    "cat": lambda w: torch.cat([w[:, 3:], w[:, :3]], 1)[2:, 1:4],
    "stack": lambda w: torch.stack([w[1], w[0], w[3], w[2]])[2:, 1:4],
    "chunk of cat": lambda w: torch.cat([w, w]).chunk(2)[1][2:, 1:4],
    "permuted heads": lambda w: w.view(2, 2, 6).transpose(0, 1).reshape(4, 6)[2:, 1:4],
    "temporary": lambda w: torch.empty_like(w).copy_(w)[2:, 1:4],
}


@pytest.mark.parametrize("how", PURE)
def test_pure_copies_are_followed(how: str) -> None:
    shape = (6, 6) if how == "transpose" else (4, 6)
    values = torch.arange(math.prod(shape)).reshape(shape)
    expected = PURE[how](values)

    def load(engine, weights):
        for _, w in weights:
            engine.p.data.copy_(PURE[how](w))

    layout = record(load, {"w": shape}, p=tuple(expected.shape))
    assert layout.fallback == {}
    got = run(layout.copies, {"w": values}, torch.full((expected.numel(),), -1))
    assert got.tolist() == expected.reshape(-1).tolist()


COMPUTED = {
    "exp": (lambda w: -torch.exp(w.float()), "exp"),
    "add": (lambda w: w + 1, "add"),
    "lossy cast": (lambda w: w.to(torch.float8_e4m3fn).float(), "rounded to torch.float8"),
    "gather": (lambda w: w[torch.tensor([1, 0])], "index"),
    "in place": (lambda w: w.clone().mul_(2), "mul_"),
    "of an element": (lambda w: torch.full_like(w, 0.5).mul_(w[0, 0]), "mul_"),
}


@pytest.mark.parametrize("how", COMPUTED)
def test_what_is_computed_falls_back_with_its_reason(how: str) -> None:
    compute, reason = COMPUTED[how]

    def load(engine, weights):
        for name, w in weights:
            getattr(engine, name).data.copy_(compute(w) if name == "a" else w)

    layout = record(load, {"a": (2, 3), "b": (2, 3)}, a=(2, 3), b=(2, 3))
    assert list(layout.fallback) == ["a"] and layout.by_loader == {"a"}
    assert layout.fallback["a"].startswith("a: ") and reason in layout.fallback["a"]
    assert [c.source for c in layout.copies] == ["b"]


def test_all_that_feeds_a_computed_tensor_falls_back() -> None:
    def load(engine, weights):
        for name, w in weights:
            engine.p.data.copy_(w) if name == "a" else engine.p.data.mul_(w)

    layout = record(load, {"a": (3,), "b": (3,)}, p=(3,))
    assert set(layout.fallback) == {"a", "b"} and layout.copies == []


def test_an_element_read_as_a_number_is_a_copy() -> None:
    def load(engine, weights):
        for name, w in weights:
            getattr(engine, name).data.fill_(w.item() if name == "a" else 2 * w.item())

    layout = record(load, {"b": (1,), "a": (1,)}, a=(3,), b=(1,))
    assert list(layout.fallback) == ["b"]
    (copy,) = layout.copies
    assert (copy.source, copy.sizes, copy.source_strides) == ("a", (3,), (0,))


def test_replaced_and_new_parameters_buffers_and_padding() -> None:
    def load(engine, weights):
        for name, w in weights:
            if name == "replaced":
                engine.replaced.data = w.clone()
            elif name == "made":
                engine.made = torch.nn.Parameter(w * 1)
            elif name == "padded":
                engine.padded.data[2:].fill_(0)
                engine.padded.data[:2].copy_(w)
            else:
                getattr(engine, name).copy_(w)

    checkpoint = {"replaced": (2,), "padded": (2,), "buffer": (2,), "made": (3,)}
    layout = record(
        load, checkpoint, ("buffer", "other"), replaced=(2,), padded=(4,), buffer=(2,), other=(2,)
    )
    assert layout.fallback == {
        "replaced": "replaced: the loader replaces the storage of it",
        "made": "made: the loader creates it",
    }
    assert set(layout.destinations) == {"replaced", "padded", "buffer"}
    assert layout.constants == [("padded", 2, (2,), (1,), 0.0)]


def test_a_zeroed_checkpoint_tensor_is_a_constant() -> None:
    """A row-parallel bias belongs to one rank; loaders zero it in place on the others."""

    def load(engine, weights):
        for name, w in weights:
            (w if name == "a" else w[:1]).zero_()
            getattr(engine, name).data.copy_(w)

    layout = record(load, {"a": (2,), "b": (2,)}, a=(2,), b=(2,))
    assert layout.constants == [("a", 0, (2,), (1,), 0.0)]
    assert list(layout.fallback) == ["b"] and layout.by_loader == {"b"} and layout.copies == []


def test_constants_over_copies_and_copies_over_constants() -> None:
    """Zero all, then copy a part; and the other way round, which copies alone do not describe."""

    def load(engine, weights):
        for name, w in weights:
            if name == "first":
                engine.first.data.zero_()
                engine.first.data[:2].copy_(w)
            else:
                engine.last.data[:2].copy_(w)
                engine.last.data[1:].fill_(0)

    layout = record(load, {"first": (2,), "last": (2,)}, first=(4,), last=(4,))
    assert layout.constants == [("first", 0, (4,), (1,), 0.0)]
    assert [(c.destination, c.sizes) for c in layout.copies] == [("first", (2,))]
    assert layout.fallback == {"last": "last: constants are written over copies"}


def test_an_error_of_the_loader_names_its_tensor() -> None:
    """vLLM's loaders assert shapes without a message."""

    def load(engine, weights):
        for name, w in weights:
            assert name != "b"
            engine.p.data.copy_(w)

    with pytest.raises(LayoutError, match=r"took is 'b' of shape \(3,\); AssertionError"):
        record(load, {"a": (2,), "b": (3,)}, p=(2,))


def test_unloaded_parameter_is_an_error() -> None:
    with pytest.raises(LayoutError, match=r"'p' \(and 0 more\) is written by no"):
        record(lambda engine, weights: list(weights), {"w": (2,)}, p=(2,))


def split_experts(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A conversion as transformers does it: fused experts out, q and k together."""
    out = {}
    for e, expert in enumerate(full["experts"].unbind(0)):
        gate, up = expert.chunk(2)
        out |= {f"experts.{e}.gate": gate.contiguous(), f"experts.{e}.up": up.contiguous()}
    return out | {"qk": torch.cat([full["q"], full["k"]]), "norm": full["norm"]}


def test_layouts_compose_with_the_checkpoint() -> None:
    shapes = {"experts": (3, 4, 2), "q": (2, 5), "k": (2, 5), "norm": (5,)}
    parameters = {n: torch.randn(s) for n, s in shapes.items()}
    checkpoint = record_checkpoint(shapes, split_experts)

    def load(engine, weights):
        for name, w in weights:
            if name.startswith("experts"):
                _, e, kind = name.split(".")
                engine.w13.data[int(e), int(kind == "up")].copy_(w[1])  # rank 1's row
            else:
                getattr(engine, name).data.copy_(w + 1 if name == "norm" else w)

    recorded = record(load, checkpoint.tensors, w13=(3, 2, 2), qk=(4, 5), norm=(5,))
    layout = compose_with_checkpoint(recorded, checkpoint)
    assert list(layout.fallback) == ["norm"]
    assert len(layout.copies) == 4, "gate and up of all experts, q, k"
    for name in ("w13", "qk"):
        out = torch.zeros(layout.destinations[name].shape)
        run([c for c in layout.copies if c.destination == name], parameters, out)
        if name == "qk":
            assert out.equal(torch.cat([parameters["q"], parameters["k"]]))
        else:
            assert out.equal(parameters["experts"][:, 1::2])
    converted = split_experts(parameters)
    buffer = torch.cat([t.flatten() for t in parameters.values()])
    parts = buffer.split([t.numel() for t in parameters.values()])
    inside = {n: part.view(shapes[n]) for n, part in zip(shapes, parts, strict=True)}
    for tensors in (parameters, inside):  # tensors of their own, or parts of one buffer
        assembled = dict(checkpoint.assemble(tensors.items()))
        assert assembled.keys() == converted.keys()
        assert all(assembled[n].equal(t) for n, t in converted.items())
    assert dict(checkpoint.assemble([("q", parameters["q"])])) == {}


def test_gathered_parameter_takes_all_of_its_tensors_along() -> None:
    checkpoint = record_checkpoint(
        {"f": (2, 3), "g": (3,)}, lambda w: {"a": w["f"][0], "b": w["f"][1], "c": w["g"]}
    )

    def load(engine, weights):
        for name, w in weights:
            getattr(engine, name).data.copy_(w.exp() if name == "a" else w)

    recorded = record(load, checkpoint.tensors, a=(3,), b=(3,), c=(3,))
    layout = compose_with_checkpoint(recorded, checkpoint)
    assert list(layout.fallback) == ["f"] and layout.by_loader == {"a", "b"}
    assert {c.destination for c in layout.copies} == {"c"}


def test_computed_checkpoint_tensor_is_named() -> None:
    with pytest.raises(LayoutError, match=r"'w' is no copy of trained parameters \['w'\].*exp"):
        record_checkpoint({"w": (2,)}, lambda full: {"w": full["w"].exp()})


def test_the_layout_of_a_configuration_is_recorded_once() -> None:
    config = tiny_config("qwen3_moe")
    layout = checkpoint_layout_from_config(config)
    assert checkpoint_layout_from_config(tiny_config("qwen3_moe")) is layout
    config.num_experts = 2
    assert len(checkpoint_layout_from_config(config).tensors) < len(layout.tensors)
