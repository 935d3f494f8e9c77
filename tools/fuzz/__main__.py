"""The command line of the fuzzer."""

from __future__ import annotations

import argparse
import faulthandler
import mmap
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tools.fuzz
from tools.fuzz.calls import FUNCTIONS
from tools.fuzz.draw import SANITIZED, Draw
from tools.fuzz.losses import Options

ROOT = Path(__file__).parents[2]
CLEAN = (ValueError, IndexError, TypeError, RuntimeError, MemoryError, OverflowError)
LIMIT_S = 120.0  # of a call, on a busy machine under a sanitizer


def arguments_of(d: Draw, make: Callable[[Draw], list], right: bool) -> list:
    arguments = make(d)
    for _ in range(0 if right else d.pick((0, 1, 1, 1, 2, 3))):
        i = d.random.randrange(len(arguments))
        if isinstance(arguments[i], Options):
            inner = list(arguments[i])
            j = d.random.randrange(len(inner))
            inner[j] = d.spoilt(inner[j])
            arguments[i] = Options(inner)
        else:
            arguments[i] = d.spoilt(arguments[i])
    return [
        Options(d.placed(list(x))) if isinstance(x, Options) else d.placed(x) for x in arguments
    ]


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        text = f"{str(value.dtype)[6:]}{list(value.shape)}"
        if value.layout == torch.strided and value.device.type == "cpu" and value.numel() <= 40:
            text += f"{value.tolist()}"
        return text if value.is_cpu else f"{text} on {value.device}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(describe, value))}]"
    return repr(value)


def run_call(seed: int, number: int, right: bool, verbose: bool) -> tuple[str, str]:
    """Run one call; return (its function, "returned" or the type of its error)."""
    d = Draw(seed, number)
    make, call = FUNCTIONS[number % len(FUNCTIONS)]
    torch.set_num_threads(d.pick((1, 2, 3)))
    arguments = arguments_of(d, make, right)
    if verbose:
        print(f"{number}: {make.__name__}({', '.join(map(describe, arguments))})", flush=True)
    try:
        call(*arguments)
    except CLEAN as error:
        if verbose:
            print(f"  {type(error).__name__}: {str(error).splitlines()[0]}")
        return make.__name__, type(error).__name__
    return make.__name__, "returned"


def run_calls(options: argparse.Namespace) -> None:
    """Run the calls in this process; the file `progress` has the number of the present one."""
    seed, first, count = options.seed, options.first, options.calls
    faulthandler.enable()
    if not SANITIZED:  # a wrong size must not take all memory of the machine
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        resource.setrlimit(resource.RLIMIT_AS, (used + (4 << 30),) * 2)
    results: Counter[tuple[str, str]] = Counter()
    with options.progress.open("r+b") as file, mmap.mmap(file.fileno(), 8) as present:
        for number in range(first, first + count):
            present[:] = number.to_bytes(8, "little")
            results[run_call(seed, number, options.right, options.verbose)] += 1
    returned = sum(n for (_, result), n in results.items() if result == "returned")
    print(f"{count} calls: {returned} returned, {count - returned} raised a Python error")
    never = [make.__name__ for make, _ in FUNCTIONS if not results[make.__name__, "returned"]]
    if never and count > 100 * len(FUNCTIONS):
        print(f"never returned: {', '.join(never)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(tools.fuzz.__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    parser.add_argument("--right", action="store_true", help="no wrong arguments")
    parser.add_argument("--verbose", action="store_true", help="print every call")
    parser.add_argument("--progress", type=Path, help=argparse.SUPPRESS)  # in the child
    options = parser.parse_args()
    if options.progress:
        run_calls(options)
        return 0
    with tempfile.NamedTemporaryFile() as progress:
        progress.write(bytes(8))
        progress.flush()
        command = [sys.executable, "-m", "tools.fuzz", *sys.argv[1:], "--progress", progress.name]
        return watch(subprocess.Popen(command, cwd=ROOT), Path(progress.name), options)


def watch(process: subprocess.Popen, progress: Path, options: argparse.Namespace) -> int:
    """Wait for the process that makes the calls; return its exit code."""
    number, since = -1, time.monotonic()
    while True:
        try:
            code = process.wait(1.0)
            break
        except subprocess.TimeoutExpired:
            pass
        present = int.from_bytes(progress.read_bytes(), "little")
        if present != number:
            number, since = present, time.monotonic()
        elif time.monotonic() - since > LIMIT_S:
            process.send_signal(6)  # its stack goes to stderr
            code = process.wait()
            print(f"a call did not end within {LIMIT_S:g} s")
            break
    if code:
        number = int.from_bytes(progress.read_bytes(), "little")
        name = FUNCTIONS[number % len(FUNCTIONS)][0].__name__
        print(f"call {number} of seed {options.seed} ({name}) ended the process, code {code}:")
        print(
            f"    python -m tools.fuzz --seed {options.seed} --first {number} --calls 1 --verbose"
        )
    return code


if __name__ == "__main__":
    sys.exit(main())
