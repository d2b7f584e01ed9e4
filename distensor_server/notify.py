"""sd_notify in a few lines: tells systemd how the service is doing. Does nothing outside systemd."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping


class Notifier:
    """Sends state to the socket that NOTIFY_SOCKET names."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # '@' stands for the zero byte of Linux's abstract sockets.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog = _watchdog_seconds(environment, os.getpid())
        self._last_status = ""

    @property
    def watchdog_interval(self) -> float | None:
        """How often to call `alive`: half of what systemd allows. None when it does not watch."""
        return self._watchdog / 2 if self._address and self._watchdog else None

    def ready(self) -> None:
        self._send("READY=1")

    def status(self, text: str) -> None:
        """One line for `systemctl status`; the same line again is not sent."""
        if text != self._last_status:
            self._last_status = text
            self._send("STATUS=" + " ".join(text.split()))  # a newline would begin another assignment

    def alive(self) -> None:
        self._send("WATCHDOG=1")

    def stopping(self, seconds: float) -> None:
        """The end may take `seconds`, also where TimeoutStopSec= says less: the owner set how long to drain."""
        self._send(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    def reloading(self, monotonic: float) -> None:
        self._send(f"RELOADING=1\nMONOTONIC_USEC={int(monotonic * 1e6)}")

    def _send(self, text: str) -> None:
        if not self._address:
            return
        # A service manager that went away is no reason to stop working.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(text.encode(), self._address)


def _watchdog_seconds(environment: Mapping[str, str], pid: int) -> float:
    """WATCHDOG_PID says for which process the limit is; a shell of the service may have handed it on to us."""
    try:
        if int(environment.get("WATCHDOG_PID", pid)) != pid:
            return 0.0
        return int(environment.get("WATCHDOG_USEC", "")) / 1e6
    except ValueError:
        return 0.0
