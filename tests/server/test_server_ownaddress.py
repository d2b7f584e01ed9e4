"""Where peers reach this machine's workers, found out instead of asked for."""

from __future__ import annotations

import pytest

from distensor.comm.address import HubAddress
from distensor_server.config import AUTO
from distensor_server.ownaddress import LOOPBACK, OwnAddress, address_towards


def test_a_chosen_address_is_taken_as_it_is() -> None:
    address = OwnAddress("192.168.1.20", lambda: "hub.example:1", towards=lambda _hub: pytest.fail("nobody asked"))
    assert (address.current, address.look(), address.current) == ("192.168.1.20",) * 3


def test_the_way_to_the_hub_says_it_and_what_cannot_be_found_out_leaves_the_one_before() -> None:
    ways: list[str | OSError] = ["10.0.0.7", OSError(101, "Network is unreachable"), "192.168.1.9"]
    asked: list[HubAddress] = []

    def towards(hub: HubAddress) -> str:
        asked.append(hub)
        way = ways.pop(0)
        if isinstance(way, OSError):
            raise way
        return way

    address = OwnAddress(AUTO, lambda: "hub.example:50051", towards)
    assert address.current == LOOPBACK  # nothing listens to the world before there is a hub
    assert [address.look() for _ in range(3)] == ["10.0.0.7", "10.0.0.7", "192.168.1.9"]
    assert address.current == "192.168.1.9"
    assert asked == [HubAddress(host="hub.example", port=50051)] * 3


@pytest.mark.parametrize("hub", ["", "nonsense", "127.0.0.1:50051", "localhost:50051", "[::1]:50051"])
def test_without_a_hub_elsewhere_it_is_loopback(hub: str) -> None:
    assert OwnAddress(AUTO, lambda: hub, towards=lambda _hub: pytest.fail("nobody asked")).look() == LOOPBACK


def test_the_system_is_asked_without_a_packet() -> None:
    assert address_towards(HubAddress(host="127.0.0.1", port=9)) == "127.0.0.1"
