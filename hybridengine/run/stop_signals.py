"""SIGINT and SIGTERM: the first requests a stop after the step, the second ends the rank."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType

from hybridengine.run.errors import EXIT_STOPPED

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_SAME_REQUEST_S = 1.0  # schedulers signal every process, and torchrun forwards its own signal


class StopSignals:
    """The stop signals of one rank, read by a thread: inside a collective Python runs no handler.

    Attributes:
        requested: the number of the first signal; 0 before it.
        can_wait: whether there is a step to finish; if not, the first signal ends the process.
    """

    def __init__(self) -> None:
        self.requested = 0
        self.can_wait = False
        self._since = 0.0
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self._read, True)
        for number in STOP_SIGNALS:
            signal.signal(number, _ignore)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_reset_in_child)
        threading.Thread(target=self._listen, name="stop-signals", daemon=True).start()

    def close(self, action: signal.Handlers) -> None:
        """Set the action of further signals: ignore them at the end of a run, or let them end a
        failed rank that takes too long to exit."""
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:
            signal.signal(number, action)

    def _listen(self) -> None:
        while True:
            for number in os.read(self._read, 64):
                if number in STOP_SIGNALS:
                    self._receive(number)

    def _receive(self, number: int) -> None:
        again = self.requested and time.monotonic() - self._since > _SAME_REQUEST_S
        if again or not self.can_wait:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(EXIT_STOPPED)
        if not self.requested:
            self.requested, self._since = number, time.monotonic()


def _ignore(signum: int, frame: FrameType | None) -> None:
    """The wake-up pipe has the number already."""


def _reset_in_child() -> None:
    """A forked child neither writes to its parent's pipe nor ignores signals."""
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
