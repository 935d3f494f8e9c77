"""SIGINT and SIGTERM: the first asks for an end after the step, the second ends at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType

__all__ = ["EXIT_STOPPED", "STOP_SIGNALS", "StopSignals"]

EXIT_STOPPED = 3  # the exit code of a run that was stopped on request, and can be resumed
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_SAME_REQUEST_S = 1.0  # schedulers signal every process, and torchrun passes its own signal on


class StopSignals:
    """The stop signals of one rank, read by a thread: in a collective, Python runs no handler.

    Attributes:
        requested: the number of the first signal; 0: none yet.
        can_wait: whether there is a step to finish. Until it is set, the first signal ends the
            process at once.
    """

    def __init__(self) -> None:
        self.requested = 0
        self.can_wait = False
        self._since = 0.0
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self._read, True)
        for number in STOP_SIGNALS:
            signal.signal(number, _noted)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget)
        threading.Thread(target=self._listen, name="stop-signals", daemon=True).start()

    def close(self, action: signal.Handlers) -> None:
        """Leave further signals to the system: to be ignored at the end, or to kill a failed rank
        that takes too long to end."""
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
            sys.stdout.flush()
            os._exit(EXIT_STOPPED)
        if not self.requested:
            self.requested, self._since = number, time.monotonic()


def _noted(signum: int, frame: FrameType | None) -> None:
    """The number is in the wake-up pipe already."""


def _forget() -> None:
    """A forked child must neither write to its parent's pipe nor survive its signals."""
    signal.set_wakeup_fd(-1)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
