"""Addresses and the proxies that must not sit in front of them."""

from __future__ import annotations

import pytest

from distensor.comm.address import (
    HubAddress,
    host_of_peer,
    is_local,
    is_loopback,
    parse_address,
    proxy_in_the_way,
    without_user,
)
from distensor.core.errors import ConfigError


@pytest.mark.parametrize("text", ["127.0.0.1:50051", "hub.example.org:1", "[::1]:65535", "localhost:80"])
def test_an_address_survives_its_text(text: str) -> None:
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", ":", "host", "host:", ":1", "host:0", "host:65536", "host:auto", "host:1e3", "::1:5", "host:-1", "h:٣"],
)
def test_what_is_no_address_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_address(text)
    assert repr(text) in str(caught.value)


def test_port_zero_is_for_listening_only() -> None:
    assert parse_address("127.0.0.1:0", allow_port_zero=True) == HubAddress(host="127.0.0.1", port=0)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "::1", "10.1.2.3", "192.168.0.9", "localhost", "fe80::1%eth0", "nas.local"]
)
def test_this_machine_and_its_network_are_local(host: str) -> None:
    assert is_local(host)


@pytest.mark.parametrize("host", ["93.184.216.34", "hub.example.org", "2606:4700::1111"])
def test_others_are_not(host: str) -> None:
    assert not is_local(host)


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:192.0.2.1:50051", "192.0.2.1"),
        ("ipv6:%5B2001:db8::1%5D:50051", "2001:db8::1"),
        ("ipv6:[::1]:5", "::1"),
        ("unix:/tmp/socket", ""),
        ("ipv4:nonsense:5", ""),
        ("", ""),
    ],
)
def test_the_other_end_as_grpc_writes_it(peer: str, host: str) -> None:
    assert host_of_peer(peer) == host


def test_loopback_is_told_from_the_network() -> None:
    hosts = ("127.0.0.1", "::1", "localhost", "127.8.8.8", "192.168.0.9", "0.0.0.0", "hub.example.org")
    assert [is_loopback(host) for host in hosts] == [True] * 4 + [False] * 3


def test_a_proxy_is_blamed_only_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy:9")
    assert proxy_in_the_way("127.0.0.1") is None
    assert proxy_in_the_way("hub.example.org") == "https_proxy=http://proxy:9"


@pytest.mark.parametrize(
    ("url", "left"),
    [
        ("http://proxy:9", "http://proxy:9"),
        ("proxy:9/path?x", "proxy:9/path?x"),
        ("", ""),
        ("http://ann:s3cret@proxy:9/", "http://proxy:9"),
        ("http://ann:s3@cr/et?#@proxy:9/x", "http://proxy:9"),
        ("ann:s3cret@proxy:9", "proxy:9"),
        ("http:/ann:s3cret@proxy", "proxy"),
        ("socks5h://s3cret@[::1]:9", "socks5h://[::1]:9"),
        ("http://ann:s3cret@", "http://"),
    ],
)
def test_of_a_proxy_only_its_place_is_told(url: str, left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert without_user(url) == left
    monkeypatch.setenv("HTTPS_PROXY", url)
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert proxy_in_the_way("hub.example.org") == (f"HTTPS_PROXY={left}" if url else None)
