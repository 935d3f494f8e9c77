"""Ranks that watch each other, so that a lost rank ends the run with a name and a phase.

Each rank publishes (phase, step, a counter) to the rendezvous store every second, from a thread and
a connection of its own. A peer whose counter stands still is dead or stuck in native code. A rank
whose collective timed out asks the others where they are: they print their stacks, and answer.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

__all__ = ["EXIT_PEER_LOST", "PeerLost", "PeerWatch"]

EXIT_PEER_LOST = 75  # the exit code of a rank that is well but lost another one

_BEAT_S = 1.0
_SILENT_S = 20.0  # a rank silent this long has no running Python thread left
_DIAGNOSIS_S = 6 * _BEAT_S
_NAMED = 4  # ranks in one message


class PeerLost(RuntimeError):
    """Another rank failed, died or went silent; the message names it and its phase."""


@dataclass
class _Peer:
    beat: str = ""
    heard: float = 0.0

    @property
    def phase(self) -> str:
        return self.beat.rsplit("|", 1)[0] or "not started"


class PeerWatch:
    """Heartbeats of one rank and its view of the others.

    store: address of the rendezvous store, as torchrun sets it in the environment.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self._peers = {r: _Peer(heard=time.monotonic()) for r in range(world_size) if r != rank}
        self._phase = "starting"
        self._asked = False
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
        with self._lock, suppress(dist.DistError):  # without a store there is nobody to tell
            self._store.set(f"error/{self.rank}", f"{self._phase}: {_one_line(error)}")

    def diagnose(self) -> str | None:
        """Which other rank is the cause of a failure seen here; None if all of them are well.

        Takes up to a few seconds: a peer that died is known by its silence.
        """
        deadline = time.monotonic() + _DIAGNOSIS_S
        while time.monotonic() < deadline:
            for rank in self._peers:
                if reason := self._read(f"error/{rank}"):
                    return f"rank {rank} failed in {reason}"
            time.sleep(_BEAT_S / 4)
        for rank, peer in self._peers.items():
            if time.monotonic() - peer.heard > 3 * _BEAT_S:
                return f"rank {rank} died or hangs; it was last heard in {peer.phase}"
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
        self._stop.set()
        self._thread.join(timeout=5)

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
            for rank, peer in self._peers.items():
                silent = now - peer.heard
                if silent > _SILENT_S:
                    self._end(
                        f"rank {rank} has been silent for {silent:.0f} s; "
                        f"it was last heard in {peer.phase}"
                    )

    def _listen(self) -> None:
        for rank, peer in self._peers.items():
            if (beat := self._read(f"beat/{rank}")) not in ("", peer.beat):
                peer.beat, peer.heard = beat, time.monotonic()

    def _end(self, reason: str) -> None:
        """End this process at once: its main thread may wait for ever in native code."""
        if self._stop.is_set():
            return
        print(f"rank {self.rank}, in {self._phase}: {reason}", file=sys.stderr)
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        sys.stderr.flush()
        os._exit(EXIT_PEER_LOST)


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
