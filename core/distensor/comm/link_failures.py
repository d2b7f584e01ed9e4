"""Why a link is down, in words for the node's owner."""

from __future__ import annotations

from typing import Protocol

from distensor.comm.link_status import LinkError
from distensor.comm.messages import Rejected
from distensor.core.errors import (
    AuthenticationError,
    ControlError,
    DistensorError,
    HubProtocolError,
    HubUnreachableError,
    StoreError,
    ThrottledError,
)


class _HasAddress(Protocol):
    @property
    def address_text(self) -> str: ...


class LinkDownError(ControlError):
    """A failure with its explanation. `final` means that trying again soon cannot help."""

    def __init__(self, error: LinkError, *, final: bool) -> None:
        super().__init__(error.message)
        self.error = error
        self.final = final

    @classmethod
    def of(cls, code: str, message: str, *, final: bool = False) -> LinkDownError:
        return cls(LinkError(code=code, message=message, fix=_FIXES.get(code, _FIXES["protocol"])), final=final)

    @classmethod
    def rejected(cls, message: Rejected) -> LinkDownError:
        return cls.of(message.code, message.reason, final=message.code not in _PASSING)


REFUSED = frozenset({"authentication", "revoked"})
"""The hub does not accept what the node shows."""
ELSEWHERE = frozenset({"unreachable", "stream_ended", "stopping", "protocol", "silent"})
"""The hub may be at another of its addresses."""
_PASSING = frozenset({"stopping", "slow", "silent", "protocol"})
"""Rejections after which the node simply tries again."""

_FIXES = {
    "unreachable": "Check that the hub is running and that this machine can reach its address.",
    "authentication": "Ask the hub's operator for a new join token and give it to the node: distensor auth login",
    "revoked": "Ask the hub's operator for a new key and give it to the node: distensor auth login",
    "throttled": "Wait: the node tries again by itself. If it repeats, a machine at this address shows wrong keys.",
    "no_key": "Give it one: distensor auth login",
    "replaced": "Another process uses this node's credential. Run one supervisor per state directory.",
    "store": "Make the state directory writable for this user.",
    "stream_ended": "Nothing to do: the node connects again by itself.",
    "stopping": "Nothing to do: the hub is stopping; the node connects again by itself.",
    "slow": "Nothing to do: the node connects again by itself. If it repeats, the network is too slow.",
    "silent": "Nothing to do: the node connects again by itself. If it repeats, this machine is overloaded.",
    "protocol": "Install the same version of disTensor on the hub and on this machine.",
}


def failure_of(error: DistensorError, link: _HasAddress) -> LinkDownError:
    """Put an error into a failure, with the hub's address where the message lacks it."""
    match error:
        case LinkDownError():
            return error
        case AuthenticationError():
            return LinkDownError.of("authentication", str(error), final=True)
        case ThrottledError():
            return LinkDownError.of("throttled", str(error))
        case HubUnreachableError():
            return LinkDownError.of("unreachable", str(error))
        case StoreError():
            return LinkDownError.of("store", str(error), final=True)
        case HubProtocolError():
            return LinkDownError.of("protocol", f"{error} (hub at {link.address_text})")
        case _:
            return LinkDownError.of("protocol", f"{type(error).__name__}: {error} (hub at {link.address_text})")
