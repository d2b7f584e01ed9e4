"""The port that peers dial. It exists before the certificate does: its number is part of asking for one."""

from __future__ import annotations

import select
import socket
import threading
from contextlib import suppress

from distensor.core.errors import ConfigError
from distensor.transport.types import Address

_BACKLOG = 128
_PAUSE = 0.05


class Listener:
    """A bound, listening TCP socket."""

    __slots__ = ("_socket", "address")

    def __init__(self, bound: socket.socket) -> None:
        self._socket = bound
        host, port = bound.getsockname()[:2]
        self.address = Address(host=host, port=port)

    @classmethod
    def bind(cls, host: str, port: int = 0) -> Listener:
        """Listen on `host`; port 0 takes a free one.

        Raises:
            ConfigError: the address is taken, or is none of this machine.
        """
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            both = host == "::" and socket.has_dualstack_ipv6()  # all interfaces means IPv4 too
            bound = socket.create_server((host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {Address(host=host, port=port)}: {error}; choose an address of this machine and a "
                "free port (0 takes any)"
            ) from error
        bound.setblocking(False)
        return cls(bound)

    @classmethod
    def bind_one(cls, host: str, ports: tuple[int, int] | None) -> Listener:
        """Listen on `host`, on the first port from `ports[0]` to `ports[1]` that is free; None takes any.

        Raises:
            ConfigError: none is free, or the address is none of this machine.
        """
        if ports is None:
            return cls.bind(host)
        first, last = ports
        for port in range(first, last):
            with suppress(ConfigError):
                return cls.bind(host, port)
        try:
            return cls.bind(host, last)
        except ConfigError as error:
            raise ConfigError(f"no port from {first} to {last} is free at {host}: {error}") from error

    def fileno(self) -> int:
        """The descriptor to wait on; -1 once it is closed."""
        return self._socket.fileno()

    def take(self, wake: socket.socket) -> socket.socket | None:
        """A connection that has come already; None when there is none, or it went away again."""
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return None
        except OSError:
            # Gone before we took it, no file descriptor left, or closed by its owner: none ends the watching, and
            # none may make it spin.
            select.select([wake], [], [], _PAUSE)
            return None
        connection.setblocking(True)
        return connection

    def close(self) -> None:
        self._socket.close()


class WakeUp:
    """Makes a thread in `Listener.accept` return."""

    __slots__ = ("_lock", "_ours", "receiver")

    def __init__(self) -> None:
        self._ours, self.receiver = socket.socketpair()
        self._lock = threading.Lock()

    def set(self) -> None:
        with self._lock:
            if self._ours.fileno() >= 0:
                self._ours.close()

    def close(self) -> None:
        self.set()
        self.receiver.close()
