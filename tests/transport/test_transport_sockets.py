"""How connections of the data plane are set up."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from distensor.transport.sockets import prepare


class Recorder:
    """A socket to `host` that notes its options; one that it does not offer is an OSError, as of the kernel."""

    def __init__(self, host: str, *, refuses: bool = False) -> None:
        self.host, self.refuses = host, refuses
        self.options: list[tuple[int, Any]] = []

    def getpeername(self) -> tuple[str, int]:
        return self.host, 1

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        assert level == socket.IPPROTO_TCP
        if self.refuses and isinstance(value, bytes):
            raise OSError(2, "not offered")
        self.options.append((option, value))


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="this system lets nobody choose the algorithm")
@pytest.mark.parametrize(
    ("host", "refuses", "chosen"),
    [
        ("203.0.113.5", False, [b"bbr"]),
        ("fe80::1%eth0", False, [b"bbr"]),
        ("203.0.113.5", True, []),
        ("127.0.0.1", False, []),
        ("::1", False, []),
    ],
)
def test_a_lossy_line_is_measured_where_the_system_offers_it(host: str, refuses: bool, chosen: list[bytes]) -> None:
    raw: Any = Recorder(host, refuses=refuses)
    prepare(raw)
    assert raw.options[0] == (socket.TCP_NODELAY, 1)
    assert [value for option, value in raw.options[1:] if option == socket.TCP_CONGESTION] == chosen


def test_a_real_connection_takes_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as raw:
        prepare(raw)
        assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
