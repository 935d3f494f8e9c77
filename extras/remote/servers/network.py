"""Addresses under which this machine and servers on others reach each other."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

import psutil

from hybridengine.run.errors import RolloutError
from hybridengine.run.messages import check_secret

__all__ = ["address_for", "has_remote", "prepare_network"]


def address_for(host: str, address: tuple[str, int]) -> tuple[str, int]:
    """Return `address`, of a port on this machine or another, as the machine `host` reaches it.

    Raises RolloutError for a host that is unknown or cannot be reached.

    Examples:
        >>> address_for("localhost", ("127.0.0.1", 29500))
        ('127.0.0.1', 29500)
    """
    own, port = address
    if _is_loopback(own) and not _is_loopback(host):
        own = _own_address_towards(host)
    return own, port


def prepare_network(urls: Sequence[str]) -> None:
    """Let gloo and NCCL use the interface towards servers on other machines, unless one is set.

    On one machine alone they use the loopback interface, which others cannot reach. Does nothing
    for hosts that are unknown: who connects to them reports it. Raises SecretError if there are
    servers and no secret, which they must have in common with the ranks.
    """
    if urls:
        check_secret("the servers of rollout.servers verify by it what the trainers tell them")
    with suppress(RolloutError):
        remote = _remote_hosts(urls)
        own = _own_address_towards(remote[0]) if remote else None
        for name, addresses in psutil.net_if_addrs().items():
            if any(entry.address.partition("%")[0] == own for entry in addresses):
                for library in ("GLOO", "NCCL"):
                    os.environ.setdefault(f"{library}_SOCKET_IFNAME", name)


def has_remote(urls: Sequence[str]) -> bool:
    """Return whether a server may be on another machine."""
    try:
        return bool(_remote_hosts(urls))
    except RolloutError:
        return True


def _remote_hosts(urls: Sequence[str]) -> list[str]:
    hosts = (urlsplit(url).hostname or "" for url in urls)
    return [host for host in hosts if not _is_loopback(host)]


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(socket.gethostbyname(host))
    except OSError as error:
        raise RolloutError(f"rollout.servers: the host {host!r} is unknown ({error})") from None
    return address.is_loopback or address.is_unspecified  # a client reaches itself at 0.0.0.0


def _own_address_towards(host: str) -> str:
    """Return the address of this machine from which packets to `host` leave."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RolloutError(f"rollout.servers: no route to {host!r} ({error})") from None
