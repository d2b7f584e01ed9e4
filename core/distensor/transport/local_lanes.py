"""Lanes between processes of one user on one machine: a Unix socket instead of TLS, once TLS has proven both ends.

The dialer makes a socket in a directory of mode 0700 and names it, with two secrets, in its HELLO, inside TLS. The
listener connects to it and says one secret, the dialer answers with the other: so both know that the one at the other
end of the Unix socket is the one whose certificate they have just checked. Both also ask the kernel for the user at
the other end. Whatever of this is not to be had, the lane stays what it was: TLS. (docs/decisions/0006)
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import socket
import ssl
import stat
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

from distensor.core.errors import HandshakeError
from distensor.core.reading import Unavailable
from distensor.transport.tls_sockets import TlsSocket
from distensor.transport.types import Buffer

_PEER_CREDENTIALS = getattr(socket, "SO_PEERCRED", None)
_UCRED = struct.Struct("3i")
"""Process, user and group, as Linux gives them (unix(7))."""
_ROOM = 1 << 22
"""Asked for as the sender's buffer; the kernel gives what it allows."""
_AT_ONCE = 1 << 21
"""Copying more into the kernel is worth a thread of its own: the caller has something better to do."""
_INVITATION = re.compile(rb"local ([0-9a-f]{32}) ([0-9a-f]{64}) ([0-9a-f]{64})")
_ACCEPT_SECONDS = 5.0
JOINED = b"local"
"""The text of a WELCOME of somebody who has come through the Unix socket."""


class LocalSocket(socket.socket):
    """A connected Unix socket with the methods of an SSLSocket by which frames travel."""

    __slots__ = ()

    def write(self, data: Buffer) -> int:
        return self.send(data)

    def gather(self, parts: Sequence[Buffer]) -> int:
        """Send as much of `parts` as there is room for, with one call; returns the number of bytes."""
        return self.sendmsg(parts)

    @property
    def at_once(self) -> int:
        """How many bytes are taken without waiting whenever the socket is ready for writing.

        Linux says that a Unix socket is, while at most a quarter of its buffer is in use (unix_writable in
        net/unix/af_unix.c), and counts its own overhead, some per cent, into that.
        """
        return min(self.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2, _AT_ONCE)

    def read(self, size: int, buffer: memoryview) -> int:
        return self.recv_into(buffer, size)


Connection: TypeAlias = ssl.SSLSocket | TlsSocket | LocalSocket
"""What frames travel on. OpenSSL's own socket does as well: the other end need not be ours."""


class _Words(NamedTuple):
    """What an invitation says: the socket's name, what the guest says, what the host answers."""

    name: str
    guest: bytes
    host: bytes

    @property
    def text(self) -> bytes:
        return b"local %s %s %s" % (self.name.encode(), self.guest, self.host)


def _parse(text: bytes) -> _Words | None:
    """A name is nothing but hexadecimal digits: it leads nowhere outside our own directory."""
    found = _INVITATION.fullmatch(text)
    return None if found is None else _Words(found[1].decode(), found[2], found[3])


@dataclass(slots=True, eq=False)
class Invitation:
    """A listening Unix socket for one guest."""

    text: bytes
    _words: _Words
    _listening: socket.socket
    _uid: int

    def accept(self) -> LocalSocket:
        """The guest, who must be there already. Others are shown out.

        Raises:
            HandshakeError: only others came.
            OSError: nobody came in time.
        """
        self._listening.settimeout(_ACCEPT_SECONDS)
        for _ in range(8):
            connection, _address = self._listening.accept()
            with ExitStack() as undo:
                guest = undo.enter_context(_adopted(connection))
                guest.settimeout(_ACCEPT_SECONDS)
                if _user_of(guest) != self._uid or not _says(guest, self._words.guest):
                    continue
                guest.sendall(self._words.host)
                guest.settimeout(None)
                undo.pop_all()
                return guest
        raise HandshakeError("on the Unix socket only strangers came")


@dataclass(slots=True, eq=False)
class Guest:
    """Connected to somebody's invitation; `confirm` before use."""

    connection: LocalSocket
    _words: _Words

    def confirm(self) -> LocalSocket:
        """The connection, once the host has proven itself. Closes it otherwise.

        Raises:
            HandshakeError: somebody else listens there.
            OSError: no answer.
        """
        with ExitStack() as undo:
            undo.callback(self.connection.close)
            if not _says(self.connection, self._words.host):
                raise HandshakeError("the other end of the Unix socket is not the peer that invited us there")
            self.connection.settimeout(None)
            undo.pop_all()
        return self.connection


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalMeeting:
    """Where the processes of one user meet.

    Args:
        directory: made with mode 0700 where there is none. Both ends must use the same.
        uid: of the user; nobody else gets a lane.
    """

    directory: Path = field(default_factory=lambda: default_directory(os.geteuid()))
    uid: int = field(default_factory=os.geteuid)

    @contextmanager
    def invite(self, tls: TlsSocket) -> Iterator[Invitation | None]:
        """An invitation for the peer behind `tls`, until the end of the block; None where it cannot be met here."""
        with ExitStack() as undo:
            yield self._listen(undo) if _same_machine(tls) and self.unavailable() is None else None

    def unavailable(self) -> Unavailable | None:
        """Why lanes of this machine stay TLS, if they do. Makes the directory."""
        if _PEER_CREDENTIALS is None:
            return Unavailable(reason="this system does not say which user is at the other end of a Unix socket")
        try:
            with suppress(FileExistsError):
                self.directory.mkdir(mode=0o700)
            found = self.directory.lstat()
        except OSError as error:
            return Unavailable(reason=f"{self.directory} cannot be used: {error}")
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != self.uid or stat.S_IMODE(found.st_mode) & 0o077:
            return Unavailable(
                reason=f"{self.directory} has mode {stat.filemode(found.st_mode)} and user {found.st_uid}; "
                f"expected drwx------ and user {self.uid}"
            )
        return None

    def _listen(self, undo: ExitStack) -> Invitation | None:
        words = _Words(secrets.token_hex(16), secrets.token_hex(32).encode(), secrets.token_hex(32).encode())
        path = self.directory / words.name
        try:
            listening = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listening.bind(str(path))
            undo.callback(path.unlink, missing_ok=True)
            listening.listen()
        except OSError:
            return None  # a path that is too long, no file descriptor left: TLS does it too
        return Invitation(words.text, words, listening, self.uid)

    def join(self, tls: TlsSocket, text: bytes, seconds: float) -> Guest | None:
        """Accept the invitation of the peer behind `tls`; None where it is none, or cannot be followed."""
        words = _parse(text)
        if words is None or not _same_machine(tls) or self.unavailable() is not None:
            return None
        with ExitStack() as undo:
            try:
                guest = undo.enter_context(LocalSocket(socket.AF_UNIX, socket.SOCK_STREAM))
                guest.settimeout(seconds)
                guest.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
                guest.connect(str(self.directory / words.name))
                if _user_of(guest) != self.uid:
                    return None
                guest.sendall(words.guest)
            except OSError:
                return None  # another mount namespace, another machine behind a tunnel
            undo.pop_all()
        return Guest(guest, words)


def default_directory(uid: int) -> Path:
    """Of this user, where temporary files are."""
    return Path(tempfile.gettempdir()) / f"distensor-{uid}"


def _same_machine(tls: TlsSocket) -> bool:
    """Whether both ends have one address. Not proof, but a peer elsewhere is not even asked."""
    return bool(tls.getsockname()[0] == tls.getpeername()[0])


def _adopted(connection: socket.socket) -> LocalSocket:
    adopted = LocalSocket(connection.family, connection.type, fileno=connection.detach())
    adopted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
    return adopted


def _user_of(connection: socket.socket) -> int:
    """Who was at the other end when it connected or listened, according to the kernel."""
    assert _PEER_CREDENTIALS is not None, "unavailable() comes first"
    found = connection.getsockopt(socket.SOL_SOCKET, _PEER_CREDENTIALS, _UCRED.size)
    return int(_UCRED.unpack(found)[1])


def _says(connection: socket.socket, secret: bytes) -> bool:
    """Whether the next bytes are `secret`; no more is read, since frames follow."""
    said = b""
    while len(said) < len(secret):
        piece = connection.recv(len(secret) - len(said))
        if not piece:
            return False
        said += piece
    return hmac.compare_digest(said, secret)
