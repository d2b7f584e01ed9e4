"""Addresses of hubs: "host:port", with IPv6 hosts in brackets."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass

from distensor.core.errors import ConfigError

PROXY_VARIABLES = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY")


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
    if not host or not (port.isascii() and port.isdigit()) or not lowest <= int(port) <= 65535:
        raise ConfigError(f"address {text!r}: expected host:port with a port from {lowest} to 65535")
    if ":" in host and not text.startswith("["):
        raise ConfigError(f"address {text!r}: write an IPv6 host in brackets, for example [::1]:50051")
    return HubAddress(host=host, port=int(port))


def is_local(host: str) -> bool:
    """Whether `host` is this machine or its private network, so that no HTTP proxy may sit in between."""
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
    """The proxy variable that gRPC would obey for `host`, as "NAME=value"; None when there is none."""
    if is_local(host):
        return None
    for name in PROXY_VARIABLES:
        if value := os.environ.get(name):
            return f"{name}={value}"
    return None
