"""What every TCP connection of the data plane is told before TLS."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

_CONGESTION = getattr(socket, "TCP_CONGESTION", None)
_PREFERRED = b"bbr"
"""Algorithms that take a lost packet for a full line carry 3 of 10 Mbit/s over 40 ms where 1 % of packets is lost; this
one measures the line instead and carries 9 (docs/figures.md). Where the system does not offer it, its own stays."""


def prepare(raw: socket.socket) -> None:
    """Small messages leave at once; to another machine, lost packets do not slow the others down."""
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if _CONGESTION is not None and not _is_here(raw.getpeername()[0]):
        with suppress(OSError):  # not offered, or not to this user
            raw.setsockopt(socket.IPPROTO_TCP, _CONGESTION, _PREFERRED)


def _is_here(host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
