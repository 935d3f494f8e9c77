"""The declaration of operators: `torch.library.custom_op` with autocast off inside.

An operator chooses the dtypes of its products itself. Autocast would round operands of float32
products in it to 16 bits, in the forward as in a backward that runs inside autocast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch


def needs_dispatcher(*tensors: torch.Tensor | None) -> bool:
    """Return whether a call has to go through torch's dispatcher, for a gradient or a compiler.

    Otherwise an operator may call its kernel itself: at the sizes of a decoding step the dispatcher
    takes longer than the kernel.
    """
    if torch.compiler.is_compiling():
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def custom_op(
    name: str, *, mutates_args: str | Iterable[str], schema: str | None = None
) -> Callable[[Callable], Any]:
    """Decorate the implementation of an op: `torch.library.custom_op`, with autocast off inside.

    Args:
        name, mutates_args, schema: see `torch.library.custom_op`.
    """

    def decorate(function: Callable) -> Any:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._DisableAutocast():
                return function(*args, **kwargs)

        signature = schema or torch.library.infer_schema(function, mutates_args=mutates_args)
        return torch.library.custom_op(name, run, mutates_args=mutates_args, schema=signature)

    return decorate
