"""Run the weight sync inside other trainers: python -m tools.trainers [verl trl ...]

Every part runs in a process of its own, in the folder .cache/trainers/PART. Its results go into
benchmarks/results/trainers.json under its name; those of other parts stay as they are.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tools.trainers

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".cache" / "trainers"
RESULTS = ROOT / "benchmarks" / "results" / "trainers.json"


def main() -> int:
    names = parts()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(names)}; default all")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--in-process", action="store_true", help="one part, in this process")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected {', '.join(names)}")
    if options.in_process:
        (name,) = options.parts
        options.json.write_text(json.dumps(run_here(name)))
        return 0
    failed = [name for name in options.parts or names if not run(name, options.json)]
    for name in failed:
        print(f"tools.trainers: {name} failed", file=sys.stderr)
    return bool(failed)


def parts() -> list[str]:
    """Return the names of the modules of this package that have `run`."""
    names = [m.name for m in pkgutil.iter_modules(tools.trainers.__path__) if m.name[0] != "_"]
    return [name for name in names if hasattr(_module(name), "run")]


def run(name: str, results: Path) -> bool:
    """Run one part in a process of its own and store its results; tell whether it passed."""
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary, "results.json")
        command = [sys.executable, "-m", "tools.trainers", "--in-process", f"--json={file}", name]
        passed = not subprocess.run(command, cwd=ROOT).returncode
        if passed:
            store(results, name, json.loads(file.read_text()))
    print(f"{name}: {'passed' if passed else 'failed'}", flush=True)
    return passed


def store(results: Path, name: str, found: object) -> None:
    """Write what was found under a name; the results of other names stay as they are."""
    rows = json.loads(results.read_text()) if results.is_file() else {}
    rows[name] = found
    results.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")


def run_here(name: str) -> dict[str, object]:
    """Run one part in this process; return its results."""
    folder = CACHE / name
    folder.mkdir(parents=True, exist_ok=True)
    return _module(name).run(folder)


def _module(name: str) -> Any:
    return importlib.import_module(f"tools.trainers.{name}")


if __name__ == "__main__":
    sys.exit(main())
