"""The home's router, asked by UPnP to forward ports. The library `miniupnpc` speaks the protocols; it blocks.

It is an extra (`pip install distensor-server[upnp]`): who forwards ports by hand, or uses a relay, needs none of it.
"""

from __future__ import annotations

import ipaddress
from typing import Any, Protocol

from distensor.core.reading import Reading, Unavailable

SEARCH_MS = 2000
"""How long routers have for their answer to a search."""
DESCRIPTION = "disTensor"
_PERMANENT_ONLY = "OnlyPermanentLeasesSupported"
_CARRIER = ipaddress.ip_network("100.64.0.0/10")
INSTALL = "pip install 'distensor-server[upnp]'"


class Router(Protocol):
    """Each call blocks for up to some seconds and says in words what went wrong."""

    @property
    def lan_address(self) -> str:
        """This machine's address on the router's side."""

    def external_address(self) -> Reading[str]:
        """The address by which the router is known outside."""

    def forward(self, port: int, seconds: int) -> Reading[int]:
        """TCP `port` of the outside leads to the same port here; for how long: seconds, 0 until it is withdrawn."""

    def withdraw(self, port: int) -> str | None:
        """End that; why it could not be, None where it was, or was not forwarded at all."""


class UpnpRouter:
    """A router that miniupnpc has found."""

    def __init__(self, session: Any) -> None:
        self._session = session

    @property
    def lan_address(self) -> str:
        return str(self._session.lanaddr)

    def external_address(self) -> Reading[str]:
        try:
            return _checked(str(self._session.externalipaddress()))
        except Exception as error:  # noqa: BLE001 - the library raises nothing more precise
            return Unavailable(reason=f"the router does not say its address: {error}")

    def forward(self, port: int, seconds: int) -> Reading[int]:
        try:
            self._add(port, seconds)
        except Exception as error:  # noqa: BLE001 - the library raises nothing more precise
            if str(error) != _PERMANENT_ONLY or seconds == 0:
                return Unavailable(reason=f"the router does not forward port {port}: {error}")
            return self.forward(port, 0)
        return seconds

    def _add(self, port: int, seconds: int) -> None:
        self._session.addportmapping(port, "TCP", self.lan_address, port, DESCRIPTION, "", seconds)

    def withdraw(self, port: int) -> str | None:
        try:
            self._session.deleteportmapping(port, "TCP")
        except Exception as error:  # noqa: BLE001 - the library raises nothing more precise
            return None if str(error) == "NoSuchEntryInArray" else f"port {port} stays forwarded: {error}"
        return None


def _checked(text: str) -> Reading[str]:
    """What a router says of itself is a stranger's word until it looks like an address that others can reach."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return Unavailable(reason=f"the router says that its address is {text!r:.60}, which is none")
    if not address.is_global or address in _CARRIER:
        return Unavailable(
            reason=f"the router's own address {text} is not of the internet: another router is before it, which has "
            "to forward the ports as well; else the relay is the way"
        )
    return text


def find_router(*, interface: str = "", search_ms: int = SEARCH_MS) -> Reading[Router]:
    """The router of this network, by a search of `search_ms`.

    Args:
        interface: address of the interface on which it is searched; empty: the system's choice.
    """
    try:
        import miniupnpc  # here, since it is an extra
    except ImportError:
        return Unavailable(reason=f"the library for it is not installed: {INSTALL}")
    session = miniupnpc.UPnP(multicastif=interface or None, discoverdelay=search_ms)
    try:
        session.discover()
        session.selectigd()
    except Exception as error:  # noqa: BLE001 - the library raises nothing more precise
        return Unavailable(
            reason=f"no router answers to UPnP ({error or 'silence'}); switch it on there, or forward the ports by hand"
        )
    return UpnpRouter(session)
