"""Ranks that watch each other, so that a lost rank ends the run with a name and a phase.

Each rank publishes (phase, step, a counter) to the rendezvous store every second, from a thread and
a connection of its own. A peer whose counter stands still has ended, is stopped, or gets no time on
a loaded machine: on the same machine the system tells which, elsewhere a longer limit has to do. A
rank whose collective timed out asks the others where they are: they print their stacks, and answer.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

__all__ = ["EXIT_PEER_LOST", "PeerWatch"]

EXIT_PEER_LOST = 75  # the exit code of a rank that is well but lost another one

_BEAT_S = 1.0
_GONE_S = 3 * _BEAT_S  # silence of a rank whose process has ended
_STOPPED_S = 10.0  # silence of a rank whose process is stopped (SIGSTOP)
_UNREACHABLE_S = 60.0  # silence of a rank on another machine, which may be loaded, or gone
_DIAGNOSIS_S = 6 * _BEAT_S
_STARTING, _DONE = "starting", "done"
_NAMED = 4  # ranks in one message


@dataclass
class _Peer:
    beat: str = ""
    heard: float = 0.0
    process: tuple[str, int] = ("", 0)  # (machine, pid)

    @property
    def phase(self) -> str:
        return self.beat.rsplit("|", 1)[0] or "not started"

    @property
    def is_starting(self) -> bool:
        return not self.beat or self.phase == _STARTING or self.phase.endswith(" of step 0")

    @property
    def is_done(self) -> bool:
        return self.phase == _DONE

    def state(self) -> str:
        """Of its process: "running", "stopped", "gone", or "elsewhere"."""
        machine, pid = self.process
        if machine != _machine():
            return "elsewhere"
        try:
            letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"
        return {"T": "stopped", "Z": "gone", "X": "gone"}.get(letter, "running")


class PeerWatch:
    """Heartbeats of one rank and its view of the others.

    The rendezvous store's address is in the environment, as torchrun sets it.

    timeout_s: how long a rank may take to start, and how long one that runs on this machine may be
    silent. on_lost: called with the number of a lost rank before this process ends for it.

    Attributes:
        must_end: whether this rank was told to end, as the launcher does after a failure elsewhere;
            it then ends as soon as a failure of another rank is known.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_s: float = 600.0,
        on_lost: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self.rank, self._timeout_s, self._on_lost = rank, timeout_s, on_lost
        self.must_end: Callable[[], bool] = lambda: False
        self._peers = {r: _Peer(heard=time.monotonic()) for r in range(world_size) if r != rank}
        self._phase = _STARTING
        self._asked = self._has_failed = False
        self._count = 0
        self._stop = threading.Event()
        self._store = dist.PrefixStore(
            f"hybridengine/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
            dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                timeout=timedelta(seconds=30),
            ),
        )
        self._lock = threading.Lock()
        self._store.set(f"process/{rank}", f"{_machine()}|{os.getpid()}")
        self._publish()
        self._thread = threading.Thread(target=self._watch, name="peer-watch", daemon=True)
        self._thread.start()

    def enter(self, phase: str, step: int) -> None:
        """This rank is now in `phase` of `step`."""
        self._phase = f"phase {phase!r} of step {step}"

    @property
    def phase(self) -> str:
        return self._phase

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank ends."""
        self._has_failed = True
        with self._lock, suppress(dist.DistError):  # without a store there is nobody to tell
            self._store.set(f"error/{self.rank}", f"{self._phase}: {_one_line(error)}")

    def diagnose(self) -> str | None:
        """Which other rank is the cause of a failure seen here; None if all of them are well.

        Takes up to a few seconds: a peer that has ended is known by its silence.
        """
        deadline = time.monotonic() + _DIAGNOSIS_S
        while time.monotonic() < deadline:
            if failed := self._failed_peer():
                self._on_lost(failed[0])
                return failed[1]
            time.sleep(_BEAT_S / 4)
        for rank, peer in self._peers.items():
            silent = time.monotonic() - peer.heard > _GONE_S
            if silent and not peer.is_done and peer.state() != "running":
                self._on_lost(rank)
                return f"rank {rank} ended or hangs; it was last heard in {peer.phase}"
        return None

    def _failed_peer(self) -> tuple[int, str] | None:
        """(rank, reason) of one that has told why it ends."""
        for rank in self._peers:
            if reason := self._read(f"error/{rank}"):
                return rank, f"rank {rank} failed in {reason}"
        return None

    def whereabouts(self) -> str:
        """Where the other ranks are while this one has waited in vain, those elsewhere first.

        They print the stacks of all their threads; one without an answer is stuck in native code.
        """
        found: dict[int, str] = {}
        with self._lock, suppress(dist.DistError):
            self._asked = True
            self._store.set(f"here/{self.rank}", f"{self._phase}, and waits too")
            self._store.set("where?", str(self.rank))
        deadline = time.monotonic() + _DIAGNOSIS_S
        while len(found) < len(self._peers) and time.monotonic() < deadline:
            time.sleep(_BEAT_S / 4)
            for rank in self._peers.keys() - found.keys():
                if place := self._read(f"here/{rank}"):
                    found[rank] = place
        silent = {r: f"{p.phase}, but does not answer" for r, p in self._peers.items()}
        places = sorted((silent | found).items(), key=lambda item: self._phase in item[1])
        named = "; ".join(f"rank {rank} is in {place}" for rank, place in places[:_NAMED])
        return named + (f"; and {len(places) - _NAMED} more" if len(places) > _NAMED else "")

    def _answer(self) -> None:
        """Once, when a rank has asked: where this one is."""
        with self._lock:
            if self._asked or not self._store.check(["where?"]):
                return
            self._asked = True
            self._store.set(f"here/{self.rank}", f"{self._phase}, at {_line_of_main_thread()}")
        print(f"rank {self.rank}, in {self._phase}, is waited for; its stacks:", file=sys.stderr)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)

    def close(self) -> None:
        """Watch no more; a rank that has not failed lets the others know that it may end now."""
        self._stop.set()
        self._thread.join(timeout=5)
        if not self._has_failed:
            self._phase = _DONE
            with suppress(dist.DistError):
                self._publish()

    def _read(self, key: str) -> str:
        with self._lock, suppress(dist.DistError):
            return self._store.get(key).decode() if self._store.check([key]) else ""
        return ""

    def _publish(self) -> None:
        self._count += 1
        with self._lock:
            self._store.set(f"beat/{self.rank}", f"{self._phase}|{self._count}")

    def _watch(self) -> None:
        now = time.monotonic()
        while not self._stop.wait(_BEAT_S):
            before, now = now, time.monotonic()
            if now - before > _DIAGNOSIS_S:  # stopped ourselves, the others perhaps with us
                for peer in self._peers.values():
                    peer.heard = now
            try:
                self._publish()
                self._listen()
                self._answer()
            except dist.DistError:
                self._end("the rendezvous store is gone: its host, rank 0's node or agent, ended")
            quiet = any(now - p.heard > _GONE_S and not p.is_done for p in self._peers.values())
            if (quiet or self.must_end()) and (failed := self._failed_peer()):
                self._end(failed[1], failed[0])
            for rank, peer in self._peers.items():
                if reason := self._why_lost(peer, now - peer.heard):
                    self._end(f"rank {rank} {reason}; it was last heard in {peer.phase}", rank)

    def _why_lost(self, peer: _Peer, silent: float) -> str:
        """Why a peer that has been silent for so long counts as lost; empty if it does not."""
        if silent <= _GONE_S or peer.is_done:
            return ""
        if not peer.beat:
            late = silent > self._timeout_s
            return f"has not started within {self._timeout_s:.0f} s" if late else ""
        state = peer.state()
        if state == "gone":
            return "has ended without finishing the run"
        if state == "stopped":
            return f"is stopped (SIGSTOP) for {silent:.0f} s" if silent > _STOPPED_S else ""
        limit = self._timeout_s
        if state == "elsewhere" and not peer.is_starting:
            limit = min(_UNREACHABLE_S, limit)
        return f"has been silent for {silent:.0f} s" if silent > limit else ""

    def _listen(self) -> None:
        for rank, peer in self._peers.items():
            if (beat := self._read(f"beat/{rank}")) not in ("", peer.beat):
                if not peer.beat:
                    machine, _, pid = self._read(f"process/{rank}").rpartition("|")
                    peer.process = machine, int(pid)
                peer.beat, peer.heard = beat, time.monotonic()

    def _end(self, reason: str, lost: int | None = None) -> None:
        """End this process at once: its main thread may wait for ever in native code."""
        if self._stop.is_set():
            return
        if lost is not None:
            self._on_lost(lost)
        print(f"rank {self.rank}, in {self._phase}: {reason}", file=sys.stderr)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        sys.stderr.flush()
        os._exit(EXIT_PEER_LOST)


@functools.cache
def _machine() -> str:
    """What two processes have in common that can see each other in /proc; else unique."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"unknown/{os.getpid()}"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _line_of_main_thread() -> str:
    """The innermost line that is not torch's or Python's own, as file:line in function."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    calls = traceback.extract_stack(frame)
    foreign = (os.path.dirname(os.__file__), "site-packages")
    own = [c for c in calls if not any(part in c.filename for part in foreign)]
    call = (own or calls)[-1]
    return f"{call.filename}:{call.lineno} in {call.name}"
