"""Worker processes that run reward functions, with time-outs.

A function that hangs, exits or crashes ends its worker, never the rank. Workers are new processes
(no fork of a process with threads, CUDA or collectives) that import the standard library and the
user's files. A failed worker is replaced at the next call.
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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any

from hybridengine.rewards.calls import Failure, late
from hybridengine.rewards.functions import BUILT_IN, CHECK, reward_file
from hybridengine.rewards.local import LocalFunctions, is_given
from hybridengine.rewards.worker_main import CPU_LIMIT_S, GIVEN_UP
from hybridengine.run.config import RewardConfig
from hybridengine.run.errors import RewardError, shorten
from hybridengine.train.data import PromptSample
from hybridengine.train.rewards.function import (
    ARGUMENTS,
    TIMED_OUT,
    CallError,
    FunctionSource,
    Results,
    RewardFunction,
)
from hybridengine.train.rewards.manager import score_responses

LOAD_S = 60.0  # at least, to start a worker and import the user's file
_POLL_S = 0.5  # between checks whether a worker still runs
_STACK_S = 1.0  # limit for a worker to write its stack
STOP_S = 2.0  # limit for workers to end by themselves
_KILL_S = 10.0  # limit for a guard to end all processes of its worker
_CHECKED_AT_ONCE = 1000  # ground truths
# Of a rule: too much CPU time, recursion or memory.
_LIMIT_SIGNALS = (signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT)
PROGRAM = (
    "import sys; sys.path[:] = {path!r}\n"
    "from hybridengine.rewards.worker_main import main; main{arguments!r}"
)


def cores_of_rank() -> int:
    """Return the share of this machine's cores that a rank has, at least 1."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


class RewardWorkers:
    """Up to `num_workers` processes, each with every function loaded here.

    Worker i % num_workers scores response i, in order: the state that a function keeps between
    calls does not depend on timing. Calls of a coroutine function run concurrently in one worker.

    num_workers: None is cores / ranks of this machine.
    timeout_s: limit of one call.
    """

    def __init__(self, num_workers: int | None = None, timeout_s: float = 60.0) -> None:
        cores = cores_of_rank()
        self._num_workers, self._timeout_s = num_workers or cores, timeout_s
        self._threads = max(1, cores // self._num_workers)
        self._local = LocalFunctions(timeout_s)
        self._requests: list[tuple[Any, ...]] = []  # to load in every worker
        self._workers: dict[int, Worker] = {}
        self._finalizer = weakref.finalize(self, _stop, self._workers, os.getpid())

    @classmethod
    def of(cls, reward: RewardConfig) -> RewardWorkers:
        return cls(reward.num_workers, reward.timeout_s)

    def load(
        self, path: str | Path, name: str = "compute_score", arguments: Sequence[str] = ARGUMENTS
    ) -> RewardFunction:
        """Load `name` from the file `path` and check that it takes `arguments`, as verl calls it.

        path: a Python file, or a built-in rule ("math_verify", "gsm8k", "turn_rewards", …); a
          function given from Python is loaded, and called, by `LocalFunctions`.

        Raises RewardError for a missing file, one that fails or hangs while it is imported, a
        missing function, and a signature that does not take the arguments by name.
        """
        if is_given(path):
            return self._local.load(path, name, arguments)
        reward_file(path)
        key = len(self._requests)
        self._requests.append((str(path), name, tuple(arguments)))
        try:
            self._start([0])
        except RewardError:
            self._requests.pop()
            raise
        function = RewardFunction(self._workers[0].loaded[key], key, self, arguments)
        if not hasattr(BUILT_IN.get(str(path)), CHECK):
            return function
        return replace(function, check_rows=partial(self._check_ground_truths, str(path)))

    def call(
        self, function: RewardFunction, columns: Mapping[str, Sequence[Any]], size: int
    ) -> list[Results]:
        """Call `function` on `size` responses; return its results (`to_results`).

        columns: its arguments, a value for each response. Raises CallError for a call that raises,
        exceeds `timeout_s`, ends its process or has no valid result. A built-in rule that exceeds
        `timeout_s` or limits of its own has the score 0, and TIMED_OUT is 1.
        """
        is_one_call = function.takes_lists or function.source.is_async
        used = 1 if is_one_call else min(self._num_workers, size)
        results = self._run(function, columns, {k: range(k, size, used) for k in range(used)})
        counts: Results = {TIMED_OUT: 0.0} if function.source.rule else {}
        return [{**counts, **results[i]} for i in range(size)]

    def _check_ground_truths(self, rule: str, samples: Iterable[PromptSample]) -> None:
        """Raise RewardError for a ground truth for which no response can be right.

        Every different one is checked once.
        """
        check, different = self.load(rule, CHECK), _different(samples)
        while chunk := list(islice(different, _CHECKED_AT_ONCE)):
            result = score_responses(check, chunk, [""] * len(chunk))
            late = [s for s, x in zip(chunk, result.counts[TIMED_OUT], strict=True) if x]
            if late:
                raise RewardError(
                    f"reward_model.ground_truth is {shorten(repr(late[0].ground_truth), 300)} in "
                    f"row {late[0].index} of the data (from 0), for which its rule needs more than "
                    f"{CPU_LIMIT_S:g} s of CPU time or 2 GiB of memory: no response could be "
                    "right. Correct the row"
                )

    def close(self) -> None:
        """End all workers."""
        self._finalizer()

    def _start(self, indices: Collection[int]) -> None:
        """Start those workers of `indices` that do not run; load missing functions."""
        for k in indices:
            if k in self._workers and self._workers[k].has_ended():
                self._workers.pop(k).kill()
            if k not in self._workers:
                self._workers[k] = Worker(k, self._threads)
        starting = [self._workers[k] for k in indices]
        limit, file = max(LOAD_S, self._timeout_s), Path()
        try:
            for worker in starting:  # they import at the same time
                for key in range(len(worker.loaded), len(self._requests)):
                    worker.send(("load", key, *self._requests[key]), limit)
            for worker in starting:
                while len(worker.loaded) < len(self._requests):
                    file = reward_file(self._requests[len(worker.loaded)][0])
                    while (source := worker.poll(file)) is None:
                        wait([worker.connection], _POLL_S)
                    if isinstance(source, Failure):
                        raise RewardError(source.message)
                    worker.loaded.append(source)
                    worker.set_deadline(limit)
        except WorkerError as error:
            what = f"{error.reason} while it was imported"
            if error.timed_out:
                what = f"takes longer than {limit:g} s to import"
            raise RewardError(f"reward file {error.where or file} {what}") from None
        finally:
            if any(len(worker.loaded) < len(self._requests) for worker in starting):
                self._kill()

    def _run(
        self,
        function: RewardFunction,
        columns: Mapping[str, Sequence[Any]],
        work: Mapping[int, Sequence[int]],
    ) -> dict[int, Results]:
        """Return the results of all responses; work: by worker, the numbers of its responses."""
        self._start(work)
        source, limit, results = function.source, self._timeout_s, dict[int, Results]()
        line = f"{source.file}:{source.line}"
        sent, pending = dict[Worker, Sequence[int]](), dict[Worker, list[int]]()
        worker: Worker | None = None

        def send(worker: Worker, indices: Sequence[int]) -> None:
            sent[worker], pending[worker] = indices, list(indices)
            own = {name: [column[i] for i in indices] for name, column in columns.items()}
            worker.send(("call", function.key, own, len(indices), function.takes_lists), limit)

        try:
            for k, indices in work.items():
                worker = self._workers[k]
                send(worker, indices)
            while pending:
                soonest = min(w.deadline for w in pending) - time.monotonic()
                wait([w.connection for w in pending], min(_POLL_S, max(0.0, soonest)))
                for worker in list(pending):
                    try:
                        while pending[worker] and (reply := worker.poll(source.file)) is not None:
                            number, seconds, outcome = reply
                            index = None if number is None else sent[worker][number]
                            if seconds > limit and not source.rule:
                                raise late(function, limit, line, index)
                            if isinstance(outcome, Failure):
                                raise CallError(outcome.message, index)
                            assert index is not None  # only a failure has no number
                            pending[worker].remove(index)
                            results[index] = outcome
                            if not source.is_async:  # async calls all started together
                                worker.set_deadline(limit)
                    except WorkerError as error:
                        if not (source.rule and error.is_limit):
                            raise
                        results[pending[worker].pop(0)] = GIVEN_UP
                        rest, k = pending.pop(worker), worker.index
                        worker.kill()
                        if rest:
                            self._start([k])
                            worker = self._workers[k]
                            send(worker, rest)
                    else:
                        if not pending[worker]:
                            del pending[worker]
        except WorkerError as error:
            assert worker is not None
            where, index = error.where or line, pending[worker][0]
            if error.timed_out:
                raise late(function, limit, where, index) from None
            what = f"reward function {source.name} {error.reason} at {where}"
            raise CallError(what, None if function.takes_lists else index) from None
        finally:
            if pending:  # late replies would be taken for those of the next call
                self._kill()
        return results

    def _kill(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        self._workers.clear()


def _different(samples: Iterable[PromptSample]) -> Iterator[PromptSample]:
    """Yield the first sample with each ground truth of a data source."""
    seen = set[tuple[str, str]]()
    for sample in samples:
        key = sample.data_source, repr(sample.ground_truth)
        if key not in seen:
            seen.add(key)
            yield sample


class WorkerError(Exception):
    """A worker ended, or did not reply in time.

    where: `file:line` of the running call.
    is_limit: whether the call took too long, or too much CPU time, recursion or memory.
    """

    def __init__(
        self, reason: str, where: str = "", timed_out: bool = False, is_limit: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason, self.where, self.timed_out = reason, where, timed_out
        self.is_limit = is_limit or timed_out


class Worker:
    """One process and the connection to it.

    loaded: its functions; deadline: of its next reply.
    """

    def __init__(self, index: int, threads: int) -> None:
        self.index, self.loaded = index, list[FunctionSource]()
        self.deadline = time.monotonic()
        self._stack = tempfile.TemporaryFile()  # noqa: SIM115, closed in kill()
        self.connection, theirs = Pipe()
        arguments = (theirs.fileno(), self._stack.fileno(), os.getpid(), index)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(path=sys.path, arguments=arguments)],
            stdin=subprocess.DEVNULL,
            pass_fds=arguments[:2],
            start_new_session=True,  # Ctrl-C reaches the rank only
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        theirs.close()

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self, seconds: float) -> None:
        """Wait until the process has ended, for at most `seconds`."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def set_deadline(self, limit_s: float) -> None:
        """Expect the next reply within `limit_s` from now."""
        self.deadline = time.monotonic() + limit_s

    def send(self, request: tuple[Any, ...], limit_s: float) -> None:
        self.set_deadline(limit_s)
        with socket.socket(fileno=os.dup(self.connection.fileno())) as end:
            timeval = struct.pack("ll", int(limit_s) + 1, 0)  # for a worker that does not read
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        try:
            self.connection.send(request)
        except BlockingIOError:
            raise WorkerError("does not read its requests", timed_out=True) from None
        except OSError:
            raise self._ended() from None

    def poll(self, file: Path) -> Any:
        """Return the next reply, None where there is none yet; file: of the line to report.

        Raises WorkerError where the process has ended, or has not replied in time.
        """
        ended = self.has_ended()  # checked first: it may have replied before it ended
        try:
            if self.connection.poll():
                return self.connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            raise self._ended() from None
        if ended:
            raise self._ended()
        if time.monotonic() > self.deadline:
            raise WorkerError("sent no reply", self._running_line(file), timed_out=True)
        return None

    def _ended(self) -> WorkerError:
        """Return how the process ended."""
        try:
            code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return WorkerError("closed the connection of its process")
        if code < 0:
            reason = f"had its process killed by {signal.Signals(-code).name}"
            return WorkerError(reason, is_limit=-code in _LIMIT_SIGNALS)
        return WorkerError(f"ended its process with exit code {code}")

    def _running_line(self, file: Path) -> str:
        """Return `file:line` of the running call, "" where the process does not answer."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
        deadline, line = time.monotonic() + _STACK_S, re.compile(r'File "(.+)", line (\d+) in ')
        while time.monotonic() < deadline:
            time.sleep(_STACK_S / 20)
            self._stack.seek(0)
            frames = line.findall(self._stack.read().decode(errors="replace"))
            if own := [number for name, number in frames if name == str(file)]:
                return f"{file}:{own[0]}"
        return ""

    def kill(self) -> None:
        """Kill the process and those it has started."""
        self.process.terminate()  # its guard, which kills them, also those of other groups
        self.wait(_KILL_S)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()
        self._stack.close()


def _stop(workers: dict[int, Worker], owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the process that owns them
    for worker in workers.values():
        worker.connection.close()  # on which it ends
    deadline = time.monotonic() + STOP_S
    for worker in workers.values():
        worker.wait(max(0.0, deadline - time.monotonic()))
        worker.kill()
    workers.clear()
