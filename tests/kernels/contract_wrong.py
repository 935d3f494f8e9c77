"""The contract of an operator for wrong arguments: each is refused by an error that names it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch

from tests.kernels.contract import Arguments, base, call, copies, tensors_of, with_tensor
from tests.kernels.contract_cases import CASES, OPERATORS, operator
from tests.kernels.contract_inputs import WRONG_ENDS

Change = tuple[str, str, Any]  # argument, what is wrong with it, its value
_ENDS = {"cu_seqlens", "cu_counts", "cu_kept"}
# They take lists, or are called by engine and sync alone; what they refuse has tests of its own.
_VALUES_ONLY = {
    "balance",
    "balance_by_tokens",
    "bit_checksum",
    "change_mask",
    "imbalance",
    "mixed_gemm",
    "pack_sequences",
    "paged_attention",
    "strided_copy",
    "take_changed",
    "write_kv_cache",
}


def check_wrong_arguments(name: str, backend: str | None) -> None:
    """Change one argument at a time; an error names operator and argument."""
    operators = "|".join(CASES[name].names or (operator(name),))
    arguments = "|".join(CASES[name].arguments)
    accepted = []
    kinds = [_values, _names, _devices, _dtypes, _masks, _shapes, _ends]
    for kind in kinds[:1] if name in _VALUES_ONLY else kinds:
        for argument, what, value in kind(name):
            given: Arguments = copies(name)
            if "[" in argument:
                given = with_tensor(given, argument, value)
            else:
                given[argument] = value
            # A shape may disagree with others, and "tensor 1" stands for "tensors[1]".
            words = arguments if kind is _shapes else base(argument).removesuffix("s")
            named = r"\w+: backend '" if argument == "backend" else rf"({operators}): .*({words})"
            try:
                call(name, given, given.pop("backend", backend))
                accepted.append(f"{argument}: {what}: no error")
            except Exception as error:
                is_refusal = isinstance(error, (ValueError, TypeError, IndexError))
                if not (is_refusal and re.match(named, str(error))):
                    accepted.append(f"{argument}: {what}: {type(error).__name__}: {error}")
    assert not accepted, "\n".join(accepted)


def _values(name: str) -> Iterator[Change]:
    """Values outside the domain of an argument."""
    for argument, values in CASES[name].wrong.items():
        yield from ((argument, str(value), value) for value in values)


def _names(name: str) -> Iterator[Change]:
    """A name that no option has, and a backend that does not run on a CPU."""
    for parameter in inspect.signature(OPERATORS[name]).parameters.values():
        kinds = re.findall(r"\w+", str(parameter.annotation))
        if parameter.name == "backend":
            yield from (("backend", wrong, wrong) for wrong in ("nonsense", "cuda"))
        elif parameter.name != "group" and {"str", "Literal"} & {*kinds}:
            yield parameter.name, "no name", "nonsense"


def _devices(name: str) -> Iterator[Change]:
    """A tensor on another device; "meta" stands for any."""
    tensors = tensors_of(copies(name))
    if len(tensors) > 1:
        yield from ((argument, "on meta", t.to("meta")) for argument, t in tensors.items())


def _dtypes(name: str) -> Iterator[Change]:
    """Complex numbers; floats for ids, and integers for floats unless it may have any number."""
    for argument, tensor in tensors_of(copies(name)).items():
        if base(argument) in CASES[name].any_dtype:
            continue
        yield argument, "complex64", tensor.to(torch.complex64)
        if base(argument) not in CASES[name].any_number and tensor.dtype != torch.bool:
            other = torch.int64 if tensor.is_floating_point() else torch.float32
            yield argument, str(other), tensor.to(other)


def _masks(name: str) -> Iterator[Change]:
    """Weights in place of a mask."""
    for argument, tensor in tensors_of(copies(name)).items():
        if tensor.dtype == torch.bool:
            yield argument, "0.5", torch.full(tensor.shape, 0.5)


def _shapes(name: str) -> Iterator[Change]:
    """A dimension more, none, a row more, and a column more."""
    for argument, tensor in tensors_of(copies(name)).items():
        if base(argument) in CASES[name].any_shape:
            continue
        yield argument, "[1, ...]", tensor[None]
        if tensor.dim():
            yield argument, "[]", tensor.flatten()[0]
            if argument not in _ENDS:  # one more is an empty sequence
                yield argument, "[N + 1, ...]", torch.cat([tensor, tensor[-1:]])
            if tensor.dim() > 1 and base(argument) not in CASES[name].any_columns:
                yield argument, "[..., H + 1]", torch.cat([tensor, tensor[..., -1:]], -1)


def _ends(name: str) -> Iterator[Change]:
    """Ends of sequences that do not ascend from 0 to the number of tokens."""
    for argument in CASES[name].arguments.keys() & _ENDS:
        ends = CASES[name].arguments[argument]
        yield from ((argument, what, change(ends)) for what, change in WRONG_ENDS.items())
