"""The declaration of operators: `torch.library.custom_op`, called without its overhead in eager.

An operator chooses the dtypes of its products itself. Autocast would round operands of float32
products in it to 16 bits, in the forward as in a backward that runs inside autocast: it is off in
both. What an operator has no formula for, a forward-mode tangent or a derivative of torch.func, is
an error that names it.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, get_type_hints

import torch
from torch import is_grad_enabled
from torch._C import (
    _any_requires_grad,
    _are_functorch_transforms_active,
    _DisableAutocast,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
)
from torch.autograd import Function, forward_ad
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling
from torch.nn import Parameter

from . import _check as check

_PLAIN = frozenset((torch.Tensor, Parameter, list, str, int, float, bool, type(None), torch.dtype))
_is_meta = operator.attrgetter("is_meta")


def _is_record(parameter: inspect.Parameter) -> bool:
    return hasattr(parameter.annotation, "_fields")


class Records:
    """Named tuples that calls pass in place of several consecutive arguments of the op.

    Their tensors are constants, on the device of the others.
    """

    def __init__(self, signature: inspect.Signature) -> None:
        named = {i: one for i, one in enumerate(signature.parameters.values()) if _is_record(one)}
        # The classes and the names of the tuples, by their position in a call.
        self.kinds: dict[int, Any] = {i: one.annotation for i, one in named.items()}
        self.names = {i: one.name for i, one in named.items()}

    def join(self, flat: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments of a call for those of the op."""
        for at, kind in self.kinds.items():
            end = at + len(kind._fields)
            flat = (*flat[:at], kind(*flat[at:end]), *flat[end:])
        return flat

    def split(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments of the op for those of a call."""
        for at in reversed(self.kinds):
            arguments = (*arguments[:at], *arguments[at], *arguments[at + 1 :])
        return arguments

    def joining(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, for the arguments of the op."""
        if not self.kinds:
            return function
        return functools.wraps(function)(lambda *flat: function(*self.join(flat)))


class CustomOp:
    """An op of torch.library; plain eager calls do without the dispatcher, 30 to 200 us of Python.

    A compiler, a dispatch mode, torch.func, meta tensors and subclasses get the op itself.
    """

    def __init__(self, definition: Any, function: Callable[..., Any], records: Records) -> None:
        self._definition = definition
        self.op = definition._opoverload
        self._function = function
        schema = self.op._schema
        self.name = schema.name.partition("::")[2]
        self._arguments = [argument.name for argument in schema.arguments]
        self.names = list(self._arguments)  # of the arguments of a call
        for at, kind in records.kinds.items():
            self.names[at : at + len(kind._fields)] = [records.names[at]]
        self.records = records
        self._types = _PLAIN.union(records.kinds.values())
        declared = records.join(schema.arguments)
        self._count = len(declared)
        tensors = {i: one for i, one in enumerate(declared) if i not in records.kinds}
        # What is written, whose version is incremented as the dispatcher does.
        self._written = [
            i for i, one in tensors.items() if one.alias_info and one.alias_info.is_write
        ]
        self._lists = [i for i, one in tensors.items() if _is_list(one)]
        self._nested = [*self._lists, *records.kinds]
        # The position of a tensor that every call has; None: there is none.
        self._required = next((i for i, one in tensors.items() if str(one.type) == "Tensor"), None)
        self._returns_list = any(map(_is_list, schema.returns))
        self._has_lists = bool(self._lists) or self._returns_list
        # Then torch.vmap calls an op once per entry.
        takes_batches = not (self._written or self._has_lists)
        self._refuse = check.reverse_mode_only if takes_batches else check.untransformed
        self._apply: Any = None  # of a Function for plain calls
        self._num_differentiable: int | None = None

    def __call__(self, *arguments: Any) -> Any:
        if is_compiling():
            return self.op(*self.records.split(arguments))
        if (
            _len_torch_dispatch_stack()
            or not self._types.issuperset(map(type, arguments))
            or _are_functorch_transforms_active()
            or forward_ad._current_level >= 0
            or (self._required is not None and arguments[self._required].is_meta)
            or (self._nested and not self._are_nested_plain(arguments))
        ):  # more than the kernel and autograd have to see the call
            flat = self.records.split(arguments)
            self._refuse(self.name, **dict(zip(self._arguments, flat, strict=False)))
            return self.op(*flat)
        if is_grad_enabled() and (
            _any_requires_grad(*arguments) or (self._lists and self._list_requires_grad(arguments))
        ):
            return self._differentiable(arguments)
        for i in self._written:
            if arguments[i] is not None:
                increment_version(arguments[i])
        if not _is_any_autocast_enabled():
            return self._function(*arguments)
        with _DisableAutocast():
            return self._function(*arguments)

    def _are_nested_plain(self, arguments: tuple[Any, ...]) -> bool:
        if any([not _PLAIN.issuperset(map(type, arguments[i])) for i in self._nested]):
            return False
        return not any([any(map(_is_meta, arguments[i])) for i in self._lists])

    def _list_requires_grad(self, arguments: tuple[Any, ...]) -> bool:
        return any([_any_requires_grad(*arguments[i]) for i in self._lists])

    def _differentiable(self, arguments: tuple[Any, ...]) -> Any:
        if self._apply is None:
            return self.op(*self.records.split(arguments))
        if not self._has_lists:
            results = self._apply(*arguments)
        else:
            lengths: list[int | None] = [None] * len(arguments)
            for i in reversed(self._lists):
                lengths[i] = len(arguments[i])
                arguments = (*arguments[:i], *arguments[i], *arguments[i + 1 :])
            results = self._apply(lengths, *arguments)
            if self._returns_list:
                return list(results)
        if self._num_differentiable is None:
            return results
        *results, others = results
        return (*results, *others)

    def register_fake(self, function: Callable) -> Callable:
        """Register a fake kernel, which gets those arguments of a call that its parameters name."""
        at = [self.names.index(name) for name in inspect.signature(function).parameters]

        def run(*flat: Any) -> Any:
            arguments = self.records.join(flat)
            return function(*(arguments[i] for i in at))

        self._definition.register_fake(run)
        return function

    def register_autograd(
        self,
        backward: Callable,
        *,
        setup_context: Callable,
        num_differentiable: int | None = None,
    ) -> None:
        """Register the gradients of the op's first arguments; a record and the others have none.

        Args:
            backward, setup_context: see `torch.library.register_autograd`.
            num_differentiable: how many of the results are, the first ones; `backward` takes their
                gradients. None: all of them.
        """
        function, records = self._function, self.records
        self._num_differentiable = number = num_differentiable

        def padded(count: int) -> Callable[..., tuple[Any, ...]]:
            def run(ctx: Any, *grads: Any) -> tuple[Any, ...]:
                if _is_any_autocast_enabled():
                    with _DisableAutocast():
                        results = backward(ctx, *grads[:number])
                else:
                    results = backward(ctx, *grads[:number])
                if not isinstance(results, tuple):
                    results = (results,)
                return results + (None,) * (count - len(results))

            return run

        def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            setup_context(ctx, records.join(inputs), output)
            if number is not None:
                ctx.mark_non_differentiable(*output[number:])

        self._definition.register_autograd(padded(len(self._arguments)), setup_context=save)

        def forward(ctx: Any, *arguments: Any) -> Any:
            if _is_any_autocast_enabled():
                with _DisableAutocast():
                    output = function(*arguments)
            else:
                output = function(*arguments)
            setup_context(ctx, arguments, output)
            if number is None:
                return output
            # In a tuple of their own, which autograd leaves alone: it takes 2 us for a tensor.
            return (*output[:number], output[number:])

        plain_backward = padded(self._count)
        methods: dict[str, Callable] = {"forward": forward, "backward": plain_backward}
        if self._has_lists:
            methods = _with_lists(forward, plain_backward, self._returns_list)
        statics = {name: staticmethod(method) for name, method in methods.items()}
        node = type(self.name, (Function,), statics)
        self._apply = _plain_apply(node)


def apply(node: type[Function], *arguments: Any) -> Any:
    """Return node.apply(*arguments), for callers that have refused derivatives of torch.func."""
    if torch.compiler.is_compiling():
        return node.apply(*arguments)
    return _plain_apply(node)(*arguments)


def _plain_apply(node: type[Function]) -> Callable[..., Any]:
    """Return node.apply without what it does about torch.func, for every argument."""
    return super(Function, node).apply  # type: ignore[misc]


def _is_list(declared: Any) -> bool:
    """Return whether an argument or result is a list of tensors."""
    return "List" in str(declared.type) and "Tensor" in str(declared.type)


def _with_lists(forward: Callable, backward: Callable, returns_list: bool) -> dict[str, Callable]:
    """Return the methods of a Function that sees the tensors of lists, one argument each.

    Its first argument has the length of each list, None for another argument.
    """

    def flat_forward(ctx: Any, lengths: list[int | None], *flat: Any) -> Any:
        ctx.lengths, rest = lengths, iter(flat)
        arguments = [next(rest) if n is None else list(islice(rest, n)) for n in lengths]
        output = forward(ctx, *arguments)
        return tuple(output) if returns_list else output

    def flat_backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        results = backward(ctx, [*grads]) if returns_list else backward(ctx, *grads)
        flat: list[Any] = [None]
        for result, n in zip(results, ctx.lengths, strict=True):
            flat += [result] if n is None else result or [None] * n
        return tuple(flat)

    return {"forward": flat_forward, "backward": flat_backward}


def without_autocast(function: Callable) -> Callable:
    """Decorate a function that chooses the dtypes of its products itself."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _DisableAutocast():
            return function(*args, **kwargs)

    return run


def custom_op(
    name: str, *, mutates_args: str | Iterable[str], schema: str | None = None
) -> Callable[[Callable], CustomOp]:
    """Decorate the implementation of an op: `torch.library.custom_op`, with autocast off inside.

    A parameter whose type is a named tuple, of numbers, strings and constant tensors, is a record:
    the op has its fields as arguments, with their names; calls, the implementation and what is
    registered have it as one argument.

    Args:
        name, mutates_args: see `torch.library.custom_op`.
        schema: None: that of the annotations of the implementation.
    """

    def decorate(function: Callable) -> CustomOp:
        namespace, _, op = name.partition("::")
        if hasattr(getattr(torch.ops, namespace), op):  # torch would invalidate the ops in use
            raise RuntimeError(
                f"{name} is registered already, and now again by the module {function.__module__}: "
                "the operators are imported as hybridengine.kernels alone, and once per process"
            )
        signature = inspect.signature(function, eval_str=True)
        records = Records(signature)
        declared = schema
        if declared is None:
            flat = _with_fields(signature, records)
            declared = torch.library.infer_schema(flat, mutates_args=mutates_args)
        run = records.joining(without_autocast(function))
        definition = torch.library.custom_op(name, run, mutates_args=mutates_args, schema=declared)
        return CustomOp(definition, function, records)

    return decorate


def _with_fields(signature: inspect.Signature, records: Records) -> Callable[..., Any]:
    """Return a function whose parameters are the op's arguments, for its signature alone."""

    def flat() -> None: ...

    parameters = []
    for i, parameter in enumerate(signature.parameters.values()):
        fields = {parameter.name: parameter.annotation}
        if i in records.kinds:
            fields = get_type_hints(records.kinds[i])
        parameters += [parameter.replace(name=n, annotation=t) for n, t in fields.items()]
    flat.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return flat
