"""Operators are called without torch's dispatcher, unless something needs to see the call."""

from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from hybridengine.kernels._library import custom_op


@custom_op("hybridengine_test::scaled", mutates_args=())
def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


@scaled.register_fake
def _(x, factor):
    return x.new_empty(x.shape)


def _save(ctx, inputs, output):
    ctx.factor = inputs[1]


scaled.register_autograd(lambda ctx, grad: (grad * ctx.factor, None), setup_context=_save)


@custom_op("hybridengine_test::add_all", mutates_args=())
def add_all(first: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
    return sum(others, first.clone())


add_all.register_autograd(
    lambda ctx, grad: (grad, [grad, grad]), setup_context=lambda *_, **__: None
)


@custom_op("hybridengine_test::constant", mutates_args=())
def constant(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@custom_op("hybridengine_test::doubled", mutates_args=())
def doubled(tensors: list[torch.Tensor], factor: float) -> list[torch.Tensor]:
    return [x * factor for x in tensors]


def _save_factor(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.factor = inputs[1]


doubled.register_autograd(
    lambda ctx, grads: ([None if grad is None else grad * ctx.factor for grad in grads],),
    setup_context=_save_factor,
)


@custom_op("hybridengine_test::fill_", mutates_args=("out", "others"))
def fill_(x: torch.Tensor, out: torch.Tensor | None, others: list[torch.Tensor]) -> None:
    for tensor in [*others, *([] if out is None else [out])]:
        tensor.numpy()[:] = x.item()  # as a kernel, which torch does not see


@custom_op("hybridengine_test::parts", mutates_args=())
def parts(x: torch.Tensor) -> list[torch.Tensor]:
    return [x + 1, x + 2]


class Line(NamedTuple):
    slope: float
    start: torch.Tensor | None


@custom_op("hybridengine_test::along", mutates_args=())
def along(x: torch.Tensor, line: Line, added: torch.Tensor) -> torch.Tensor:
    out = line.slope * x + added
    return out if line.start is None else out + line.start


@along.register_fake
def _(x, line, added):
    assert isinstance(line, Line)
    return x.new_empty(x.shape)


def _save_line(ctx, inputs, output):
    ctx.slope = inputs[1].slope


along.register_autograd(lambda ctx, grad: (grad * ctx.slope,), setup_context=_save_line)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def dispatched(monkeypatch):
    """The calls of these ops that went through the dispatcher."""
    calls = []
    for custom in (scaled, doubled, fill_, along):

        def record(*arguments, op=custom.op):
            calls.append(arguments)
            return op(*arguments)

        monkeypatch.setattr(custom, "op", record)
    return calls


def test_plain_calls_pass_the_dispatcher_by(dispatched):
    x = torch.ones(3, requires_grad=True)
    out = scaled(x, 2.0)
    assert out.tolist() == [2.0] * 3
    assert torch.autograd.grad(out.sum(), x)[0].tolist() == [2.0] * 3
    with torch.no_grad():
        assert not scaled(x, 3.0).requires_grad
    assert not scaled(torch.nn.Parameter(x.detach(), requires_grad=False), 3.0).requires_grad
    assert not dispatched


def test_modes_and_tensors_without_memory_do_not(dispatched):
    x = torch.ones(3)
    with Seen() as seen:
        scaled(x, 2.0)
    assert seen.names == ["scaled"]
    assert scaled(x.to("meta"), 2.0).is_meta
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
    assert scaled(fake, 2.0).shape == x.shape
    assert len(dispatched) == 3


def test_derivatives_of_torch_func_do_not(dispatched):
    with pytest.raises(NotImplementedError, match=r"^scaled: x is inside a derivative of torch\."):
        torch.func.grad(lambda x: scaled(x, 2.0).sum())(torch.ones(2))
    with pytest.raises(NotImplementedError, match=r"^scaled: x is inside a derivative of torch\."):
        torch.func.grad(lambda x: torch.vmap(lambda y: scaled(y, 2.0))(x).sum())(torch.ones(2))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises(NotImplementedError, match=r"^scaled: x has a forward-mode tangent"):
            scaled(dual, 2.0)
        with pytest.raises(NotImplementedError, match=r"^add_all: others\[1\] has a forward-mode"):
            add_all(torch.ones(2), [torch.ones(2), dual])
        assert scaled(torch.ones(2), 2.0).tolist() == [2.0, 2.0]
    assert len(dispatched) == 1  # the last one


def test_a_batch_is_computed_or_refused():
    x = torch.randn(3, 2)
    assert torch.equal(torch.vmap(lambda y: scaled(y, 2.0))(x), 2 * x)
    with pytest.raises(NotImplementedError, match=r"^add_all: others\[0\] is batched by torch\."):
        torch.vmap(lambda y: add_all(torch.ones(2), [y]))(x)
    with pytest.raises(NotImplementedError, match=r"^parts: x is batched by torch\.vmap"):
        torch.vmap(parts)(x)


def test_autocast_is_off_in_both_ways():
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert scaled(x, 2.0).dtype == torch.float32
        with Seen():
            assert scaled(x, 2.0).dtype == torch.float32


def test_tensors_in_lists_have_gradients():
    first, others = torch.zeros(2), [torch.ones(2, requires_grad=True) for _ in range(2)]
    grads = torch.autograd.grad(add_all(first, others).sum(), others)
    assert [grad.tolist() for grad in grads] == [[1.0, 1.0]] * 2


def test_lists_pass_the_dispatcher_by_with_their_gradients(dispatched):
    tensors = [torch.ones(2, requires_grad=True), torch.ones(3), torch.ones(1, requires_grad=True)]
    out = doubled(tensors, 2.0)
    assert isinstance(out, list) and [x.tolist() for x in out] == [[2.0] * n for n in (2, 3, 1)]
    grads = torch.autograd.grad(out[0].sum(), [tensors[0], tensors[2]], allow_unused=True)
    assert grads[0].tolist() == [2.0, 2.0] and grads[1] is None
    assert doubled([], 2.0) == []
    with torch.no_grad():
        assert not any(x.requires_grad for x in doubled(tensors, 2.0))
    assert not dispatched
    with Seen():
        doubled(tensors, 2.0)
    assert len(dispatched) == 1


def test_a_write_passes_the_dispatcher_by_and_is_counted(dispatched):
    out, others, x = torch.zeros(2), [torch.zeros(3)], torch.tensor(5.0)
    factor = torch.ones(2, requires_grad=True)
    product = (factor * out).sum()  # saves `out` for its backward
    fill_(x, out, others)
    assert out.tolist() == [5.0, 5.0] and others[0].tolist() == [5.0] * 3
    assert not dispatched
    assert (out._version, others[0]._version, x._version) == (1, 1, 0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    fill_(x, None, [])
    with torch.inference_mode():
        fill_(x, out, [torch.zeros(1)])


def test_a_record_is_one_argument_of_calls_and_its_fields_are_those_of_the_op(dispatched):
    x, added = torch.ones(2, requires_grad=True), torch.ones(2)
    start = torch.tensor([1.0, 2.0])
    out = along(x, Line(3.0, start), added)
    assert out.tolist() == [5.0, 6.0] and along(x, Line(3.0, None), added).tolist() == [4.0, 4.0]
    assert torch.autograd.grad(out.sum(), x)[0].tolist() == [3.0, 3.0]
    assert not dispatched
    with Seen() as seen:
        out = along(x, Line(3.0, start), added)
    assert out.tolist() == [5.0, 6.0] and "along" in seen.names
    assert torch.autograd.grad(out.sum(), x)[0].tolist() == [3.0, 3.0]
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(start)
    with pytest.raises(AssertionError, match="fake"):  # seen by torch, which refuses the mixture
        along(x.detach(), Line(3.0, fake), added)
    assert [len(arguments) for arguments in dispatched] == [4, 4]
    flat = along.records.split((x, Line(3.0, start), added))
    torch.library.opcheck(torch.ops.hybridengine_test.along.default, flat)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(start, start)
        with pytest.raises(NotImplementedError, match=r"^along: start has a forward-mode tangent"):
            along(torch.ones(2), Line(3.0, dual), added)


class Shift(NamedTuple):
    steps: list[int]
    name: str


@custom_op("hybridengine_test::between", mutates_args=())
def between(
    line: Line, x: torch.Tensor, shift: Shift, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return x * line.slope + sum(shift.steps), x.new_zeros(count)


@between.register_fake
def _(count, x):
    return x.new_empty(x.shape), x.new_empty(count)


def test_two_records_and_a_fake_kernel_by_name():
    assert str(between.op._schema) == (
        "hybridengine_test::between(float slope, Tensor? start, Tensor x, SymInt[] steps, str name,"
        " SymInt count) -> (Tensor, Tensor)"
    )
    call = (Line(2.0, None), torch.ones(3), Shift([1, 2], "up"), 4)
    assert [len(result) for result in between(*call)] == [3, 4]
    with Seen() as seen:
        assert between(*call)[0].tolist() == [5.0, 5.0, 5.0]
    assert "between" in seen.names
    torch.library.opcheck(between.op, between.records.split(call))
    with pytest.raises(ValueError, match="other"):
        between.register_fake(lambda other: other)


def test_an_op_without_a_gradient_raises_in_the_backward():
    out = constant(torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match="constant"):
        out.sum().backward()
