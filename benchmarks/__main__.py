import argparse
import importlib
import json
import pkgutil
import sys
from pathlib import Path

import torch

import benchmarks
from benchmarks._bench import Bench, versions
from benchmarks.isa import LIMITS, limit_isa


def main() -> int:
    modules = (module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    names = sorted(name for name in modules if not name.startswith("_") and name != "isa")
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=benchmarks.__doc__)
    parser.add_argument("op", nargs="*", choices=[[], *names], help=", ".join(names))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="small shapes, to test that it runs")
    parser.add_argument("--isa", choices=list(LIMITS), help="limit the CPU instruction set")
    arguments = parser.parse_args()
    if arguments.isa:
        limit_isa(arguments.isa)
    bench = Bench(arguments.device, arguments.quick)
    print(f"# {bench.device_name}, {bench.isa}  {versions()}")
    for name in arguments.op or names:
        importlib.import_module(f"benchmarks.{name}").run(bench)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        document = {"device": bench.device_name, "isa": bench.isa, **versions(), "rows": bench.rows}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
