"""The declaration of operators: `torch.library.custom_op`, called without its overhead in eager.

An operator chooses the dtypes of its products itself. Autocast would round operands of float32
products in it to 16 bits, in the forward as in a backward that runs inside autocast: it is off in
both. What an operator has no formula for, a forward-mode tangent or a derivative of torch.func, is
an error that names it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import Parameter

from . import _check as check

_PLAIN = frozenset((torch.Tensor, Parameter, list, str, int, float, bool, type(None), torch.dtype))


def _is_plain(arguments: tuple[Any, ...]) -> bool:
    """Return whether nothing but the kernel and autograd has to see a call."""
    return (
        isinstance(arguments[0], torch.Tensor)
        and not arguments[0].is_meta
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and _PLAIN.issuperset(map(type, arguments))
    )


class CustomOp:
    """An op of torch.library; plain eager calls do without the dispatcher, 30 to 200 us of Python.

    A compiler, a dispatch mode, torch.func, meta tensors and subclasses get the op itself.
    """

    def __init__(self, definition: Any, run: Callable[..., Any]) -> None:
        self._definition = definition
        self.op = definition._opoverload
        self._run = run
        schema = self.op._schema
        self.name = schema.name.partition("::")[2]
        self._arguments = [argument.name for argument in schema.arguments]
        self._mutates = schema.is_mutable  # then the dispatcher counts versions
        types = [str(one.type) for one in (*schema.arguments, *schema.returns)]
        self._has_lists = any("List" in kind and "Tensor" in kind for kind in types)
        # Then torch.vmap calls an op once per entry.
        takes_batches = not self._mutates and not self._has_lists
        self._refuse = check.reverse_mode_only if takes_batches else check.untransformed
        self._function: Any = None

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.op(*arguments)
        if self._mutates or not _is_plain(arguments):
            named = dict(zip(self._arguments, arguments, strict=False))
            self._refuse(self.name, **named)
            return self.op(*arguments)
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)):
            return self._run(*arguments)
        if self._function is None:
            return self.op(*arguments)
        return self._function.apply(*arguments)

    def register_fake(self, function: Callable) -> Callable:
        fake: Callable = self._definition.register_fake(function)
        return fake

    def register_autograd(self, backward: Callable, *, setup_context: Callable) -> None:
        """Register the gradients of the op's first arguments; the others have none."""
        backward, count = without_autocast(backward), len(self._arguments)

        def padded(ctx: Any, *grads: Any) -> tuple[Any, ...]:
            results = backward(ctx, *grads)
            results = results if isinstance(results, tuple) else (results,)
            return *results, *[None] * (count - len(results))

        self._definition.register_autograd(padded, setup_context=setup_context)
        run = self._run

        def forward(ctx: Any, *arguments: Any) -> Any:
            output = run(*arguments)
            setup_context(ctx, arguments, output)
            return output

        if self._has_lists:
            return  # a Function does not see tensors in lists
        methods = {"forward": staticmethod(forward), "backward": staticmethod(padded)}
        self._function = type(self.name, (torch.autograd.Function,), methods)


def without_autocast(function: Callable) -> Callable:
    """Decorate a function that chooses the dtypes of its products itself."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableAutocast():
            return function(*args, **kwargs)

    return run


def custom_op(
    name: str, *, mutates_args: str | Iterable[str], schema: str | None = None
) -> Callable[[Callable], CustomOp]:
    """Decorate the implementation of an op: `torch.library.custom_op`, with autocast off inside.

    Args:
        name, mutates_args, schema: see `torch.library.custom_op`.
    """

    def decorate(function: Callable) -> CustomOp:
        namespace, _, op = name.partition("::")
        if hasattr(getattr(torch.ops, namespace), op):  # torch would invalidate the ops in use
            raise RuntimeError(
                f"{name} is registered already, and now again by the module {function.__module__}: "
                "the operators are imported as hybridengine.kernels alone, and once per process"
            )
        run = without_autocast(function)
        signature = schema or torch.library.infer_schema(function, mutates_args=mutates_args)
        definition = torch.library.custom_op(name, run, mutates_args=mutates_args, schema=signature)
        return CustomOp(definition, run)

    return decorate
