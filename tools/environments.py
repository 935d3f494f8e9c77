"""Environments of other packages' releases over the packages of .venv."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["overlay", "run_logged"]


def overlay(folder: Path, requirements: Sequence[str], startup: str = "") -> Path:
    """Make the environment `folder`/venv, unless it is there; return its interpreter.

    requirements: pinned, installed without their dependencies, which .venv has, whichever Python
    they ask for.
    startup: a line that every process of the environment executes first.
    """
    python = folder / "venv" / "bin" / "python"
    stamp = folder / "requirements.txt"
    wanted = "\n".join([*requirements, startup])
    if not (python.is_file() and stamp.is_file() and stamp.read_text() == wanted):
        shutil.rmtree(folder / "venv", ignore_errors=True)
        _call(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        paths = [path for path in sys.path if path.endswith("site-packages")]
        lines = [f"import site; site.addsitedir({path!r})" for path in paths]
        (site / "zz_base.pth").write_text("\n".join([*lines, startup, ""]))
        pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps")
        if requirements:
            _call(*pip, "--ignore-installed", "--ignore-requires-python", *requirements)
        stamp.write_text(wanted)
    return python


def run_logged(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    log: Path,
    timeout_s: float,
) -> int:
    """Run a command in `folder`; its output goes to `log`. Return its exit status."""
    with log.open("w") as output:
        return subprocess.run(
            command,
            cwd=folder,
            env=environment,
            timeout=timeout_s,
            stdout=output,
            stderr=subprocess.STDOUT,
        ).returncode


def _call(*command: str) -> None:
    subprocess.run(command, check=True)
