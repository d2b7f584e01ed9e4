"""TLS contexts of the data plane, and who the other end is.

Both ends show a certificate of the job's authority whose SAN URI names (job, epoch, rank). Host names play no part:
workers move between addresses, and a certificate is bound to a place in the job, not to a machine.

Wall clocks play no part either: those of consumer machines are off by hours, and the hub's may jump. All certificates
of a membership are signed at one moment, so ours says what time it was for the hub, and from there on the monotonic
clock counts (decision 7).
"""

from __future__ import annotations

import secrets
import ssl
import tempfile
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from distensor.core.clock import SYSTEM_CLOCK, Clock
from distensor.core.errors import HandshakeError
from distensor.core.ids import parse_data_plane_uri
from distensor.transport.tls_sockets import TlsSocket
from distensor.transport.types import Credentials, PeerId

SIGNED_WITHIN = 300.0
"""Seconds by which a peer's certificate may begin after ours."""
_NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME of OpenSSL, which the ssl module has no name for: `PlaneContext` looks at the time."""


class PlaneContext(ssl.SSLContext):
    """A context that knows since when its own certificate is valid, and when that was for the clock here."""

    signed_at: float
    """Seconds since 1970 of the hub's clock."""
    received_at: float
    """Seconds of `clock.since_boot`."""
    clock: Clock

    def hub_time(self) -> float:
        """What time it is by the clock that signed the certificates."""
        return self.signed_at + max(0.0, self.clock.since_boot() - self.received_at)


def server_context(credentials: Credentials, clock: Clock = SYSTEM_CLOCK) -> PlaneContext:
    """Raises: HandshakeError: the credentials cannot be used."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, credentials, clock)
    # Nobody resumes: tickets would only be unread bytes on connections that carry data one way.
    context.num_tickets = 0
    return context


def client_context(credentials: Credentials, clock: Clock = SYSTEM_CLOCK) -> PlaneContext:
    """Raises: HandshakeError: the credentials cannot be used."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, credentials, clock)


def _context(protocol: int, credentials: Credentials, clock: Clock) -> PlaneContext:
    context = PlaneContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags = ssl.VerifyFlags(context.verify_flags | _NO_CHECK_TIME)
    try:
        context.load_verify_locations(cadata=credentials.authority_pem)
        _load_own(context, credentials)
        own = x509.load_pem_x509_certificate(credentials.certificate_pem.encode())
    except (ssl.SSLError, ValueError, TypeError) as error:
        raise HandshakeError(f"our own data-plane credentials cannot be used: {error}") from error
    context.clock, context.received_at = clock, clock.since_boot()
    context.signed_at = own.not_valid_before_utc.timestamp()
    return context


def _load_own(context: ssl.SSLContext, credentials: Credentials) -> None:
    """Hand our key to OpenSSL, which takes it from a file only.

    The file holds the key encrypted under a password that exists in this call alone, in a folder of mode 0700, and
    is gone when the call ends; so not even a crash in between leaves a usable key on disk.
    """
    password = secrets.token_bytes(32).hex().encode()
    key = serialization.load_pem_private_key(credentials.key_pem, password=None)
    sealed = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    )
    with tempfile.TemporaryDirectory(prefix="distensor-") as folder:
        path = Path(folder) / "own.pem"
        path.touch(mode=0o600)
        path.write_bytes(sealed + b"\n" + credentials.certificate_pem.encode())
        context.load_cert_chain(path, password=password)


def peer_identity(tls: ssl.SSLSocket | TlsSocket) -> PeerId:
    """Who the other end of a finished handshake is.

    Raises:
        HandshakeError: its certificate does not name exactly one place on the data plane, or is not valid now.
    """
    try:
        certificate: Any = tls.getpeercert() or {}
    except (ValueError, ssl.SSLError) as error:  # ValueError: text that is no UTF-8
        raise HandshakeError(f"the peer's certificate cannot be read ({type(error).__name__})") from error
    uris = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
    if len(uris) != 1:
        raise HandshakeError(f"the peer's certificate has {len(uris)} SAN URIs; expected exactly one")
    job_id, epoch, rank = parse_data_plane_uri(uris[0])
    _check_valid(certificate, tls.context)
    return PeerId(job_id=job_id, epoch=epoch, rank=rank)


def _check_valid(certificate: Any, context: ssl.SSLContext) -> None:
    if not isinstance(context, PlaneContext):
        raise HandshakeError("the connection was made without a context of the data plane")
    now, (begins, ends) = context.hub_time(), _life_of(certificate)
    if now >= ends:
        until = certificate["notAfter"]
        raise HandshakeError(f"the peer's certificate is expired: it was valid until {until}, by the hub's clock")
    if now + SIGNED_WITHIN < begins:
        since = certificate["notBefore"]
        raise HandshakeError(
            f"the peer's certificate is not valid yet: it begins {since}, more than {SIGNED_WITHIN:g} s after ours"
        )


def _life_of(certificate: Any) -> tuple[int, int]:
    try:
        return ssl.cert_time_to_seconds(certificate["notBefore"]), ssl.cert_time_to_seconds(certificate["notAfter"])
    except (KeyError, ValueError, OverflowError) as error:
        raise HandshakeError(f"the peer's certificate has no dates that can be read: {error}") from error


def is_of_another_time(found: PeerId, *, me: PeerId, later: bool) -> bool:
    """Whether `found` belongs to a later (or, not `later`, an earlier) epoch of our job."""
    return found.job_id == me.job_id and (found.epoch > me.epoch if later else found.epoch < me.epoch)


def check_identity(found: PeerId, *, me: PeerId) -> None:
    """Raise HandshakeError unless `found` belongs to our job and epoch."""
    if (found.job_id, found.epoch) != (me.job_id, me.epoch):
        raise HandshakeError(f"the peer is {found.uri}; expected a place of job {me.job_id} in epoch {me.epoch}")
