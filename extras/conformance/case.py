"""A case: an input, the value by a formula in float64, and the public report that it comes from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Inputs = Mapping[str, Any]
Formula = Callable[..., Tensor]  # the inputs by name -> float64
State = Literal["right", "wrong", "convention", "not there", "error"]


class NotThere(Exception):
    """A library has no function for an operation, or lacks an option; the message says which."""


@dataclass(frozen=True)
class Case:
    """One small input with its right value.

    Attributes:
        name: what must hold.
        operation: the method of `Library` that gets the inputs.
        inputs: its keyword arguments; numbers are float64.
        expected: the right value, by plain PyTorch on the inputs; none of our operators.
        faulty: the value that the reported fault gives; the check must reject it.
        report: URL of the public report.
        fault: what went wrong there.
        conventions: library -> its documented meaning, where that is another one.
        rtol, atol: of the comparison; float32 results and the small epsilons of libraries pass.
    """

    name: str
    operation: str
    inputs: Inputs
    expected: Formula
    faulty: Formula
    report: str
    fault: str
    conventions: Mapping[str, str] = field(default_factory=dict)
    rtol: float = 1e-4
    atol: float = 1e-5

    def accepts(self, value: Tensor) -> bool:
        """Return whether `value` is the right one, NaN being wrong."""
        expected = self.expected(**self.inputs)
        return value.shape == expected.shape and torch.allclose(
            value.double(), expected, rtol=self.rtol, atol=self.atol
        )


@dataclass(frozen=True)
class Outcome:
    """What a library did with a case.

    note: its documented convention, why it is not there, or the error. position: the flat index of
    the entry that differs most, of which `given` and `expected` are the values.
    """

    state: State
    note: str = ""
    given: float | None = None
    expected: float | None = None
    position: int | None = None


def run(case: Case, name: str, library: object) -> Outcome:
    """Run a case on a library; an exception is an outcome, too."""
    inputs = {k: v.clone() if isinstance(v, Tensor) else v for k, v in case.inputs.items()}
    try:
        operation = getattr(library, case.operation, None)
        if operation is None:
            raise NotThere("has no such function")
        value = operation(**inputs).detach()
    except NotThere as reason:
        return Outcome("not there", str(reason))
    except Exception as error:
        return Outcome("error", f"{type(error).__name__}: {error}")
    if case.accepts(value):
        return Outcome("right")
    expected = case.expected(**case.inputs)
    if value.shape != expected.shape:
        return Outcome("error", f"shape {list(value.shape)}, expected {list(expected.shape)}")
    distance = (value.double() - expected).abs().nan_to_num(torch.inf).flatten()
    worst = int(distance.argmax())
    given, right = float(value.flatten()[worst]), float(expected.flatten()[worst])
    convention = case.conventions.get(name)
    state: State = "wrong" if convention is None else "convention"
    return Outcome(state, convention or "", given, right, worst)


def with_gradient(function: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    """Return [sum of function(leaf), its gradient], flat."""
    leaf = leaf.detach().clone().requires_grad_()
    value = function(leaf).sum()
    (gradient,) = torch.autograd.grad(value, leaf)
    return torch.cat([value.detach().view(1), gradient.flatten()])
