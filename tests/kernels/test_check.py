"""The shared argument checks: accepted arguments and error messages."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from hybridengine.kernels import _check as check

NAN, INF = math.nan, math.inf


def test_a_tensor_on_another_device_is_named():
    here, there = torch.zeros(2), torch.zeros(2, device="meta")
    check.same_device("op", first=None, second=here, third=here)
    check.same_device("op", first=there, second=there)
    with pytest.raises(ValueError, match=r"op: third is on meta, second on cpu; move them"):
        check.same_device("op", first=None, second=here, third=there)
    with pytest.raises(TypeError, match=r"op: second is 3.0 .float.; expected a tensor"):
        check.same_device("op", first=here, second=3.0)


def test_shapes_agree_through_the_letters_of_their_patterns():
    sizes = {}
    check.shape("op", "logits", torch.zeros(2, 3, 5), "... V", sizes)
    check.shape("op", "token_ids", torch.zeros(2, 3), "...", sizes)
    assert sizes == {"...": ((2, 3), "logits"), "V": (5, "logits")}
    with pytest.raises(ValueError, match=r"ids has shape \[6\]; expected \[\.\.\.\] with \.\.\. "):
        check.shape("op", "ids", torch.zeros(6), "...", sizes)
    with pytest.raises(ValueError, match=r"bias has shape \[4\]; expected \[V\] with V = 5 \(from"):
        check.shape("op", "bias", torch.zeros(4), "V", sizes)
    with pytest.raises(ValueError, match=r"hidden has shape \[4\]; expected \[T, H\]\."):
        check.shape("op", "hidden", torch.zeros(4), "T H", {})
    with pytest.raises(ValueError, match=r"logits has shape \[\]; expected \[\.\.\., V\]\."):
        check.shape("op", "logits", torch.zeros(()), "... V", {})


def test_dtypes_are_named():
    check.floats("op", a=torch.zeros(1), b=None, c=torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ValueError, match="op: values has dtype int64; expected float32, bfloat16"):
        check.floats("op", values=torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_ids_become_int64(dtype):
    assert check.ids("op", "ids", torch.tensor([1, 2], dtype=dtype)).dtype == torch.int64


@pytest.mark.parametrize("dtype", (torch.float32, torch.bool, torch.int8))
def test_ids_of_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=r"op: group_ids has dtype .*; expected int64 or int32"):
        check.ids("op", "group_ids", torch.ones(2, dtype=dtype))


@pytest.mark.parametrize("dtype", (torch.bool, torch.uint8, torch.int64, torch.float16))
def test_masks_become_bool(dtype):
    result = check.mask("op", "mask", torch.tensor([1, 0], dtype=dtype))
    assert result.dtype == torch.bool
    assert result.tolist() == [True, False]


@pytest.mark.parametrize("value", (0.5, NAN, -1.0))
def test_weights_are_not_a_mask(value):
    with pytest.raises(ValueError, match=r"op: mask\[1, 0\] is .*; a mask of floats holds 0 and 1"):
        check.mask("op", "mask", torch.tensor([[0.0], [value]]))
    with pytest.raises(ValueError, match="op: mask has dtype complex64"):
        check.mask("op", "mask", torch.zeros(2, dtype=torch.complex64))


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64))
def test_cu_seqlens_become_int32(dtype):
    given = torch.tensor([0, 2, 2, 5], dtype=dtype)
    assert check.cu_seqlens("op", given, 5).dtype == torch.int32
    assert check.cu_seqlens("op", torch.zeros(1, dtype=dtype), 0).tolist() == [0]


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([1, 5], r"cu_seqlens\[0\] is 1; expected 0"),
        ([-1, 5], r"cu_seqlens\[0\] is -1; expected 0"),
        ([0, 3, 2, 5], r"cu_seqlens\[2\] is 2, less than 3 before it"),
        ([0, -3, 5], r"cu_seqlens\[1\] is -3, less than 0"),
        ([0, 6], "ends at 6, but there are 5 tokens; expected the end"),
        ([0, 4], "ends at 4, but there are 5 tokens; the last 1 belong to no sequence"),
        ([0, 2**32 + 5], "ends at 4294967301"),
        ([], r"has shape \[0\]; expected \[N \+ 1\]"),
        ([[0, 5]], r"has shape \[1, 2\]; expected \[N \+ 1\]"),
    ],
)
def test_wrong_cu_seqlens_are_refused(ends, message):
    with pytest.raises(ValueError, match=f"op: cu_seqlens.*{message}|op: {message}"):
        check.cu_seqlens("op", torch.tensor(ends, dtype=torch.int64), 5)


def test_tokens_outside_sequences_must_be_masked():
    ends = torch.tensor([0, 3])
    check.cu_seqlens("op", ends, 5, mask=torch.tensor([True, True, True, False, False]))
    with pytest.raises(ValueError, match="the last 2 belong to no sequence: mask or remove them"):
        check.cu_seqlens("op", ends, 5, mask=torch.tensor([True, True, True, False, True]))
    with pytest.raises(ValueError, match="cu_seqlens has dtype float32; expected int64 or int32"):
        check.cu_seqlens("op", ends.float(), 5)
    with pytest.raises(TypeError, match=r"cu_seqlens is \[0, 3\] .list.; expected a tensor"):
        check.cu_seqlens("op", [0, 3], 5)


def test_values_of_tensors_without_memory_are_not_read():
    meta = torch.zeros(3, dtype=torch.int64, device="meta")
    assert check.cu_seqlens("op", meta, 5).dtype == torch.int32
    assert check.mask("op", "mask", meta.float()).dtype == torch.bool
    with FakeTensorMode():
        fake = torch.zeros(3, dtype=torch.int64)
        assert check.cu_seqlens("op", fake, 5).shape == (3,)
        assert check.mask("op", "mask", fake.float()).shape == (3,)


@pytest.mark.parametrize("value", (NAN, INF, -INF, 0.0, -1, 2.5))
def test_numbers_outside_their_bounds(value):
    with pytest.raises(ValueError, match=r"op: tau is .*; expected a finite number above 0 and at"):
        check.number("op", "tau", value, above=0, at_most=2)


@pytest.mark.parametrize("value", ("1", None, True, torch.tensor(1.0), [1]))
def test_wrong_types_of_numbers(value):
    with pytest.raises(TypeError, match=r"op: tau is .*; expected a number"):
        check.number("op", "tau", value)


def test_numbers():
    assert check.number("op", "tau", 2, at_least=2) == 2.0
    assert check.number("op", "c", INF, above=1, infinite=True) == INF
    assert check.integer("op", "n", 0, at_least=0) == 0
    with pytest.raises(ValueError, match="op: c is nan; expected a number above 1"):
        check.number("op", "c", NAN, above=1, infinite=True)
    with pytest.raises(ValueError, match=r"op: n is -1; expected an integer of at least 0"):
        check.integer("op", "n", -1, at_least=0)
    with pytest.raises(TypeError, match=r"op: n is 1.0 .float.; expected an integer"):
        check.integer("op", "n", 1.0)
    check.ordered("op", "lower", 1.0, "upper", 1.0)
    with pytest.raises(ValueError, match=r"op: lower is 2.0, above upper, which is 1.0"):
        check.ordered("op", "lower", 2.0, "upper", 1.0)


def test_an_unknown_name_gets_a_suggestion():
    check.choice("op", "kl_type", "mse", ("k1", "low_var"), ("mse",))
    with pytest.raises(ValueError, match=r"op: kl_type is 'lowvar'; .* Did you mean 'low_var'\?"):
        check.choice("op", "kl_type", "lowvar", ("k1", "low_var"))
    with pytest.raises(ValueError, match=r"op: kl_type is 3; expected one of k1\.$"):
        check.choice("op", "kl_type", 3, ("k1",))


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y, n):
        ctx.save_for_backward(x, y)
        return x * x + y

    @staticmethod
    @check.differentiable_once("square")
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0], grad * 1, None


def test_a_second_derivative_names_the_operator():
    x = torch.tensor([3.0], requires_grad=True)
    y = torch.tensor([1.0], requires_grad=True)
    _Square.apply(x, y, 0).sum().backward()
    assert (x.grad.item(), y.grad.item()) == (6.0, 1.0)
    assert not x.grad.requires_grad
    first, other = torch.autograd.grad(_Square.apply(x, y, 0).sum(), (x, y), create_graph=True)
    assert (first.item(), other.item()) == (6.0, 1.0)  # the value itself is there
    for gradient in (first, other):
        with pytest.raises(RuntimeError, match="square: a derivative of its gradient was req"):
            torch.autograd.grad((gradient.square() + x * x).sum(), x, retain_graph=True)


def test_a_forward_mode_tangent_is_refused():
    x = torch.ones(2)
    check.reverse_mode_only("op", x=x, y=None)
    with forward_ad.dual_level():
        check.reverse_mode_only("op", x=x)
        with pytest.raises(NotImplementedError, match="op: y has a forward-mode tangent"):
            check.reverse_mode_only("op", x=x, y=forward_ad.make_dual(x, x))

    def through(y):
        check.reverse_mode_only("op", y=y)
        return y

    with pytest.raises(NotImplementedError, match="op: y has a forward-mode tangent"):
        torch.func.jvp(through, (x,), (x,))


def test_checks_are_traced_without_a_break():
    @torch.compile(fullgraph=True, backend="eager")
    def checked(logits, token_ids, mask, ends, temperature):
        check.reverse_mode_only("op", logits=logits)
        check.same_device("op", logits=logits, token_ids=token_ids, mask=mask)
        sizes = {}
        check.shape("op", "logits", logits, "... V", sizes)
        check.shape("op", "token_ids", token_ids, "...", sizes)
        check.floats("op", logits=logits)
        check.choice("op", "mode", "a", ("a", "b"))
        scale = check.number("op", "temperature", temperature, above=0)
        ends = check.cu_seqlens("op", ends, token_ids.numel())
        ids = check.ids("op", "token_ids", token_ids)
        return logits * scale, check.mask("op", "mask", mask), ids, ends

    for temperature in (2.0, 3.0):
        _, mask, ids, ends = checked(
            torch.ones(2, 3),
            torch.tensor([1, 2], dtype=torch.int32),
            torch.tensor([1.0, 0.0]),
            torch.tensor([0, 2]),
            temperature,
        )
        assert (mask.tolist(), ids.tolist(), ends.tolist()) == ([True, False], [1, 2], [0, 2])
