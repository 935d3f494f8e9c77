"""Count the code that a default GRPO job runs through: `python -m tools.step_statements`.

Two steps of the demo's configuration, on two ranks, under coverage. Statements inside functions of
`hybridengine` count once, whichever process ran them; imports and definitions do not count.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
from collections import Counter
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


def lines_of_functions(file: Path) -> set[int]:
    """Return the lines inside the bodies of functions."""
    functions = (
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {
        line for f in functions for line in range(f.body[0].lineno, (f.end_lineno or f.lineno) + 1)
    }


def main() -> None:
    """Print statements and files per package, and their sums."""
    statements: Counter[str] = Counter()
    files: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        measured = run_job(Path(folder))
        for name in measured.get_data().measured_files():
            _, all_lines, _, missing, _ = measured.analysis2(name)
            ran = (set(all_lines) - set(missing)) & lines_of_functions(Path(name))
            if ran:
                package = Path(name).relative_to(PACKAGE).parts[0].removesuffix(".py")
                statements[package] += len(ran)
                files[package] += 1
    for package, number in statements.most_common():
        print(f"{package:20} {number:6,} statements in {files[package]:3} files")
    print(f"{'all':20} {statements.total():6,} statements in {files.total():3} files")


if __name__ == "__main__":
    main()
