"""Connections that have said nothing yet: each costs a descriptor, none a thread."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

from distensor.transport.listener import Listener

MOST_SILENT = 128
"""With one more, the one that has been silent for longest goes."""


class Doorstep:
    """Takes connections from a listener and gives on those that have begun to speak. For one thread."""

    def __init__(self, listener: Listener, wake: socket.socket) -> None:
        self._listener = listener
        self._wake = wake
        self._silent: dict[int, tuple[socket.socket, float]] = {}
        self._poll = select.poll()
        self._poll.register(wake, select.POLLIN)

    def spoken(self, timeout: float, now: float, patience: float) -> Iterator[tuple[socket.socket, float]]:
        """Wait for up to `timeout` seconds; each connection that speaks now, and when it came.

        Those that came more than `patience` seconds before `now` and are silent still are closed.
        """
        ready = self._wait(timeout)
        for descriptor in ready & self._silent.keys():
            yield self._give(descriptor)
        if self._listener.fileno() in ready:
            self._take_all(now)
        for descriptor, (_, since) in list(self._silent.items()):
            if now - since > patience:
                self._give(descriptor)[0].close()

    def close(self) -> None:
        """Close whatever is still silent."""
        for descriptor in list(self._silent):
            self._give(descriptor)[0].close()

    def _wait(self, timeout: float) -> set[int]:
        listening = self._listener.fileno()
        if listening >= 0:
            self._poll.register(listening, select.POLLIN)  # again and again: the same number is the same entry
        return {descriptor for descriptor, _ in self._poll.poll(timeout * 1000)}

    def _take_all(self, now: float) -> None:
        while (connection := self._listener.take(self._wake)) is not None:
            if len(self._silent) >= MOST_SILENT:
                self._give(next(iter(self._silent)))[0].close()
            self._silent[connection.fileno()] = connection, now
            self._poll.register(connection, select.POLLIN)

    def _give(self, descriptor: int) -> tuple[socket.socket, float]:
        self._poll.unregister(descriptor)
        return self._silent.pop(descriptor)
