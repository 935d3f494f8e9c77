"""What a GPU machine does at all, in half a minute; the part `probe` of gpu_report.py.

    python -m tools.gpu_probe --json FILE [--device cpu] [--operators]

Rows of `host`: microseconds of Python's loop and of launches. Of `peak`: copies (GB/s) and a
product (TFLOP/s). Of `operator`: every public operator with its gradients on the arguments of its
contract (tests/kernels/contract_cases.py), against its float64 form on the CPU: once, again, which
launches what the first call compiled, and with addresses that are not aligned; then with sizes that
are multiples of 16 (benchmarks/host.py), twice, against the CPU. `error` is the largest absolute
difference over 1 + |value|; the row fails above LIMIT. `--operators`: these alone, each once, as
under compute-sanitizer.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import host
from benchmarks._bench import OURS, Bench
from hybridengine import kernels as he
from hybridengine.kernels.linear.rescale import rescale_
from tests.kernels import contract
from tests.kernels.contract_cases import CASES, operator
from tests.kernels.contract_inputs import MASK

LIMIT = 1e-3  # sums of float32 in another order; products of float32 without TF32
ON_HOST = {"balance", "balance_by_tokens", "imbalance"}  # they take lengths on the CPU
OF_BITS = {"bit_checksum"}  # of float64 it is another number
HOST_ARGUMENTS = {"table"}  # of strided_copy
CALLS = 1000

Row = dict[str, Any]


def host_us(device: torch.device) -> Iterator[Row]:
    """Yield the microseconds of what every call consists of."""
    x, factor = torch.ones(4096, device=device), torch.ones(1, device=device)
    calls: dict[str, Callable[[], object]] = {
        "loop": lambda: None,
        "torch launch": lambda: x.add_(0.0),
        "Triton launch, ours": partial(rescale_, x, factor),
        "token_log_probs": partial(he.token_log_probs, x.view(64, 64), x[:64].long()),
    }
    if device.type == "cpu":
        del calls["Triton launch, ours"]
    for name, call in calls.items():
        call()
        synchronize(device)
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            best = min(best, time.perf_counter() - start)
            synchronize(device)
        yield {"kind": "host", "name": name, "us": round(best / CALLS * 1e6, 3)}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def peaks(bench: Bench) -> Iterator[Row]:
    for kind, dtype in (("copy", torch.float32), ("read", torch.float32), ("gemm", torch.bfloat16)):
        yield {"kind": "peak", "name": kind, "rate": round(bench.peak(kind, dtype), 1)}


def operators(device: torch.device, once: bool = False) -> Iterator[Row]:
    """Yield a row for each call of each operator."""
    for name in CASES:
        if operator(name) in ON_HOST:
            continue
        forms = {"once": plain, "again": plain, "unaligned": unaligned}
        for form, arrange in list(forms.items())[: 1 if once else None]:
            yield checked(name, form, partial(contract_case, name, arrange, device))
    torch.manual_seed(0)
    expected = host.operators(torch.device("cpu"))
    torch.manual_seed(0)
    try:
        got = host.operators(device)
    except Exception as error:
        yield {"kind": "operator", "name": "host", "outcome": "failed", "message": str(error)}
        return
    for name, form in [(n, f) for n in expected for f in ("multiples", "multiples again")]:
        if not (once and form.endswith("again")):
            yield checked(name, form, partial(host_case, expected[name], got[name]))


def checked(name: str, form: str, errors: Callable[[], float]) -> Row:
    row: Row = {"kind": "operator", "name": name, "form": form}
    try:
        error = errors()
    except Exception as raised:
        last = traceback.format_exc()[-3000:]
        return row | {"outcome": "failed", "message": f"{type(raised).__name__}: {raised}\n{last}"}
    return row | {"outcome": "passed" if error <= LIMIT else "wrong", "error": error}


def plain(name: str, arguments: contract.Arguments) -> contract.Arguments:
    return arguments


def unaligned(name: str, arguments: contract.Arguments) -> contract.Arguments:
    """Let rows begin at addresses that are no multiples of 16 bytes, where strides are read."""
    case = CASES[name]
    fixed = {*case.by_memory, *case.contiguous}
    return contract.changed(
        arguments,
        lambda n, t: contract.offset(t) if t.dim() and contract.base(n) not in fixed else t,
    )


def contract_case(name: str, arrange: Callable[..., Any], device: torch.device) -> float:
    right = contract.outcome(name, contract.copies(name, torch.float64), None)
    if isinstance(right, Exception) or name in OF_BITS:  # float64 is not one of its dtypes
        right = contract.differentiated(name, contract.copies(name), None)
    given = contract.changed(
        contract.copies(name),
        lambda n, t: t if contract.base(n) in HOST_ARGUMENTS else t.to(device),
    )
    if operator(name) == "unpack":
        given["packed"] = he.pack([], MASK.view(3, 4).to(device))
    with torch.device(device):  # `contract.weighted` makes its weights there
        results = contract.differentiated(name, arrange(name, given), None)
    return largest_error(results, right)


def host_case(expected: host.Case, got: host.Case) -> float:
    results = []
    for leaves, calls in (expected, got):
        leaves = [leaf.detach().requires_grad_(False) for leaf in leaves]
        results.append(contract.flatten([*host_results(calls[OURS]())]))
    return largest_error(results[1], results[0])


def host_results(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, list | tuple) else [value]


def largest_error(results: list[Any], right: list[Any]) -> float:
    """Return the largest difference over 1 + |value|; NaN and infinity must be the same."""
    largest = 0.0
    for one, exact in zip(results, right, strict=True):
        if not isinstance(exact, torch.Tensor):
            assert one == exact, f"{one} instead of {exact}"
            continue
        if exact.dtype == torch.float8_e4m3fn:
            one, exact = one.view(torch.uint8), exact.view(torch.uint8)
        one, exact = one.detach().cpu().double(), exact.detach().cpu().double()
        assert one.shape == exact.shape, f"{one.shape} instead of {exact.shape}"
        finite = exact.isfinite()
        assert torch.equal(one.isfinite(), finite), "NaN or infinity at other places"
        error = (one - exact).abs() / (1 + exact.abs())
        largest = max(largest, float(error[finite].max()) if finite.any() else 0.0)
    return largest


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--operators", action="store_true", help="each operator once")
    parser.add_argument("--quick", action="store_true", help="small peaks")
    parser.add_argument("--resume", action="store_true", help="changes nothing here")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    rows: list[Row] = []
    parts = [operators(device, arguments.operators)]
    if not arguments.operators:
        bench = Bench(arguments.device, arguments.quick)
        parts = [peaks(bench), host_us(device), *parts]
    for part in parts:
        for row in part:
            rows.append(row)
            arguments.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
            print(f"# {row}"[:300], flush=True)
    bad = [row for row in rows if row.get("outcome", "passed") != "passed"]
    print(f"gpu-probe: {len(rows)} rows, {len(bad)} bad:", *{row["name"] for row in bad})
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
