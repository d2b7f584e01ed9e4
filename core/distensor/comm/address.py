"""Addresses of hubs: "host:port", with IPv6 hosts in brackets."""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
from dataclasses import dataclass
from urllib.parse import unquote

from distensor.core.errors import ConfigError

PROXY_VARIABLES = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY")
_PORT = re.compile(r"[0-9]{1,5}")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://")


@dataclass(frozen=True, kw_only=True, slots=True)
class HubAddress:
    """Where a hub listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, *, allow_port_zero: bool = False) -> HubAddress:
    """Read "host:port".

    Raises:
        ConfigError: no host, no port, or a port outside 1 to 65535.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    lowest = 0 if allow_port_zero else 1
    if not host or not _PORT.fullmatch(port) or not lowest <= int(port) <= 65535:
        raise ConfigError(f"address {text[:200]!r}: expected host:port with a port from {lowest} to 65535")
    if ":" in host and not text.startswith("["):
        raise ConfigError(f"address {text[:200]!r}: write an IPv6 host in brackets, for example [::1]:50051")
    return HubAddress(host=host, port=int(port))


def host_of_peer(peer: str) -> str:
    """The address in gRPC's word for the other end ("ipv4:192.0.2.1:5", "ipv6:%5B::1%5D:5"); empty for any other."""
    kind, _, rest = unquote(peer).partition(":")
    host = rest.rpartition(":")[0].removeprefix("[").removesuffix("]")
    try:
        return str(ipaddress.ip_address(host.partition("%")[0])) if kind in ("ipv4", "ipv6") else ""
    except ValueError:
        return ""


def is_local(host: str) -> bool:
    """Whether `host` is this machine or its private network, where no HTTP proxy sits in between."""
    if host == "localhost" or host.endswith(".local"):
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_private
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def proxy_in_the_way(host: str) -> str | None:
    """A proxy variable for `host`, as "NAME=value"; None when there is none.

    Hubs are reached directly. Where that fails, the variable tells that this network may let only the proxy out.

    Of the value only what names the proxy: a user and a password may stand in it.
    """
    if is_local(host):
        return None
    for name in PROXY_VARIABLES:
        if value := os.environ.get(name):
            return f"{name}={without_user(value)}"
    return None


def without_user(url: str) -> str:
    """A URL without user and password, also where it is malformed; behind one, scheme, host and port are what is left.

    Passwords are often written as they are, so one may hold any character: the host begins behind the last @.
    """
    found = _SCHEME.match(url)
    scheme = found[0] if found else ""
    _, at, place = url[len(scheme) :].rpartition("@")
    return scheme + re.split(r"[/?#\s]", place, maxsplit=1)[0] if at else url


def address_argument(text: str) -> HubAddress:
    """An address on a command line; port 0 is any free one. Raises argparse.ArgumentTypeError."""
    try:
        return parse_address(text, allow_port_zero=True)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
