"""Count the code that a default GRPO job runs through: `python -m tools.step_statements`.

Two steps of the demo's configuration, on two ranks, under coverage. Statements inside functions of
`hybridengine` count once, whichever process ran them; imports and definitions do not count.
`--by file` and `--by function` list them more finely.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hybridengine"
CONFIG = "examples/demo/config.yaml"
START = "import coverage\ncoverage.process_startup()\n"


def run_job(folder: Path) -> coverage.Coverage:
    """Run the job; return what all its processes ran."""
    settings = folder / "coveragerc"
    settings.write_text(
        f"[run]\nparallel = True\nsigterm = True\nsource = {PACKAGE}\n"
        f"data_file = {folder / 'coverage'}\n"
    )
    (folder / "sitecustomize.py").write_text(START)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"COVERAGE_PROCESS_START": str(settings), "PYTHONPATH": os.pathsep.join(paths)}
    steps = ["trainer.total_training_steps=2", f"trainer.default_local_dir={folder / 'run'}"]
    command = [sys.executable, "-m", "hybridengine", "grpo", CONFIG, *steps]
    subprocess.run([sys.executable, "examples/demo/prepare.py"], cwd=ROOT, check=True)
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True)
    measured = coverage.Coverage(config_file=str(settings))
    measured.combine()
    return measured


def functions_of(file: Path) -> dict[int, str]:
    """Return the lines inside the bodies of functions, each with its innermost function."""
    found = dict[int, str]()

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = name
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}".lstrip(".")
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                end = child.end_lineno or child.lineno
                found.update(dict.fromkeys(range(child.body[0].lineno, end + 1), inner))
            visit(child, inner)

    visit(ast.parse(file.read_text()), "")
    return found


def main() -> None:
    """Print statements and files per package, file or function, and their sums."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--by", choices=("package", "file", "function"), default="package")
    by = parser.parse_args().by
    statements: Counter[str] = Counter()
    files: dict[str, set[str]] = defaultdict(set)
    with tempfile.TemporaryDirectory() as folder:
        measured = run_job(Path(folder))
        for name in measured.get_data().measured_files():
            _, all_lines, _, missing, _ = measured.analysis2(name)
            file, functions = str(Path(name).relative_to(PACKAGE)), functions_of(Path(name))
            names = {"package": Path(file).parts[0].removesuffix(".py"), "file": file}
            for line in (set(all_lines) - set(missing)) & functions.keys():
                group = names.get(by, f"{file}:{functions[line]}")
                statements[group] += 1
                files[group].add(file)
    width = max(map(len, statements))
    for group, number in statements.most_common():
        print(f"{group:{width}} {number:6,} statements in {len(files[group]):3} files")
    total = len(set[str]().union(*files.values()))
    print(f"{'all':{width}} {statements.total():6,} statements in {total:3} files")


if __name__ == "__main__":
    main()
