"""Ports for servers that bind them later, in another process."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

__all__ = ["free_port"]

_RANDOM = random.SystemRandom()  # tests may run with equal seeds in several processes


def free_port() -> int:
    """A free port of 127.0.0.1 that the system does not give to others by itself."""
    while True:
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", _RANDOM.randrange(15_000, 30_000)))
            port: int = one.getsockname()[1]
            return port
