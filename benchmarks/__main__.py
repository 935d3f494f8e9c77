import argparse
import importlib
import pkgutil
import sys
import time
import traceback
from pathlib import Path

import torch

import benchmarks
from benchmarks._bench import Bench, OutOfTime, versions
from benchmarks.isa import LIMITS, limit_isa


def main() -> int:
    modules = (module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    names = sorted(name for name in modules if not name.startswith("_") and name != "isa")
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=benchmarks.__doc__)
    parser.add_argument("op", nargs="*", choices=[[], *names], help=", ".join(names))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the rows that FILE has of this commit and device, and run the others",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="small shapes, to test that it runs")
    parser.add_argument(
        "--transport",
        choices=["ipc"],
        help="of reshard: to engines in other processes of the same devices",
    )
    parser.add_argument("--impl", help="regular expression of the baselines to run")
    parser.add_argument(
        "--op-limit-s",
        type=float,
        default=float("inf"),
        help="of a benchmark, unless --quick",
    )
    parser.add_argument("--isa", choices=list(LIMITS), help="limit the CPU instruction set")
    arguments = parser.parse_args()
    if arguments.transport and arguments.op != ["reshard"]:
        parser.error(f"--transport: got {arguments.op or 'all benchmarks'}, expected reshard alone")
    if arguments.isa:
        limit_isa(arguments.isa)
    bench = Bench(arguments.device, arguments.quick, arguments.transport)
    bench.impl = arguments.impl
    if not arguments.quick:
        bench.op_limit_s = arguments.op_limit_s
    print(f"# {bench.device_name}, {bench.isa}  {versions()}")
    if arguments.json:
        header = {"device": bench.device_name, "isa": bench.isa, **versions()}
        bench.results.open(arguments.json, header, arguments.resume)
    failed = [
        name
        for name in arguments.op or names
        if name not in bench.results.finished and not run(bench, name)
    ]
    if failed:
        print(f"benchmarks that raised an error: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(bench: Bench, name: str) -> bool:
    """Run one benchmark; return whether it ran to its end. An error does not stop the others."""
    bench.log_state(name, "before")
    bench.op_end = time.monotonic() + bench.op_limit_s
    try:
        importlib.import_module(f"benchmarks.{name}").run(bench)
    except OutOfTime:
        print(f"# {name}: the rows after {bench.op_limit_s:g} s are left out", flush=True)
    except Exception:
        traceback.print_exc()
        return False
    bench.log_state(name, "after")
    bench.results.finished.append(name)
    bench.results.save()
    return True


if __name__ == "__main__":
    sys.exit(main())
