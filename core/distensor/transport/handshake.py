"""How two peers meet: TLS with certificates both ways, then one frame each way.

The dialer opens two connections and says HELLO with the lane number of each; the listener answers WELCOME, or REFUSED
with the reason in words. After that each lane carries frames in one direction only. The text of HELLO may invite to a
Unix socket (`local_lanes`); a WELCOME that says so has come there, and TLS is left.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import ExitStack, nullcontext
from enum import IntEnum
from typing import NamedTuple

from distensor.core.errors import FrameError, HandshakeError
from distensor.transport.frames import PREFIX_SIZE, FrameKind
from distensor.transport.identity import check_identity, is_of_another_time, peer_identity
from distensor.transport.local_lanes import JOINED, Connection, Invitation, LocalMeeting
from distensor.transport.tls_sockets import TlsSocket
from distensor.transport.types import Channel, FrameLimits, PeerId, Tag, peer_name
from distensor.transport.wire import WireClosedError, WireReader, WireWriter

_LIMITS = FrameLimits(header=1024, body=0, queued=0)


class Lane(IntEnum):
    """Which way a connection carries frames."""

    FROM_DIALER = 0
    TO_DIALER = 1


class Hello(NamedTuple):
    """What a recognised dialer wants."""

    rank: int
    lane: Lane
    invitation: bytes


class RetryableHandshakeError(HandshakeError):
    """The connection broke before anybody was recognised; worth another try."""


class NobodyCameError(RetryableHandshakeError):
    """A Unix socket was agreed on and came to nothing; worth another try without one."""


class RefusedError(HandshakeError):
    """A recognised member of the authority that may not have this connection; it is told why."""


def recognise_dialed(raw: socket.socket, context: ssl.SSLContext, *, me: PeerId, expected: int) -> TlsSocket:
    """The first part of the dialer's half: TLS, and is this the peer? Nothing is said yet, so it may be given up.

    `raw` must have a timeout set; it is closed on failure.

    Raises:
        HandshakeError: the other end is not the peer it should be.
        OSError: the connection broke or took too long.
    """
    tls = TlsSocket.over(raw, context)
    with ExitStack() as undo:
        undo.callback(tls.close)
        _shake(tls)
        _check(tls, me=me, expected=expected)
        undo.pop_all()
    return tls


def say_hello(tls: TlsSocket, *, me: PeerId, lane: Lane, local: LocalMeeting | None = None) -> Connection:
    """The second part: agree on what this connection is for; `tls` is closed on failure.

    With `local`, the connection that comes back is a Unix socket where the peer is a process of the same user here.

    Raises:
        HandshakeError: the other end refuses us.
        OSError: the connection broke or took too long.
    """
    with ExitStack() as undo:
        undo.callback(tls.close)
        with nullcontext() if local is None else local.invite(tls) as invitation:
            connection = _introduce(tls, me, lane, invitation)
        if connection is tls:
            undo.pop_all()
    return connection


def _introduce(tls: TlsSocket, me: PeerId, lane: Lane, invitation: Invitation | None) -> Connection:
    text = b"" if invitation is None else invitation.text
    WireWriter(tls, me.epoch).signal(FrameKind.HELLO, text, tag=Tag(Channel.META, slot=lane))
    if _await_welcome(tls, me) != JOINED:
        return tls
    if invitation is None:
        raise HandshakeError("the peer says that it came to a Unix socket to which nobody invited it")
    try:
        return invitation.accept()
    except (HandshakeError, OSError) as error:
        raise NobodyCameError(f"the peer did not come to the Unix socket that it says it came to: {error}") from error


def _await_welcome(tls: TlsSocket, me: PeerId) -> bytes:
    """The text of the answer."""
    try:
        prefix, text, _ = WireReader(tls, me.epoch, _LIMITS, PREFIX_SIZE).frame()
    except WireClosedError as error:
        raise RetryableHandshakeError("the peer closed the connection during the handshake") from error
    except ssl.SSLError as error:
        raise HandshakeError(f"the peer refuses our certificate: {tls_reason(error)}") from error
    except FrameError as error:
        raise HandshakeError(f"the peer answered what is not our protocol: {error}") from error
    if prefix.kind is FrameKind.REFUSED:
        raise HandshakeError(f"the peer refuses us: {text.decode(errors='replace')}")
    if prefix.kind is not FrameKind.WELCOME:
        raise HandshakeError(f"the peer answered {prefix.kind.name} to HELLO; expected WELCOME")
    return text


def secure_accepted(tls: TlsSocket, *, me: PeerId, expected: frozenset[int]) -> Hello:
    """The listener's half up to the answer: who dialed, which lane this is, and where else it may be met.

    Raises:
        RefusedError: a peer that has no business dialing us; answer it.
        HandshakeError: a stranger.
        OSError: the connection broke or took too long.
    """
    _shake(tls)
    try:
        found = peer_identity(tls)
        if is_of_another_time(found, me=me, later=True):
            # It is we who are late. No answer: it tries again, and finds who comes after us on this port.
            raise RetryableHandshakeError(f"the peer is {found.uri} already, and we are still in epoch {me.epoch}")
        check_identity(found, me=me)
        if found.rank not in expected:
            raise HandshakeError(f"{peer_name(found.rank)} has no connection to open to {peer_name(me.rank)}")
        return Hello(found.rank, *_read_hello(tls, me))
    except RetryableHandshakeError:
        raise
    except HandshakeError as error:
        raise RefusedError(str(error)) from error


def _read_hello(tls: TlsSocket, me: PeerId) -> tuple[Lane, bytes]:
    try:
        prefix, text, _ = WireReader(tls, me.epoch, _LIMITS, PREFIX_SIZE).frame()
    except FrameError as error:
        raise HandshakeError(str(error)) from error
    if prefix.kind is not FrameKind.HELLO or prefix.tag.slot not in frozenset(Lane):
        raise HandshakeError(f"expected HELLO with lane 0 or 1, got {prefix.kind.name} with {prefix.tag.slot}")
    return Lane(prefix.tag.slot), text


def answer(tls: TlsSocket, me: PeerId, refusal: str | None, *, joined: bool = False) -> None:
    """WELCOME, which also says whether the dialer's invitation was accepted; or REFUSED with its reason."""
    kind = FrameKind.WELCOME if refusal is None else FrameKind.REFUSED
    text = (refusal or "").encode()[: _LIMITS.header]
    WireWriter(tls, me.epoch).signal(kind, JOINED if joined else text)


def _shake(tls: TlsSocket) -> None:
    try:
        tls.do_handshake()
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
        raise RetryableHandshakeError("the connection was closed during the TLS handshake") from error
    except ssl.SSLError as error:
        raise HandshakeError(f"TLS handshake failed: {tls_reason(error)}") from error


def tls_reason(error: ssl.SSLError) -> str:
    """What OpenSSL has to say, in words a person would use."""
    words = (error.reason or str(error)).replace("_", " ").lower()
    detail = getattr(error, "verify_message", "")
    return f"{words}: {detail}" if detail else words


def _check(tls: TlsSocket, *, me: PeerId, expected: int) -> None:
    found = peer_identity(tls)
    if is_of_another_time(found, me=me, later=False):
        raise RetryableHandshakeError(f"the peer is still {found.uri}; expected it in epoch {me.epoch} soon")
    check_identity(found, me=me)
    if found.rank != expected:
        raise HandshakeError(f"the peer is {found.uri}; expected {peer_name(expected)}")
