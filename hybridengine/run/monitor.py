"""Heartbeats between ranks: a rank whose main thread waits in native code still notices a failure.

Each rank publishes its phase and a counter every second. A rank whose counter does not change has
ended, is stopped, or gets no time on a loaded machine. On the same machine the operating system
tells which; for another machine a longer limit applies.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from hybridengine.run.errors import OutputError
from hybridengine.run.failures import STORE_GONE, CollectiveGuard, RankReport
from hybridengine.run.storage import active_writes, atomic_file

EXIT_RANK_FAILED = 75  # the exit code of a rank that ends because another one failed or stalled

_STORE_SILENT = "the rendezvous store, on rank 0's node, has not answered"
_INTERVAL_S = 1.0
_ENDED_S = 3 * _INTERVAL_S  # without heartbeat, of a rank whose process has ended
STOPPED_S = 10.0  # of a rank whose process is stopped (SIGSTOP)
_UNREACHABLE_S = 60.0  # of a rank on another machine, which may be loaded or gone


class RankMonitor:
    """A thread that publishes the heartbeat of this rank and observes those of the others.

    When another rank has failed or stalled, it ends this process, whose main thread may wait in
    native code for ever. It also answers the hang reports that other ranks request. A second thread
    ends the process when the first one waits for the store, or a write makes no progress: calls to
    a store or a disk have no timeout of their own if its host is unreachable or stopped.

    timeout_s: how long a rank may take to start, how long one that runs on this machine may be
      without heartbeat, how long the store may take to answer, and how long a write may be without
      progress.
    must_end: whether this rank was told to end, as the launcher does after a failure elsewhere; it
      then ends as soon as the failure of another rank is known.
    """

    def __init__(
        self,
        guard: CollectiveGuard,
        timeout_s: float = 600.0,
        must_end: Callable[[], bool] = lambda: False,
    ) -> None:
        self._guard, self._timeout_s, self._must_end = guard, timeout_s, must_end
        self._heartbeats = dict.fromkeys(guard.others, "")
        self._seen = dict.fromkeys(guard.others, time.monotonic())
        self._finished: set[int] = set()
        self._count = 0
        self._stop = threading.Event()
        self._publish()
        self._began = time.monotonic()  # of the current round of the thread
        targets = {"rank-monitor": self._watch_ranks, "wait-monitor": self._watch_waits}
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for name, target in targets.items()
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop observing."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=5)

    def _publish(self) -> bool:
        self._count += 1
        guard = self._guard
        return guard.set(f"heartbeat/{guard.rank}", f"{guard.phase}|{self._count}")

    def _rounds(self) -> Iterator[tuple[float, bool]]:
        """Yield (now, whether this process was stopped since the last round), until `close`."""
        now = time.monotonic()
        while not self._stop.wait(_INTERVAL_S):
            before, now = now, time.monotonic()
            yield now, now - before > 6 * _INTERVAL_S

    def _watch_ranks(self) -> None:
        for now, was_stopped in self._rounds():
            self._began = now
            if was_stopped:  # and perhaps all of the others were
                self._seen = dict.fromkeys(self._seen, now)
            if not self._publish():
                self._end(STORE_GONE)
            self.read_heartbeats()
            self._guard.answer()
            silent = {r: now - self._seen[r] for r in self._seen.keys() - self._finished}
            quiet = any(s > _ENDED_S for s in silent.values())
            if (quiet or self._must_end()) and (failed := self._guard.failed_rank()):
                self._end(str(failed), failed)
            for rank, silent_s in silent.items():
                if failed := self.judge(rank, silent_s):
                    self._end(f"{failed}; it was last in {self._phase_of(rank)}", failed)

    def _watch_waits(self) -> None:
        limit = f"for {self._timeout_s:g} s (trainer.timeout_s)"
        for now, was_stopped in self._rounds():
            writes = active_writes()
            if was_stopped:
                self._began = now
                for write in writes:
                    write.progressed = now
            if now - self._began > self._timeout_s:
                self._end(f"{_STORE_SILENT} {limit}")
            for write in writes:
                if now - write.progressed > self._timeout_s:
                    self._end(f"writing {str(write.folder)!r} has made no progress {limit}")

    def read_heartbeats(self) -> None:
        for rank, last in self._heartbeats.items():
            if (heartbeat := self._guard.get(f"heartbeat/{rank}")) not in ("", last):
                self._heartbeats[rank], self._seen[rank] = heartbeat, time.monotonic()
            elif rank not in self._finished and self._guard.get(f"finished/{rank}"):
                self._finished.add(rank)

    def judge(self, rank: int, silent_s: float) -> RankReport | None:
        """Return why a rank without heartbeat for so long counts as failed; None if it does not."""
        if silent_s <= _ENDED_S or rank in self._finished:
            return None
        state, limit = self._guard.process_state(rank), self._timeout_s
        text = f"has sent no heartbeat for {silent_s:.0f} s"
        if not self._heartbeats[rank]:
            text = f"has not started within {limit:.0f} s"
        elif state == "ended":
            limit, text = 0.0, "has ended without finishing the run"
        elif state == "stopped":
            limit, text = STOPPED_S, f"is stopped (SIGSTOP) for {silent_s:.0f} s"
        elif state == "remote":
            phase = self._phase_of(rank)
            is_starting = phase == "starting" or phase.endswith(" of step 0")
            limit = limit if is_starting else min(_UNREACHABLE_S, limit)
        return RankReport(rank, state, text) if silent_s > limit else None

    def _phase_of(self, rank: int) -> str:
        return self._heartbeats[rank].rpartition("|")[0] or "not started"

    def _end(self, reason: str, cause: RankReport | None = None) -> None:
        """End this process at once."""
        if self._stop.is_set():
            return
        try:
            write_error_record(reason, cause)
            with suppress(OSError, ValueError):  # the log may be closed, or its disk full
                print(f"rank {self._guard.rank}, in {self._guard.place}: {reason}", file=sys.stderr)
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                sys.stderr.flush()
            if cause is not None and cause.state == "stopped":
                self._guard.end_stopped_ranks()
        finally:
            os._exit(EXIT_RANK_FAILED)


def write_error_record(reason: str, cause: RankReport | None = None, stack: str = "") -> None:
    """Write why this rank ends, in the format of `torch.distributed.elastic` error records.

    cause: the report of the other rank that is the cause; default: this rank is.
    stack: the text that torchrun prints for this rank; default: `reason`.
    Does nothing if no elastic launcher has started this process, or if the file cannot be written.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    now = time.time()
    order = int(now) + (cause is not None)  # torchrun calls the earliest one the root cause
    extra = {"py_callstack": stack or reason, "timestamp": str(order), "time": now}
    extra["cause"] = None if cause is None else asdict(cause)
    with suppress(OSError, OutputError), atomic_file(Path(file)) as temporary:
        temporary.write_text(json.dumps({"message": {"message": reason, "extraInfo": extra}}))
