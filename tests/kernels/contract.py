"""The contract of an operator, by what is done to the arguments of its row in contract_cases.py.

Every function takes the name of an operator and a backend; None where it has no backends.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

from hybridengine import kernels as he
from hybridengine.kernels._library import CustomOp
from tests.kernels.contract_cases import CASES, OPERATORS, operator

Arguments = dict[str, Any]
EXACT = {"rtol": 0.0, "atol": 0.0}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # another layout may run another product
OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
CLOSE_16_BITS = {"rtol": 2**-6, "atol": 2**-6}


def flatten(value: Any) -> list[Any]:
    """Return the tensors and numbers of a result, in a fixed order."""
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in flatten(one)]
    return [value]


def changed(arguments: Arguments, change: Callable[[str, Tensor], Any]) -> Arguments:
    """Return the arguments with change(name, tensor) for every tensor, those in lists, too."""
    result = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            value = change(name, value)
        elif isinstance(value, list) and any(isinstance(one, Tensor) for one in value):
            value = [change(f"{name}[{i}]", one) for i, one in enumerate(value)]
        result[name] = value
    return result


def with_tensor(arguments: Arguments, name: str, tensor: Any) -> Arguments:
    return changed(arguments, lambda other, own: tensor if other == name else own)


def tensors_of(arguments: Arguments) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    changed(arguments, found.setdefault)
    return found


def base(name: str) -> str:
    """Return the argument of a tensor, which may be in a list."""
    return name.partition("[")[0]


def copies(name: str, dtype: torch.dtype = torch.float32) -> Arguments:
    """Return new arguments; those of float32 in `dtype`."""
    return changed(
        CASES[name].arguments,
        lambda _, tensor: tensor.to(
            dtype if tensor.dtype == torch.float32 else tensor.dtype, copy=True
        ),
    )


def call(name: str, arguments: Arguments, backend: str | None) -> list[Any]:
    """Return the results of a call, and what it wrote."""
    if backend is not None:
        arguments = arguments | {"backend": backend}
    if name == "pack_sequences":
        result = he.pack_sequences(arguments["fields"])
    else:
        result = OPERATORS[name](**arguments)
    return flatten([result, *(arguments[one] for one in CASES[name].written)])


def leaves(name: str, arguments: Arguments) -> dict[str, Tensor]:
    """Return the tensors that the operator can be differentiated by."""
    found = tensors_of(arguments)
    return {one: tensor for one, tensor in found.items() if base(one) in CASES[name].gradients}


def weighted(outputs: list[Any]) -> Tensor:
    """Return a sum of the floating-point results."""
    floats = [o for o in outputs if isinstance(o, Tensor) and o.is_floating_point()]
    weights = [torch.linspace(1, 2, o.numel(), dtype=torch.float64).view(o.shape) for o in floats]
    zero = torch.zeros((), dtype=torch.float64)
    return sum(((o.double() * w).sum() for o, w in zip(floats, weights, strict=True)), zero)


def differentiated(name: str, arguments: Arguments, backend: str | None) -> list[Any]:
    """Return the results, then the gradients of their sum."""
    arguments = changed(arguments, lambda _, tensor: tensor.detach())
    given = leaves(name, arguments)
    for tensor in given.values():
        tensor.requires_grad_()
    outputs = call(name, arguments, backend)
    if not given:
        return outputs
    total = weighted([o for o in outputs if isinstance(o, Tensor) and o.requires_grad])
    grads = torch.autograd.grad(total, list(given.values()), allow_unused=True)
    return [*(o.detach() if isinstance(o, Tensor) else o for o in outputs), *grads]


def outcome(name: str, arguments: Arguments, backend: str | None) -> Any:
    """Return results and gradients, or the error."""
    try:
        return differentiated(name, arguments, backend)
    except (ValueError, IndexError) as error:
        return error


def second_derivatives(name: str, arguments: Arguments, backend: str | None) -> list[Any]:
    """Return the derivatives of the gradients' squares; none of what refuses them by name."""
    arguments = changed(arguments, lambda _, tensor: tensor.detach())
    given = [tensor.requires_grad_() for tensor in leaves(name, arguments).values()]
    outputs = [o for o in call(name, arguments, backend) if isinstance(o, Tensor)]
    total = weighted([o for o in outputs if o.requires_grad])
    if not given:
        return []
    try:
        first = torch.autograd.grad(total, given, create_graph=True, allow_unused=True)
        again = weighted([g.square() for g in first if g is not None and g.requires_grad])
        return list(torch.autograd.grad(again, given, allow_unused=True)) if first else []
    except RuntimeError as error:
        assert re.search("once only|does not require grad|no autograd formula", str(error))
        return []


def assert_same(got: Any, expected: Any, **tolerance: float) -> None:
    assert not isinstance(got, Exception), got
    assert not isinstance(expected, Exception), expected
    for one, other in zip(got, expected, strict=True):
        assert type(one) is type(other)
        if not isinstance(one, Tensor):
            assert one == other
            continue
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if one.dtype == torch.float8_e4m3fn:
            one, other = one.view(torch.uint8), other.view(torch.uint8)
        torch.testing.assert_close(one, other, equal_nan=True, **tolerance)


def check_compiled(name: str, backend: str | None) -> None:
    """One graph of torch.compile has the bits of an eager call, and its gradients."""
    expected = differentiated(name, copies(name), backend)
    torch._dynamo.reset()
    compiled = torch.compile(OPERATORS[name], fullgraph=True, backend="aot_eager")
    with patch.dict(OPERATORS, {name: compiled}):
        assert_same(differentiated(name, copies(name), backend), expected, **EXACT)


def recorded_ops(name: str, backend: str | None) -> list[tuple[Any, tuple]]:
    """Return the ops of torch.library that a call and its backward run, with arguments."""
    ops: dict[str, tuple[Any, tuple]] = {}
    run = CustomOp.__call__

    def record(op: CustomOp, *arguments: Any) -> Any:
        ops.setdefault(op.name, (op.op, tree_map(_cloned, tuple(op.records.split(arguments)))))
        return run(op, *arguments)

    with patch.object(CustomOp, "__call__", record):
        differentiated(name, copies(name), backend)
    return list(ops.values())


def _cloned(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def check_ops(name: str, backend: str | None) -> None:
    """Ops have the schema, the fake kernel and the autograd that torch.library expects."""
    for op, arguments in recorded_ops(name, backend):
        torch.library.opcheck(op, arguments, test_utils=OPCHECKS)


def check_single_gradients(name: str, backend: str | None) -> None:
    """A gradient that is requested alone has the bits that it has among all others."""
    expected = differentiated(name, copies(name), backend)
    names = list(leaves(name, copies(name)))
    for argument, gradient in zip(names, expected[len(expected) - len(names) :], strict=True):
        arguments = changed(copies(name), lambda _, tensor: tensor.detach())
        leaf = leaves(name, arguments)[argument].requires_grad_()
        outputs = [o for o in call(name, arguments, backend) if isinstance(o, Tensor)]
        total = weighted([o for o in outputs if o.requires_grad])
        (got,) = torch.autograd.grad(total, leaf, allow_unused=True)
        assert_same([got], [gradient], **EXACT)


def check_threads(name: str, backend: str | None) -> None:
    """The number of threads changes no bit."""
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            results.append(differentiated(name, copies(name), backend))
    finally:
        torch.set_num_threads(before)
    assert_same(*results, **EXACT)


def check_float64(name: str, backend: str | None) -> None:
    """float64 is computed in float64: results have the dtype, and those of float32 are close."""
    double = differentiated(name, copies(name, torch.float64), backend)
    single = differentiated(name, copies(name), backend)
    for wide, narrow in zip(double, single, strict=True):
        if isinstance(narrow, Tensor) and narrow.dtype == torch.float32:
            assert wide.dtype == torch.float64
            torch.testing.assert_close(wide.float(), narrow, rtol=1e-4, atol=1e-4, equal_nan=True)
    again = differentiated(
        name, changed(copies(name, torch.float64), lambda _, t: nudged(t)), backend
    )
    floats = [(a, b) for a, b in zip(double, again, strict=True) if isinstance(a, Tensor)]
    assert any(not torch.equal(a, b) for a, b in floats if a.is_floating_point())


def nudged(tensor: Tensor) -> Tensor:
    """Change what float32 cannot hold."""
    return tensor * (1 + 2.0**-40) if tensor.dtype == torch.float64 else tensor


def check_rows(name: str, backend: str | None) -> None:
    """A row has the bits that it has in a smaller batch, and a NaN stays in its row."""
    rows = CASES[name].rows
    expected = call(name, copies(name), backend)[0]
    for begin, end in ((0, 1), (3, 8)):
        part = changed(copies(name), lambda n, t: t[begin:end] if base(n) in rows else t)  # noqa: B023
        assert_same([call(name, part, backend)[0]], [expected[begin:end]], **EXACT)
    spoilt = copies(name)
    first = spoilt[rows[0]]
    first[2] = torch.nan
    got = call(name, spoilt, backend)[0]
    others = torch.arange(len(got)) != 2
    assert_same([got[others]], [expected[others]], **EXACT)


def check_masked(name: str, backend: str | None) -> None:
    """What the mask leaves out changes no bit, NaN included, and has a gradient of 0."""
    case, given = CASES[name], copies(name)
    mask = next(given[one] for one in ("response_mask", "row_mask", "mask") if one in given)
    expected = differentiated(name, given, backend)
    spoilt = changed(
        copies(name),
        lambda n, t: t.masked_fill(~_like(mask, t), torch.nan) if n in case.masked else t,
    )
    got = differentiated(name, spoilt, backend)
    assert_same(got, expected, **EXACT)
    names = list(leaves(name, given))
    for argument, gradient in zip(names, got[len(got) - len(names) :], strict=True):
        if argument in case.masked:
            assert not gradient[~mask].any(), argument


def _like(mask: Tensor, tensor: Tensor) -> Tensor:
    return mask.view(-1, *[1] * (tensor.dim() - 1))


def check_other_dtypes(name: str, backend: str | None) -> None:
    """Ids of int32 and masks of numbers change no bit, or their dtype is refused."""
    expected = outcome(name, copies(name), backend)
    others = {torch.int64: (torch.int32,), torch.bool: (torch.uint8, torch.int64, torch.float32)}
    for argument, tensor in tensors_of(copies(name)).items():
        for dtype in others.get(tensor.dtype, ()):
            given = with_tensor(copies(name), argument, tensor.to(dtype))
            got = outcome(name, given, backend)
            if isinstance(got, Exception):
                assert re.search(rf"{base(argument)}.* dtype", str(got)), (argument, got)
            else:
                assert_same(got, expected, **EXACT)


def check_autocast(name: str, backend: str | None) -> None:
    """Autocast changes no bit, in the forward and in the backward."""
    for compute in (call, differentiated, second_derivatives):
        expected = compute(name, copies(name), backend)
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                got = compute(name, copies(name), backend)
            assert_same(got, expected, **({} if compute is second_derivatives else EXACT))


def spread(tensor: Tensor) -> Tensor:
    """Double every stride."""
    return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]


def transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def offset(tensor: Tensor) -> Tensor:
    """Let rows begin at unaligned addresses."""
    return torch.cat([tensor[..., :1], tensor], -1)[..., 1:]


def expanded(tensor: Tensor) -> Tensor:
    return tensor[:1].expand_as(tensor)


def check_strides(name: str, backend: str | None) -> None:
    """Strides of a tensor change nothing: results and errors are those of a contiguous copy."""
    case = CASES[name]
    plain = outcome(name, copies(name), backend)
    own = tensors_of(copies(name))
    given = {n: t for n, t in own.items() if t.dim() and base(n) not in case.by_memory}
    movable = {n for n in given if base(n) not in case.contiguous}
    for layout in (transposed, offset):
        every = changed(copies(name), lambda n, t: layout(t) if n in movable else t)  # noqa: B023
        assert_same(outcome(name, every, backend), plain, **CLOSE)
    for argument, tensor in given.items():
        repeated = expanded(tensor.clone())
        expected = outcome(
            name, with_tensor(copies(name), argument, repeated.contiguous().clone()), backend
        )
        variants = [(spread(tensor), plain), (repeated, expected)]
        if backend == "triton" and not tensor.is_floating_point():
            del variants[1]  # wrong values of integers are undefined there
        for changed_tensor, right in variants:
            arguments = with_tensor(copies(name), argument, changed_tensor)
            try:
                got = outcome(name, arguments, backend)
            except RuntimeError as error:  # torch's, of a written tensor that overlaps itself
                assert base(argument) in case.written and "single memory" in str(error)
                continue
            where = f"{argument} with strides {changed_tensor.stride()}: {got}"
            if isinstance(got, Exception) and base(argument) in case.contiguous:
                assert re.match(f"^{operator(name)}: .*{base(argument)}", str(got)), where
            elif isinstance(right, Exception):
                assert str(got) == str(right), where
            else:
                assert not isinstance(got, Exception), where
                assert_same(got, right, **CLOSE)


def check_strides_of_other_dtypes(name: str, backend: str | None) -> None:
    """As `check_strides`, of all arguments with a gradient at once, in the other dtypes."""
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        plain = outcome(name, copies(name, dtype), backend)
        if isinstance(plain, Exception):
            assert "dtype" in str(plain)
            continue
        for layout in (spread, transposed, offset):
            given = copies(name, dtype)
            for argument, tensor in leaves(name, given).items():
                given = with_tensor(given, argument, layout(tensor))
            tolerance = CLOSE_16_BITS if dtype.itemsize == 2 else CLOSE
            assert_same(outcome(name, given, backend), plain, **tolerance)


def _without_elements(tensor: Tensor) -> Tensor:
    """Return a tensor of this shape, without elements, whose strides are doubled."""
    strides = [2 * s for s in torch.empty([max(n, 1) for n in tensor.shape]).stride()]
    return tensor.new_empty(0).as_strided(tensor.shape, strides)


def check_no_rows(name: str, backend: str | None) -> None:
    """A call without rows has results; the strides of what has no elements do not matter."""
    case = CASES[name]
    plain = changed(copies(name) | case.empty, lambda n, t: t[:0] if base(n) in case.rows else t)
    odd = changed(plain, lambda _, t: t if t.numel() else _without_elements(t))
    expected, got = outcome(name, plain, backend), outcome(name, odd, backend)
    assert_same(got, expected, **CLOSE)
    count = len(leaves(name, plain))
    assert not any(gradient.any() for gradient in got[len(got) - count :] if gradient is not None)


def _check_refusal(name: str, argument: str, error: NotImplementedError) -> None:
    names = "|".join(CASES[name].names or (operator(name),))
    reason = "has a forward-mode tangent|is inside a derivative of|is batched by"
    named = f"^({names}): {re.escape(argument)} ({reason}).*; (use|call) "
    assert re.match(named, str(error)), error


def _along(
    name: str, arguments: Arguments, argument: str, backend: str | None, direction: Tensor
) -> float:
    """Return the derivative of `weighted` in a direction, by reverse mode."""
    given = list(leaves(name, arguments))
    gradient = differentiated(name, arguments, backend)[given.index(argument) - len(given)]
    assert gradient is not None
    return float((gradient.double() * direction.double()).sum())


def check_second_derivatives(name: str, backend: str | None) -> None:
    """A gradient is connected to what it depends on; its own derivative is right or refused.

    Else its terms would silently be missing from a sum.
    """
    gradients = []
    for factor in (1.0, 1.25):
        arguments = changed(copies(name), lambda _, tensor: tensor.detach())
        given = leaves(name, arguments)
        for tensor in given.values():
            tensor.mul_(factor).requires_grad_()
        outputs = [o for o in call(name, arguments, backend) if isinstance(o, Tensor)]
        total = weighted([o for o in outputs if o.requires_grad])
        gradients.append(torch.autograd.grad(total, list(given.values()), create_graph=True))
    for argument, one, other in zip(given, *gradients, strict=True):
        if not other.requires_grad:
            assert torch.equal(one, other), argument
            continue
        try:
            torch.autograd.grad(
                other.square().sum(), list(given.values()), allow_unused=True, retain_graph=True
            )
        except RuntimeError as error:
            message = "a derivative of its gradient was requested|no autograd formula"
            assert re.search(message, str(error)), (argument, error)


def check_forward_mode(name: str, backend: str | None) -> None:
    """A tangent is right or refused by name, also in what has a gradient."""
    for argument, tensor in leaves(name, copies(name)).items():
        direction = torch.linspace(1, 2, tensor.numel()).view(tensor.shape)
        expected = _along(name, copies(name), argument, backend, direction)
        assert expected
        for needs_grad in (False, True):
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(tensor.clone().requires_grad_(needs_grad), direction)
                try:
                    outputs = call(name, with_tensor(copies(name), argument, dual), backend)
                except NotImplementedError as error:
                    _check_refusal(name, argument, error)
                    continue
                pairs = [forward_ad.unpack_dual(o) for o in outputs if isinstance(o, Tensor)]
            tangents = [t.new_zeros(t.shape) if d is None else d for t, d in pairs]
            total = float(weighted([t.detach() for t in tangents]))
            assert abs(total - expected) <= 1e-3 * max(1.0, abs(expected)), argument


def check_torch_func(name: str, backend: str | None) -> None:
    """Derivatives of torch.func are right or refused by name."""
    for argument, tensor in leaves(name, copies(name)).items():
        direction = torch.linspace(1, 2, tensor.numel()).view(tensor.shape)
        expected = _along(name, copies(name), argument, backend, direction)

        arguments = copies(name)  # made inside a derivative, they would be a part of it

        def loss(x: Tensor, argument: str = argument, arguments: Arguments = arguments) -> Tensor:
            return weighted(call(name, with_tensor(arguments, argument, x), backend))

        for derivative in (
            lambda f, x, d: (torch.func.grad(f)(x) * d).sum(),
            lambda f, x, d: torch.func.jvp(f, (x,), (d,))[1],
        ):
            try:
                total = float(derivative(loss, tensor.clone(), direction))
            except NotImplementedError as error:
                _check_refusal(name, argument, error)
                continue
            assert abs(total - expected) <= 1e-3 * max(1.0, abs(expected)), argument


def check_vmap(name: str, backend: str | None) -> None:
    """A batch of one argument is right or refused by name, with and without a gradient."""
    for argument, tensor in tensors_of(CASES[name].arguments).items():
        if not tensor.is_floating_point():
            continue
        flipped = tensor.flip(-1) if tensor.dim() else tensor.clone()

        def single(x: Tensor, argument: str = argument) -> tuple[Tensor, ...]:
            outputs = call(name, with_tensor(copies(name), argument, x), backend)
            return tuple(o for o in outputs if isinstance(o, Tensor))

        for needs_grad in {False, base(argument) in CASES[name].gradients}:
            batch = torch.stack([tensor, flipped]).requires_grad_(needs_grad)
            try:
                got = torch.vmap(single)(batch)
            except NotImplementedError as error:
                _check_refusal(name, argument, error)
                continue
            for i, x in enumerate(batch):
                assert_same([o[i] for o in got], list(single(x.clone())), **CLOSE)
