"""Whether a function of another package still is what ours stands for.

A probe calls a function, theirs and then ours, with small tensors on the CPU; results and gradients
have to agree. What cannot be called alone (it talks to a server, or needs a GPU) is compared by the
names that its code uses: an attribute, function or module that ours does not know is a change.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "Probe",
    "calling",
    "constant",
    "difference",
    "draw",
    "unknown_names",
    "with_gradients",
]

Probe = Callable[[Any], Any]  # function, as its owner's namespace has it → results

_RTOL, _ATOL = 1e-4, 1e-5  # of float32 in another order of summation


def calling(inputs: Mapping[str, Any], differentiated: Sequence[str] = ()) -> Probe:
    """Return a probe that calls a function with those of `inputs` that it has parameters for.

    differentiated: inputs with respect to which gradients are results, too.
    """

    def probe(function: Any) -> Any:
        names = inspect.signature(function).parameters.keys() & inputs.keys()
        given = {name: inputs[name] for name in sorted(names)}
        return with_gradients(lambda **changed: function(**given | changed), given, differentiated)

    return probe


def with_gradients(
    function: Callable[..., Any], inputs: Mapping[str, Any], differentiated: Sequence[str]
) -> tuple[Any, dict[str, Tensor | None]]:
    """Return function(**copies of `inputs`), and the gradients of its results.

    The gradients are those of the sum of all elements of the results, each with its own weight.
    """
    given = {n: v.clone() if isinstance(v, Tensor) else v for n, v in inputs.items()}
    leaves = {n: given[n].requires_grad_() for n in differentiated if n in given}
    # a product, since some functions write gradients into the memory of what they are given
    result = function(**given | {name: leaf * 1.0 for name, leaf in leaves.items()})
    outputs = [x for x in _leaves(result) if isinstance(x, Tensor) and x.requires_grad]
    if not leaves or not outputs:
        return result, {}
    total = torch.stack([(x * _weights(x)).sum().double() for x in outputs]).sum()
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return result, dict(zip(leaves, gradients, strict=True))


def difference(probe: Probe, theirs: Any, ours: Any) -> str:
    """Return what differs in the results of a probe, "" for nothing. The same at every call.

    A function that cannot run for want of a package is not compared.
    """
    modes = (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
    )
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        return _difference(probe, theirs, ours)


def _difference(probe: Probe, theirs: Any, ours: Any) -> str:
    results = []
    for name, function in (("theirs", theirs), ("ours", ours)):
        try:
            results.append(list(_leaves(probe(function))))
        except ImportError:
            return ""
        except Exception as error:
            return f"{name} raises {type(error).__name__}: {error}"
    expected, got = results
    if len(expected) != len(got):
        return f"it returns {len(expected)} values, ours returns {len(got)}"
    return next((text for a, b in zip(expected, got, strict=True) if (text := _unlike(a, b))), "")


def unknown_names(function: Any, known: str) -> list[str]:
    """Return the names that the code of `function` uses and that are not among the words known."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    return sorted(set(_names(function.__code__)) - set(known.split()))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _weights(x: Tensor) -> Tensor:
    return torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view(x.shape)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key in sorted(value):
            yield key
            yield from _leaves(value[key])
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from _leaves(entry)
    else:
        yield torch.as_tensor(value) if isinstance(value, np.ndarray | np.generic) else value


def _unlike(theirs: Any, ours: Any) -> str:
    numbers = (Tensor, bool, int, float)
    if not (isinstance(theirs, numbers) and isinstance(ours, numbers)):
        return "" if theirs == ours else f"it gives {theirs!r}, ours {ours!r}"
    a, b = (torch.as_tensor(x).detach().double() for x in (theirs, ours))
    if a.shape != b.shape:
        return f"it gives the shape {list(a.shape)}, ours {list(b.shape)}"
    if torch.allclose(a, b, _RTOL, _ATOL, equal_nan=True):
        return ""
    worst = (a - b).abs().nan_to_num(torch.inf).argmax()
    return f"it gives {a.flatten()[worst]:.6g} where ours gives {b.flatten()[worst]:.6g}"


def constant(values: Any) -> Tensor:
    """Return `values` as a tensor on the CPU, whatever the default device is."""
    return torch.from_numpy(np.asarray(values))


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return normal float32 numbers on the CPU; the global generator stays as it is."""
    numbers = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(numbers)
