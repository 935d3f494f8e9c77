"""Worker processes that run reward functions, where they can be stopped.

A function that hangs, exits or crashes takes its worker with it, never the rank. Workers are new
processes (no fork of a process with threads, CUDA or collectives) that import the standard library
and the user's files. A worker that is lost is replaced at the next call.
"""

from __future__ import annotations

import os
import pickle
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any

from hybridengine.reward_worker import ARGUMENTS, FunctionSource, RewardError, reward_file
from hybridengine.reward_worker.main import Fault

__all__ = ["CallError", "RewardFunction", "RewardWorkers", "load_reward_function"]

_LOAD_S = 60.0  # at least, for a worker to start and import the user's file
_POLL_S = 0.5  # between checks that a worker still runs
_STACK_S = 1.0  # for a worker to write its stack
_STOP_S = 2.0  # for workers to end by themselves
_MAIN = (
    "import sys; sys.path[:] = {path!r}\n"
    "from hybridengine.reward_worker.main import main; main{arguments!r}"
)


class CallError(RewardError):
    """Call number `index` of a function (None: the one of all) did not end with a result.

    is_complete: the text is a sentence of its own; else it goes on from the function's name.
    """

    def __init__(self, text: str, index: int | None, is_complete: bool = False) -> None:
        super().__init__(text)
        self.index, self.is_complete = index, is_complete


@dataclass(frozen=True)
class RewardFunction:
    """A user's function, loaded in `workers`."""

    source: FunctionSource
    key: int
    workers: RewardWorkers = field(repr=False)

    def __str__(self) -> str:
        return str(self.source)

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def label(self) -> str:
        """What its score is called next to those of other functions."""
        return self.source.label


def load_reward_function(
    path: str | Path,
    name: str = "compute_score",
    arguments: Sequence[str] = ARGUMENTS,
    workers: RewardWorkers | None = None,
) -> RewardFunction:
    """Load `name` from the file `path` and check that it takes `arguments`, as verl calls it.

    path: a Python file, or a built-in rule ("math_verify", "gsm8k", "data_source"); workers: where
    it runs, by default workers of its own.

    Raises RewardError for a missing file, one that fails to import or hangs in doing so, a missing
    function, and a signature that does not take the arguments by name.
    """
    return (workers or RewardWorkers()).load(path, name, arguments)


class RewardWorkers:
    """Up to `num_workers` processes that hold every function loaded here.

    Response i is scored by worker i % num_workers, in order, so that what a function keeps between
    calls does not depend on timing. Coroutine functions run together, in one worker's event loop.

    num_workers: None is the cores of this machine over its ranks; timeout_s: for one call.
    """

    def __init__(self, num_workers: int | None = None, timeout_s: float = 60.0) -> None:
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self._num_workers, self._timeout_s = num_workers or max(1, cores), timeout_s
        self._threads = max(1, cores // self._num_workers)
        self._requests: list[tuple[Any, ...]] = []  # what every worker has to load
        self._workers: dict[int, _Worker] = {}
        self._finalizer = weakref.finalize(self, _stop, self._workers, os.getpid())

    def load(self, path: str | Path, name: str, arguments: Sequence[str]) -> RewardFunction:
        """As `load_reward_function`."""
        reward_file(path)
        key = len(self._requests)
        self._requests.append((str(path), name, tuple(arguments)))
        try:
            self._start([0])
        except RewardError:
            self._requests.pop()
            raise
        return RewardFunction(self._workers[0].loaded[key], key, self)

    def call(
        self, function: RewardFunction, calls: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, float]]:
        """Call `function` once with each of `calls`; returns "score" and further numbers of each.

        Raises CallError for a call that raises, takes longer than `timeout_s`, ends its process or
        gives no numbers.
        """
        used = 1 if function.source.is_async else min(self._num_workers, len(calls))
        work = {k: range(k, len(calls), used) for k in range(used)}
        requests = {k: ("call", function.key, [calls[i] for i in work[k]]) for k in work}
        results = self._run(function, work, requests)
        return [results[i] for i in range(len(calls))]

    def call_batch(
        self, function: RewardFunction, columns: Mapping[str, Sequence[Any]], size: int
    ) -> list[dict[str, float]]:
        """As `call`, in one call with lists of `size` values each."""
        request = ("batch", function.key, columns, size)
        try:
            results: list[Any] = self._run(function, {0: range(1)}, {0: request})[0]
        except CallError as error:
            raise CallError(str(error), None, error.is_complete) from None
        for i, result in enumerate(results):
            if isinstance(result, Fault):
                raise CallError(result.text, i)
        return results

    def close(self) -> None:
        """End all workers."""
        self._finalizer()

    def _start(self, wanted: Collection[int]) -> None:
        """Start the workers `wanted` that do not run, and load what they have not loaded yet."""
        for k in wanted:
            if k in self._workers and not self._workers[k].is_running:
                self._workers.pop(k).kill()
            if k not in self._workers:
                self._workers[k] = _Worker(k, self._threads)
        starting = [self._workers[k] for k in wanted]
        limit = max(_LOAD_S, self._timeout_s)
        file = Path()
        try:
            for worker in starting:  # they import at the same time
                for key in range(len(worker.loaded), len(self._requests)):
                    worker.send(("load", key, *self._requests[key]), limit)
            for worker in starting:
                while len(worker.loaded) < len(self._requests):
                    file = reward_file(self._requests[len(worker.loaded)][0])
                    source = worker.receive(file)
                    if isinstance(source, Fault):
                        raise RewardError(source.text)
                    worker.loaded.append(source)
                    worker.expect(limit)
        except _Lost as lost:
            how = f"takes longer than {limit:g} s to import" if lost.is_late else lost.how
            when = "" if lost.is_late else " while it was imported"
            raise RewardError(f"reward file {lost.where or file} {how}{when}") from None
        finally:
            if any(len(worker.loaded) < len(self._requests) for worker in starting):
                self._kill()

    def _run(
        self,
        function: RewardFunction,
        work: Mapping[int, Sequence[int]],
        requests: Mapping[int, tuple[Any, ...]],
    ) -> dict[int, Any]:
        """Send `requests` and return the outcome of every index of `work`; both are by worker."""
        self._start(work)
        source, limit, results = function.source, self._timeout_s, dict[int, Any]()
        late = f"gave no result within reward.timeout_s = {limit:g} s"
        pending = {self._workers[k]: list(indices) for k, indices in work.items()}
        worker = next(iter(pending), None)
        try:
            for k, request in requests.items():
                worker = self._workers[k]
                worker.send(request, limit)
            while pending:
                soonest = min(w.deadline for w in pending) - time.monotonic()
                wait([w.connection for w in pending], min(_POLL_S, max(0.0, soonest)))
                for worker in list(pending):
                    while pending[worker] and (message := worker.poll(source.file)) is not None:
                        number, seconds, outcome = message
                        index = work[worker.index][number]
                        pending[worker].remove(index)
                        if seconds > limit:
                            raise CallError(f"{late} at {source.file}:{source.line}", index)
                        if isinstance(outcome, Fault):
                            raise CallError(outcome.text, index, outcome.is_complete)
                        results[index] = outcome
                        if not source.is_async:  # all async calls began at once
                            worker.expect(limit)
                    if not pending[worker]:
                        del pending[worker]
        except _Lost as lost:
            assert worker is not None
            where = lost.where or f"{source.file}:{source.line}"
            text = f"{late if lost.is_late else lost.how} at {where}"
            raise CallError(text, pending[worker][0]) from None
        finally:
            if pending:  # replies to come would be taken for those of the next call
                self._kill()
        return results

    def _kill(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        self._workers.clear()


class _Lost(Exception):
    """A worker that ended, or has not replied in time."""

    def __init__(self, how: str, where: str = "", is_late: bool = False) -> None:
        super().__init__(how)
        self.how, self.where, self.is_late = how, where, is_late


class _Worker:
    """One process and the connection to it.

    loaded: the functions it holds; deadline: of its next reply.
    """

    def __init__(self, index: int, threads: int) -> None:
        self.index, self.loaded = index, list[FunctionSource]()
        self.deadline = time.monotonic()
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115, closed in kill()
        self.connection, theirs = Pipe()
        arguments = (theirs.fileno(), self._stack.fileno(), os.getpid(), index)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MAIN.format(path=sys.path, arguments=arguments)],
            stdin=subprocess.DEVNULL,
            pass_fds=arguments[:2],
            start_new_session=True,  # Ctrl-C is for the rank; and its children end with it
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        theirs.close()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def expect(self, limit_s: float) -> None:
        """The next reply has `limit_s` from now."""
        self.deadline = time.monotonic() + limit_s

    def send(self, request: tuple[Any, ...], limit_s: float) -> None:
        self.expect(limit_s)
        with socket.socket(fileno=os.dup(self.connection.fileno())) as end:
            timeval = struct.pack("ll", int(limit_s) + 1, 0)  # a worker that does not read
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        try:
            self.connection.send(request)
        except BlockingIOError:
            raise _Lost("does not read what it is sent", is_late=True) from None
        except OSError:
            raise self._lost() from None

    def receive(self, file: Path) -> Any:
        """Wait for the next reply; _Lost where there is none in time."""
        while (message := self.poll(file)) is None:
            wait([self.connection], _POLL_S)
        return message

    def poll(self, file: Path) -> Any:
        """Return the next reply, or None where there is none yet; file: whose lines are named."""
        ended = not self.is_running  # before the look for what it sent last
        try:
            if self.connection.poll():
                return self.connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            raise self._lost() from None
        if ended:
            raise self._lost()
        if time.monotonic() > self.deadline:
            raise _Lost("gave no reply", self._where(file), is_late=True)
        return None

    def _lost(self) -> _Lost:
        try:
            code = self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            return _Lost("closed the connection of its process")
        if code < 0:
            return _Lost(f"had its process killed by {signal.Signals(-code).name}")
        return _Lost(f"ended its process with exit code {code}")

    def _where(self, file: Path) -> str:
        """`file:line` where the process is, or "" where it does not answer."""
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)
        deadline, line = time.monotonic() + _STACK_S, re.compile(r'File "(.+)", line (\d+) in ')
        while time.monotonic() < deadline:
            time.sleep(_STACK_S / 20)
            self._stack.seek(0)
            frames = line.findall(self._stack.read().decode(errors="replace"))
            if own := [number for name, number in frames if name == str(file)]:
                return f"{file}:{own[0]}"
        return ""

    def kill(self) -> None:
        """End the process and those it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()
        self._stack.close()

    def stop(self, deadline: float) -> None:
        """Let the process end by itself until `deadline`, then kill it."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()


def _stop(workers: dict[int, _Worker], owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the process they belong to
    for worker in workers.values():
        worker.connection.close()  # which it takes as the end
    deadline = time.monotonic() + _STOP_S
    for worker in workers.values():
        worker.stop(deadline)
    workers.clear()
