"""What the operator chose for the HTTP side."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from distensor.comm.address import HubAddress, is_loopback
from distensor.core.errors import ConfigError

LARGEST_BODY = 64 * 1024
"""Bytes of a request; the largest that is meant to come has some hundred."""
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?|[0-9A-Fa-f:.]{2,45}")
_ORIGIN = re.compile(r"https?://[A-Za-z0-9][A-Za-z0-9.-]{0,252}(:[0-9]{1,5})?")


@dataclass(frozen=True, kw_only=True, slots=True)
class TlsFiles:
    """PEM files: the certificate with its chain, and the private key."""

    certificate: Path
    key: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class CloudSettings:
    """Raises: ConfigError: keys would travel in the clear, or a host or an origin is not one."""

    listen: HubAddress
    hosts: tuple[str, ...] = ()
    """By which names callers may speak of this API, beside the address that it listens on and those of loopback."""
    origins: tuple[str, ...] = ()
    """Pages of which web sites may call it from a browser."""
    tls: TlsFiles | None = None
    proxies: tuple[str, ...] = ()
    """Addresses of proxies in front, whose word for who called is taken."""
    plain: bool = False
    """Whether something in front speaks TLS, so that this may listen without it beyond loopback."""
    open_metrics: bool = False
    """Whether /metrics answers without a key."""

    def __post_init__(self) -> None:
        if self.tls is None and not self.plain and not is_loopback(self.listen.host):
            raise ConfigError(
                f"--http {self.listen}: keys would travel unencrypted; give --tls-certificate and --tls-key, "
                "or --plain-http where a proxy in front speaks TLS"
            )
        for host in self.hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(f"--http-host {host[:100]!r}: expected a host name or an address, without a port")
        for origin in self.origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(f"--cors-origin {origin[:100]!r}: expected scheme://host or scheme://host:port")

    @property
    def known_hosts(self) -> frozenset[str]:
        """In lower case, without brackets."""
        own = () if self.listen.host in ("0.0.0.0", "::") else (self.listen.host,)  # noqa: S104  # compared, not bound
        return frozenset(host.lower() for host in (*LOOPBACK_NAMES, *own, *self.hosts))
