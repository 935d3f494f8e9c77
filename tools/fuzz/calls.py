"""What is called: each function of hybridengine._C, with what draws right arguments of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hybridengine._C as C
from tools.fuzz import layers, losses, packing, weights
from tools.fuzz.draw import Draw


def _function(name: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        made = [C.LogProbOptions(*x) if isinstance(x, losses.Options) else x for x in arguments]
        return getattr(C, name)(*made)

    return call


def _method(make: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a call of a method; its first two arguments are those of its class."""

    def call(*arguments: Any) -> Any:
        return getattr(make(*arguments[:2]), name)(*arguments[2:])

    return call


FUNCTIONS: list[tuple[Callable[[Draw], list], Callable[..., Any]]] = [
    *(
        (draw, _function(draw.__name__))
        for module in (layers, losses, packing, weights)
        for draw in module.FUNCTIONS
    ),
    *((draw, _method(make, name)) for draw, make, name in weights.METHODS),
]
