"""At which addresses other machines may reach this one's workers."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - compared; the owner chooses it
MOST_ADDRESSES = 6

Interfaces = Callable[[], Mapping[str, Sequence[Any]]]
"""As `psutil.net_if_addrs`."""


def read_interfaces() -> Mapping[str, Sequence[Any]]:
    """The addresses of the interfaces that are up."""
    import psutil  # here, since only a node that listens everywhere asks

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return {name: found for name, found in psutil.net_if_addrs().items() if name in up}


def candidates(host: str, advertise: Iterable[str], interfaces: Interfaces = read_interfaces) -> tuple[str, ...]:
    """What the hub is told, the likeliest first: what the owner names, then where workers listen.

    Workers that listen on every interface are reached at the addresses of all of them; IPv6 comes after IPv4, since a
    home's firewall more often lets nobody in by it.
    """
    found = list(advertise)
    found += _of_interfaces(interfaces) if host in EVERYWHERE else [host]
    return tuple(dict.fromkeys(found))[:MOST_ADDRESSES] or ("127.0.0.1",)


def _of_interfaces(interfaces: Interfaces) -> list[str]:
    entries = [entry for found in interfaces().values() for entry in found]
    v4, v6 = (
        [entry.address for entry in entries if entry.family == family and _reachable(entry.address)]
        for family in (socket.AF_INET, socket.AF_INET6)
    )
    return [*v4, *v6]


def _reachable(text: str) -> bool:
    """Not this machine alone, and not one cable alone."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:  # an IPv6 address with its interface: link-local
        return False
    return not (address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast)
