"""The argument checks that all operators share: one function per kind of argument.

Every function takes the operator's name and the argument's name first and raises an error that
names both, and says what was given, what was expected and what to do.

Devices, shapes, dtypes and numbers are always checked. Values of tensors are checked only in CPU
tensors that have memory: reading them on another device would synchronize with it (each operator
defines its results there), and fake and traced tensors have none.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_IDS = (torch.int64, torch.int32)
NUMBERS = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    *FLOATS,
)
_MAX_INT32 = 2**31 - 1

# For every letter of the shape patterns: its size, and the name of the argument that set it.
Sizes = dict[str, tuple[int | tuple[int, ...], str]]


def readable(tensor: Tensor) -> bool:
    """Return whether the values of `tensor` can be read without synchronizing with a device."""
    if not tensor.is_cpu or torch.compiler.is_compiling():
        return False
    if type(tensor) is Tensor and not torch._C._are_functorch_transforms_active():
        return True  # asked first: what follows takes ten times as long
    return not is_fake(tensor) and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def not_none(op: str, **tensors: Tensor | None) -> None:
    """Check that no tensor is None."""
    for name, tensor in tensors.items():
        if tensor is None:
            raise TypeError(f"{op}: {name} is None; expected a tensor.")


def same_device(op: str, **tensors: Tensor | None) -> None:
    """Check that every tensor is on the device of the first; None is skipped."""
    first = ""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: {name} is {_described(tensor)}; expected a tensor.")
        if not first:
            first, device = name, tensor.device
        elif tensor.device != device:
            raise ValueError(
                f"{op}: {name} is on {tensor.device}, {first} on {device}; move them to one device."
            )


def signature(op: str, **tensors: Tensor | None) -> tuple[Any, ...]:
    """Return all that checks read of tensors, None for None, as a key of results (`_once`)."""
    try:
        return tuple(
            [None if x is None else (x.shape, x.dtype, x.device) for x in tensors.values()]
        )
    except AttributeError:  # an argument is no tensor
        same_device(op, **tensors)
        raise


def shape(op: str, name: str, tensor: Tensor, pattern: str, sizes: Sizes) -> None:
    """Check a shape against a pattern: a letter per dimension, a leading "..." for any number.

    A letter in `sizes` must have that size; others are added to it. One dictionary passed to the
    checks of all arguments makes their shapes agree.

    Examples:
        >>> sizes = {}
        >>> shape("op", "hidden", torch.zeros(2, 8), "T H", sizes)
        >>> shape("op", "weight", torch.zeros(4, 8), "V H", sizes)
        >>> sizes["V"]
        (4, 'weight')
    """
    letters = pattern.split()
    given: tuple[Any, ...] = tuple(tensor.shape)
    if letters[0] == "..." and len(given) >= len(letters) - 1:
        split = len(given) - len(letters) + 1
        given = (given[:split], *given[split:])
    if len(given) != len(letters):
        raise _wrong_shape(op, name, tensor, letters, sizes)
    for letter, size in zip(letters, given, strict=True):
        if sizes.setdefault(letter, (size, name))[0] != size:
            raise _wrong_shape(op, name, tensor, letters, sizes)


def _wrong_shape(
    op: str, name: str, tensor: Tensor, letters: list[str], sizes: Sizes
) -> ValueError:
    known = [
        f"{letter} = {list(size) if isinstance(size, tuple) else size} (from {owner})"
        for letter, (size, owner) in sizes.items()
        if letter in letters
    ]
    return ValueError(
        f"{op}: {name} has shape {list(tensor.shape)}; expected [{', '.join(letters)}]"
        + (f" with {', '.join(known)}" if known else "")
        + "."
    )


def dtype(op: str, name: str, tensor: Tensor, allowed: Sequence[torch.dtype] = FLOATS) -> None:
    """Check that `tensor` has an allowed dtype."""
    if tensor.dtype not in allowed:
        names = [_short(one) for one in dict.fromkeys(allowed)]
        raise ValueError(
            f"{op}: {name} has dtype {_short(tensor.dtype)}; expected "
            f"{_listed(names)}: convert it with .to()."
        )


def floats(op: str, **tensors: Tensor | None) -> None:
    """Check that every tensor has a floating-point dtype; None is skipped."""
    for name, tensor in tensors.items():
        if tensor is not None:
            dtype(op, name, tensor)


def ids(op: str, name: str, tensor: Tensor) -> Tensor:
    """Check for int32 or int64; return int64, contiguous. (Converting floats would truncate.)"""
    dtype(op, name, tensor, _IDS)
    return as_contiguous(tensor, torch.int64)


def int32(op: str, name: str, tensor: Tensor) -> Tensor:
    """Check for int32 or int64; return int32, contiguous. Values are below 2^31."""
    dtype(op, name, tensor, _IDS)
    return as_contiguous(tensor, torch.int32)


def as_contiguous(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in this dtype, contiguous; the tensor itself if it is so already."""
    # Two conversions by torch that convert nothing take three times as long as this comparison.
    if tensor.dtype is dtype and tensor.is_contiguous():
        return tensor
    return tensor.to(dtype).contiguous()


def contiguous(op: str, **tensors: Tensor) -> None:
    """Check that tensors that are written are contiguous."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"{op}: {name} has shape {list(tensor.shape)} and strides {list(tensor.stride())}; "
                "expected a contiguous tensor."
            )


def mask(op: str, name: str, tensor: Tensor) -> Tensor:
    """Check for bool, integers or floats; return bool, True where nonzero.

    On a CPU, floats other than 0 and 1 (weights, NaN) are an error.
    """
    dtype(op, name, tensor, NUMBERS)
    if tensor.dtype == torch.bool:
        return tensor
    if tensor.is_floating_point() and readable(tensor):
        wrong = (tensor != 0) & (tensor != 1)
        if wrong.any():
            where = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"{op}: {name}{where} is {tensor[tuple(where)].item()}; a mask of floats holds "
                "0 and 1 only: compare it with a threshold first."
            )
    return tensor != 0


def cu_seqlens(
    op: str, tensor: Tensor, num_tokens: int, mask: Tensor | None = None, name: str = "cu_seqlens"
) -> Tensor:
    """Check for [N + 1] int32 or int64, from 0 to T in ascending order; return int32.

    Tokens after the last end (the free rows of `pack(capacity=)`) belong to no sequence: `mask`,
    [T] bool, must be False there.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{op}: {name} is {_described(tensor)}; expected a tensor [N + 1].")
    dtype(op, name, tensor, _IDS)
    if tensor.dim() != 1 or tensor.numel() == 0:
        raise ValueError(
            f"{op}: {name} has shape {list(tensor.shape)}; expected [N + 1]: 0 and the end of "
            "every sequence."
        )
    if num_tokens > _MAX_INT32:
        raise ValueError(
            f"{op}: {num_tokens} tokens do not fit {name}, which is int32; split the batch."
        )
    if readable(tensor):
        _check_ends(op, name, tensor, num_tokens, mask)
    return as_contiguous(tensor, torch.int32)


def _check_ends(op: str, name: str, tensor: Tensor, num_tokens: int, mask: Tensor | None) -> None:
    ends = tensor.tolist()  # of as many sequences as there are, tensors take longer
    if ends[0] != 0:
        raise ValueError(f"{op}: {name}[0] is {ends[0]}; expected 0.")
    if ends != sorted(ends):
        n = next(n for n in range(1, len(ends)) if ends[n] < ends[n - 1])
        raise ValueError(
            f"{op}: {name}[{n}] is {ends[n]}, less than {ends[n - 1]} before it; "
            "expected ends in ascending order."
        )
    end = ends[-1]
    if end > num_tokens:
        raise ValueError(
            f"{op}: {name} ends at {end}, but there are {num_tokens} tokens; expected the end "
            "of the last sequence."
        )
    if end < num_tokens and (mask is None or (readable(mask) and bool(mask[end:].any()))):
        raise ValueError(
            f"{op}: {name} ends at {end}, but there are {num_tokens} tokens; the last "
            f"{num_tokens - end} belong to no sequence: mask or remove them."
        )


def real(op: str, name: str, value: float) -> float:
    """Check for a number, NaN and inf included; return a float. A bool or a tensor is an error."""
    if type(value) is float:
        return value
    if isinstance(value, (bool, Tensor)) or not isinstance(value, (int, float, Real)):
        raise TypeError(f"{op}: {name} is {_described(value)}; expected a number.")
    return float(value)


def number(
    op: str,
    name: str,
    value: float,
    *,
    infinite: bool = False,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> float:
    """Check for a number within bounds, no NaN, and no inf unless `infinite`; return a float."""
    if type(value) is not float:
        value = real(op, name, value)
    if (
        (value - value == 0.0 or (infinite and value == value))
        and (above is None or value > above)
        and (at_least is None or value >= at_least)
        and (at_most is None or value <= at_most)
    ):
        return value
    kind = "a number" if infinite else "a finite number"
    bounds = {"above": above, "at least": at_least, "at most": at_most}
    within = " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)
    raise ValueError(f"{op}: {name} is {value}; expected {f'{kind} {within}'.strip()}.")


def integer(op: str, name: str, value: int, *, at_least: int | None = None) -> int:
    """Check for an integer within bounds; a float or a tensor is an error."""
    if type(value) is not int:
        integral = isinstance(value, int) or hasattr(value, "__index__")
        if isinstance(value, (bool, Tensor)) or not integral:
            raise TypeError(f"{op}: {name} is {_described(value)}; expected an integer.")
    if at_least is not None and value < at_least:
        raise ValueError(f"{op}: {name} is {value}; expected an integer of at least {at_least}.")
    return value


def ordered(op: str, low_name: str, low: float, high_name: str, high: float) -> None:
    """Check that low <= high."""
    if low > high:
        raise ValueError(
            f"{op}: {low_name} is {low}, above {high_name}, which is {high}; exchange them."
        )


def choice(
    op: str, name: str, value: str, known: Sequence[str], aliases: Sequence[str] = ()
) -> None:
    """Check that `value` is one of the names; the error suggests a similar one."""
    if value in known or value in aliases:
        return
    names = [*known, *aliases]
    close = difflib.get_close_matches(str(value), names, n=1)
    raise ValueError(
        f"{op}: {name} is {value!r}; expected one of {', '.join(names)}."
        + (f" Did you mean {close[0]!r}?" if close else "")
    )


def reverse_mode_only(op: str, **tensors: Any) -> None:
    """Check that no tensor has a forward-mode tangent or is inside a derivative of torch.func.

    A tangent would be dropped silently; torch.func would raise an error without the operator's
    name. tensors: tensors, lists of them, and other arguments, which are skipped. Without a
    transformation this costs the same for any number of them.
    """
    if _are_transforms_active():
        _refuse_transforms(op, tensors, batched=True)


def untransformed(op: str, **tensors: Any) -> None:
    """Check as `reverse_mode_only`, and that no tensor is batched by torch.vmap."""
    if _are_transforms_active():
        _refuse_transforms(op, tensors, batched=False)


def _are_transforms_active() -> bool:
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active()


def _refuse_transforms(op: str, tensors: dict[str, Any], batched: bool) -> None:
    for name, value in tensors.items():
        if isinstance(value, list | tuple):
            parts = {f"{name}[{i}]": part for i, part in enumerate(value)}
            _refuse_transforms(op, parts, batched)
        elif isinstance(value, Tensor):
            _check_untransformed(op, name, value, batched)


def _check_untransformed(op: str, name: str, tensor: Tensor, batched: bool) -> None:
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise NotImplementedError(
            f"{op}: {name} has a forward-mode tangent, and {op} has no forward-mode formula; "
            "use reverse mode, or a plain PyTorch expression."
        )
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_gradtrackingtensor(tensor):
            raise NotImplementedError(
                f"{op}: {name} is inside a derivative of torch.func, which {op} does not support; "
                "use torch.autograd.grad, or a plain PyTorch expression."
            )
        if functorch.is_batchedtensor(tensor) and not batched:
            raise NotImplementedError(
                f"{op}: {name} is batched by torch.vmap, which {op} does not support; call it "
                "once per entry of the batch."
            )
        tensor = functorch.get_unwrapped(tensor)


class _Raise(torch.autograd.Function):
    """Return the first `count` tensors; their backward raises an error."""

    @staticmethod
    def forward(ctx: Any, message: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.message = message
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise RuntimeError(ctx.message)


def differentiable_once(op: str) -> Callable:
    """Decorate a backward function: second derivatives raise an error that names `op`.

    The function runs without recording. With create_graph=True its results are connected to the
    incoming gradients and to the saved tensors that require a gradient, by a node that raises.
    (`torch.autograd.function.once_differentiable` returns constants instead, which silently drops
    terms of a sum whose other terms depend on the same inputs.) So save every differentiable
    input, or `input[:0].clone()`, which has the same autograd edge, to save memory.
    """
    message = (
        f"{op}: a derivative of its gradient was requested, and {op} can be differentiated once "
        "only; compute second derivatives with a plain PyTorch expression."
    )

    def decorate(backward: Callable) -> Callable:
        @functools.wraps(backward)
        def run(ctx: Any, *grads: Any) -> Any:
            if not torch.is_grad_enabled():
                return backward(ctx, *grads)
            anchors = [t for t in (*grads, *ctx.saved_tensors) if t is not None and t.requires_grad]
            if not anchors:
                raise RuntimeError(message)
            with torch.no_grad():
                results = backward(ctx, *grads)
            several = results if isinstance(results, tuple) else (results,)
            present = [one for one in several if one is not None]
            outputs = iter(_Raise.apply(message, len(present), *present, *anchors))
            marked = tuple(None if one is None else next(outputs) for one in several)
            return marked if isinstance(results, tuple) else marked[0]

        return run

    return decorate


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"{value!r} ({type(value).__name__})"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
