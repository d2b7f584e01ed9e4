"""At which addresses the hub is told to reach a node's workers."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distensor.core.errors import ConfigError
from distensor_server.addresses import MOST_ADDRESSES, candidates, read_interfaces
from distensor_server.config import Settings


def interfaces() -> dict[str, list[Any]]:
    def entry(family: int, address: str) -> Any:
        return SimpleNamespace(family=family, address=address)

    return {
        "lo": [entry(socket.AF_INET, "127.0.0.1"), entry(socket.AF_INET6, "::1")],
        "eth0": [
            entry(17, "02:fc:00:00:00:01"),
            entry(socket.AF_INET6, "2001:db8::5"),
            entry(socket.AF_INET6, "fe80::1%eth0"),
            entry(socket.AF_INET, "192.168.1.5"),
        ],
        "eth1": [entry(socket.AF_INET, "169.254.3.4"), entry(socket.AF_INET, "10.0.0.7")],
    }


@pytest.mark.parametrize(
    ("host", "advertise", "found"),
    [
        ("127.0.0.1", (), ("127.0.0.1",)),
        ("192.168.1.5", (), ("192.168.1.5",)),
        ("192.168.1.5", ("203.0.113.9", "192.168.1.5"), ("203.0.113.9", "192.168.1.5")),
        ("0.0.0.0", (), ("192.168.1.5", "10.0.0.7", "2001:db8::5")),
        ("::", ("home.example.org",), ("home.example.org", "192.168.1.5", "10.0.0.7", "2001:db8::5")),
    ],
)
def test_the_likeliest_come_first(host: str, advertise: tuple[str, ...], found: tuple[str, ...]) -> None:
    assert candidates(host, advertise, interfaces) == found


def test_a_machine_without_a_network_says_itself_and_one_with_many_says_some() -> None:
    assert candidates("::", (), dict) == ("127.0.0.1",)
    assert len(candidates("::", [f"10.0.0.{n}" for n in range(99)], interfaces)) == MOST_ADDRESSES


def test_the_interfaces_of_this_machine_are_read() -> None:
    found = [entry.address for entries in read_interfaces().values() for entry in entries]
    assert "127.0.0.1" in found


@pytest.mark.parametrize("wrong", ["", "a b", "h" * 65])
def test_an_address_that_is_none_is_refused(wrong: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--advertise"):
        Settings(state_dir=tmp_path, socket_path=tmp_path / "s", name="a", advertise=(wrong,))
