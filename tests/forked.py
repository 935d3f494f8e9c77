"""`python -m MODULE ...` in forks of the server of `tests.ranks`, without its 8 s of imports.

    run = run_forked([sys.executable, "-m", "hybridengine", "grpo", *settings])
    assert run.returncode == 0, run.stdout + run.stderr

The command has its own session, environment and output, and so have the ranks that its launcher
starts: forks of the same server, which has imported and done nothing else.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.ranks import Server, server_of

__all__ = ["ForkedProcess", "run_forked"]


class ForkedProcess:
    """A command in a fork, with what the tests and torch's launcher use of `subprocess.Popen`.

    command: sys.executable, "-m", module, arguments.
    uses_vllm: whether the fork, or a rank that it starts, has an engine of vLLM.
    server: the process that forks, if it is none of `tests.ranks`.
    """

    def __init__(
        self,
        command: Sequence[object],
        *,
        uses_vllm: bool = False,
        env: Mapping[str, str] | None = None,
        server: Server | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="forked-")
        files = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        self._files = files
        process = _new_process(command, os.environ if env is None else env, files)
        (server or server_of(uses_vllm)).start(process)
        self._begin(process)

    def _begin(self, process: Any) -> None:
        self._process, self.pid = process, process.pid
        process.begun.recv()  # it has its session: it can be killed with all of this

    @classmethod
    def of_rank(cls, command: Sequence[str], env: Mapping[str, str]) -> ForkedProcess:
        """Start a rank from its launcher, which is a fork of the server itself."""
        self = cls.__new__(cls)
        process = _new_process(command, env, _files_here)
        with patch.object(forkserver._forkserver, "ensure_running", lambda: None):
            process.start()
        self._begin(process)
        return self

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end; return what the command and its ranks wrote to stdout and stderr."""
        self.wait(timeout)
        return self.output()

    def output(self) -> tuple[str, str]:
        """What the command and its ranks have written to stdout and stderr so far."""
        stdout, stderr = (file.read_text() for file in self._files)
        return stdout, stderr

    def kill_all(self) -> None:
        """Kill the processes of the session of the command."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.wait()


def run_forked(
    command: Sequence[object],
    *,
    uses_vllm: bool = False,
    env: Mapping[str, str] | None = None,
    server: Server | None = None,
    timeout: float = 300.0,
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` with its output captured, in a `ForkedProcess`."""
    process = ForkedProcess(command, uses_vllm=uses_vllm, env=env, server=server)
    try:
        output = process.communicate(timeout)
    finally:
        process.kill_all()
    return subprocess.CompletedProcess([*map(str, command)], process.wait(), *output)


_files_here: Sequence[Path] = ()  # of a fork: its output


def _new_process(
    command: Sequence[object], environment: Mapping[str, str], files: Sequence[Path]
) -> Any:
    python, *options = map(str, command)
    option, *arguments = options[options[0] == "-u" :]  # torchrun's
    assert (python, option) == (sys.executable, "-m"), command
    context: Any = multiprocessing.get_context("forkserver")
    begun, begin = context.Pipe(duplex=False)
    arguments_of_fork = (arguments, dict(environment), os.getcwd(), files, begin)
    process = context.Process(target=_main, args=arguments_of_fork, name=arguments[0])
    process.begun = begun
    return process


def _main(
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    files: Sequence[Path],
    begin: Connection,
) -> None:
    global _files_here
    gc.freeze()  # what the server imported stays
    os.setsid()
    for number, file in enumerate(files, start=1):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, number)
        os.close(descriptor)
    _files_here = files
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    begin.send(None)
    begin.close()
    sys.argv = arguments
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    def start_rank(args: Sequence[str], env: Mapping[str, str], **options: Any) -> ForkedProcess:
        assert options == {"stdout": None, "stderr": None, "start_new_session": True}, options
        return ForkedProcess.of_rank(args, env)

    kill_group = os.killpg

    def kill_rank(pid: int, number: int) -> None:
        with suppress(ProcessLookupError):  # the server has reaped it; Popen would have kept it
            kill_group(pid, number)

    popen = patch.object(subprocess_handler, "Popen", start_rank)
    try:
        with popen, patch.object(os, "killpg", kill_rank):
            runpy.run_module(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out
