"""What a laptop runs is run as printed, page by page; test_docs.py has the cheap form of each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hybridengine.remote.servers import VllmServer
from tests.docs.blocks import BLOCKS, ROOT, Block, Command, blocks_of, commands_of, pages_with
from tests.docs.commands import check, runs_here
from tests.docs.python_blocks import trains
from tests.extras.remote.vllm_server import ENTRY as SERVER
from tests.extras.remote.vllm_server import START_S
from tests.ports import free_port
from tests.ranks import message_of

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(3 * 3600)]

BIN = Path(sys.executable).parent
ENVIRONMENT = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}"}
PORT = "8000"  # on the page


def run(words: list[str], folder: Path, **variables: str) -> None:
    done = subprocess.run(
        words, cwd=folder, env=ENVIRONMENT | variables, text=True, capture_output=True
    )
    assert done.returncode == 0, (words, done.stdout[-3000:], done.stderr[-3000:])


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `.cache` that the demo's preparing command makes."""
    folder = tmp_path_factory.mktemp("prepared")
    run(["python", str(ROOT / "examples" / "demo" / "prepare.py")], folder)
    return folder / ".cache"


def jobs_of(page: str) -> list[Command]:
    """The commands of a page that a laptop runs."""
    blocks = (block for block in BLOCKS[page] if block.language == "bash")
    return [command for block in blocks for command in commands_of(block) if runs_here(command)]


def starts_a_job(command: Command) -> bool:
    return command.words[0] == "hybridengine" or "examples/" in " ".join(command.words)


PAGES = [page for page in pages_with("bash") if any(map(starts_a_job, jobs_of(page)))]


@pytest.mark.parametrize("page", PAGES)
def test_commands(page: str, checkout: Path, demo: Path) -> None:
    port = str(free_port())
    with servers_of(page, port, checkout, demo):
        for command in jobs_of(page):
            words = [word.replace(PORT, port) for word in command.words]
            if SERVER in words:
                continue
            check(command, demo) if command.words[0] == "make" else None
            if starts_a_job(command):
                run(words, checkout, **dict(v.split("=", 1) for v in command.variables))


@contextmanager
def servers_of(page: str, port: str, folder: Path, demo: Path) -> Iterator[None]:
    """Run the server of a page while its other commands run."""
    commands = [command for command in jobs_of(page) if SERVER in command.words]
    if not commands:
        yield
        return
    [command] = commands
    (folder / ".cache").symlink_to(demo)
    variables = dict(v.split("=", 1) for v in command.variables)
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [word.replace(PORT, port) for word in command.words],
            cwd=folder,
            env=ENVIRONMENT | variables,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        server, deadline = VllmServer(f"http://127.0.0.1:{port}", 0, 60.0), time.monotonic()
        deadline += START_S
        while "no error" not in message_of(server.check_health):
            assert process.poll() is None and time.monotonic() < deadline, (
                folder / "server.log"
            ).read_text()[-5000:]
            time.sleep(0.5)
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(
    "block", [b for p in pages_with("python") for b in blocks_of(p) if trains(b)], ids=str
)
def test_python(block: Block, checkout: Path, demo: Path) -> None:
    (checkout / ".cache").symlink_to(demo)
    run(["python", "-c", block.text], checkout)


def test_install(tmp_path: Path) -> None:
    """The lines of the README put a package that works into an empty environment."""
    subprocess.run(["git", "clone", "-q", ROOT, tmp_path / "hybridengine"], check=True)
    environment = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    path = {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}"}
    lines = [command for command in jobs_of("README.md") if command.words[0] == "pip"]
    assert len(lines) == 3
    for command in lines:
        run([*command.words], tmp_path / "hybridengine", **path)
    use = next(b for b in BLOCKS["README.md"] if b.language == "python")
    run(["python", "-c", use.text], tmp_path, **path)
    run(["hybridengine", "env"], tmp_path, **path)
