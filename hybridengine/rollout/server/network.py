"""Addresses under which this machine and servers on others reach each other."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from urllib.parse import urlsplit

import psutil

from hybridengine.errors import RolloutError

__all__ = ["address_for", "set_network_interface"]


def address_for(host: str, address: tuple[str, int]) -> tuple[str, int]:
    """Return `address`, of a port on this machine or another, as the machine `host` reaches it.

    Raises RolloutError for a host that is unknown or cannot be reached.

    Example:
        >>> address_for("localhost", ("127.0.0.1", 29500))
        ('127.0.0.1', 29500)
    """
    own, port = address
    if _is_loopback(own) and not _is_loopback(host):
        own = _own_address_towards(host)
    return own, port


def set_network_interface(urls: Iterable[str]) -> None:
    """Let gloo use the interface towards servers on other machines, unless one is set.

    On one machine alone it uses the loopback interface, which others cannot reach. Does nothing for
    hosts that are unknown: who connects to them reports it.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return
    with suppress(RolloutError):
        hosts = (urlsplit(url).hostname or "" for url in urls)
        remote = next((host for host in hosts if not _is_loopback(host)), None)
        own = remote and _own_address_towards(remote)
        for name, addresses in psutil.net_if_addrs().items():
            if any(entry.address.partition("%")[0] == own for entry in addresses):
                os.environ["GLOO_SOCKET_IFNAME"] = name


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except OSError as error:
        raise RolloutError(f"rollout.servers: the host {host!r} is unknown ({error})") from None


def _own_address_towards(host: str) -> str:
    """Return the address of this machine from which packets to `host` leave."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RolloutError(f"rollout.servers: no route to {host!r} ({error})") from None
