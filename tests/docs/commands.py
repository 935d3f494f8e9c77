"""Check a command of the documentation without running what takes long or cannot run here.

A job that runs on a laptop is checked by `--dry-run`, in a folder where the commands before it on
the page have made their files; one that needs more, by its configuration. Scripts have to exist and
to know their options.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import typer
from typer.testing import CliRunner

from hybridengine import cli
from hybridengine.run.config import JOBS, load_job
from tests.docs.blocks import ROOT, Command
from tests.extras.remote.vllm_server import ENTRY as SERVER
from tests.extras.remote.vllm_server import serving_options

__all__ = ["check", "runs_here"]

PYTHONS = re.compile(r"(.*/)?python3?$|torchrun$")
# Run by the test of the installation, or part of a shell.
FOUND_HERE = ("pip", "cd", "export", "mkdir", "mv", "pre-commit", "tar")


def runs_here(command: Command) -> bool:
    """Return whether a laptop runs it as printed."""
    return not command.needs


def check(command: Command, prepared: Path) -> None:
    """Raise AssertionError unless `command` is right, as far as that is known without running it.

    prepared: what the preparing commands of the demo make; copied here when one of them comes.
    """
    program, *words = command.words
    if program == "hybridengine":
        _check_job(command, words)
    elif program == "make":
        _check_make(words)
        if words == ["demo"]:
            _copy(prepared / "demo", ".cache/demo")
            _copy(prepared / "demo" / "smollm2-135m-instruct", "runs/demo/final")
    elif program == "vllm" or SERVER in words:
        options = words[words.index(SERVER) + 1 :] if SERVER in words else words[1:]
        on_cpu = runs_here(command)
        assert serving_options(options).enforce_eager == on_cpu, "a CPU needs --enforce-eager"
    elif PYTHONS.match(program) or program.endswith("pytest"):
        _check_script(words)
        if words[0].endswith("/prepare.py"):
            name = next((x for x in ("moe", "hybrid") if f"/{x}/" in words[0]), "demo")
            _copy(prepared / name, f".cache/{name}")
            if name != "demo":
                _copy(prepared / name / "model", f"runs/{name}/sft/final")
    elif "/" in program and not program.startswith("."):
        assert (ROOT / program).stat().st_mode & 0o111, f"{program} cannot be executed"
    else:
        assert Path(program).name in FOUND_HERE, f"nothing checks the program {program}"


def _copy(source: Path, target: str) -> None:
    if not Path(target).exists():
        shutil.copytree(source, target, symlinks=True)


def _check_job(command: Command, words: list[str]) -> None:
    group, rest = typer.main.get_command(cli.app), words
    while rest and (inner := getattr(group, "get_command", lambda *_: None)(None, rest[0])):
        group, rest = inner, rest[1:]
    group.make_context(words[0], list(rest))  # the options exist
    if words[0] == "tune":  # as the job that it would probe
        _check_job(command, words[1:])
        return
    if runs_here(command):
        dry = ["--dry-run"] if words[0] in ("grpo", "ppo", "sft") else []
        result = CliRunner().invoke(cli.app, [*words, *dry])
        assert result.exit_code == 0, (result.output, result.exception)
    elif words[0] in (*JOBS, "simulate"):
        settings = [w for w in rest if "=" in w]
        files = [w for w in rest if w.endswith(".yaml")]
        own = [w for w in files if (ROOT / w).is_file()]
        assert own or not any(w.startswith("examples/") for w in files), f"there is no {files}"
        required = () if own else ("model.path", "data.train_files")[: 1 + (words[0] != "simulate")]
        given = [w.split("=")[0] for w in settings]
        filled = [f"{key}=x" for key in required if key not in given]
        load_job(words[0], own[0] if own else None, [*filled, *settings])


def _check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_setting, _ = word.partition("=")
        line = rf"^{name} :=" if is_setting else rf"^{name}:.*## "
        assert re.search(line, makefile, re.MULTILINE), f"the Makefile has no {word}"


def _check_script(words: list[str]) -> None:
    """The script, module or test file exists; every option of a script is in its source."""
    words = [w for i, w in enumerate(words) if not _is_torchrun(words, i)]
    if "-m" in words[:1]:
        spec = importlib.util.find_spec(words[1])
        assert spec is not None and spec.origin, f"there is no module {words[1]}"
        if words[1] == "hybridengine":
            _check_job(Command("", 0, ("hybridengine", *words[2:]), needs="ranks"), words[2:])
            return
        source, options = Path(spec.origin).read_text(), words[2:]
    else:
        path = next(w for w in words if "/" in w or w.endswith(".py"))
        assert (ROOT / path).exists(), f"there is no {path}"
        source = (ROOT / path).read_text() if path.endswith(".py") else ""
        options = [] if path.startswith(("tests/", "setup.py")) else words[1:]
    for option in options:
        assert not option.startswith("--") or f'"{option}"' in source, f"{words} has no {option}"


def _is_torchrun(words: list[str], i: int) -> bool:
    """Whether word i is an option of torchrun, or its value."""
    options = ("--nproc-per-node", "--max-restarts", "--nnodes")
    return words[i] in ("--standalone", *options) or (i > 0 and words[i - 1] in options)
