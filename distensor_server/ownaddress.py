"""The address at which this machine's workers listen and are reached by others.

Nobody should have to look it up: it is the one that this machine's packets to the hub carry. A hub on this machine is
reached by loopback, and then so are the workers.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

from distensor.comm.address import HubAddress, is_loopback, parse_address
from distensor.core.errors import ConfigError
from distensor_server.config import AUTO

LOOPBACK = "127.0.0.1"


def address_towards(hub: HubAddress) -> str:
    """Which address of this machine leads to `hub`. Connecting a datagram socket sends nothing.

    Raises:
        OSError: the name is not known, or no way leads there.
    """
    found: Sequence[Any] = socket.getaddrinfo(hub.host, hub.port, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, where = min(found, key=lambda row: row[0] != socket.AF_INET)
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


class OwnAddress:
    """`chosen` is the owner's, or `auto`; `hub` gives the hub's address, empty where none is known."""

    def __init__(
        self, chosen: str, hub: Callable[[], str], towards: Callable[[HubAddress], str] = address_towards
    ) -> None:
        self._chosen = chosen
        self._hub = hub
        self._towards = towards
        self._last = LOOPBACK if chosen == AUTO else chosen

    @property
    def current(self) -> str:
        """What the last look found."""
        return self._last

    def look(self) -> str:
        """The address now: a laptop changes its network. What cannot be found out leaves the one before."""
        if self._chosen == AUTO:
            try:
                self._last = self._found(parse_address(self._hub()))
            except (OSError, ConfigError):
                return self._last
        return self._last

    def _found(self, hub: HubAddress) -> str:
        return LOOPBACK if is_loopback(hub.host) else self._towards(hub)
