"""TLS contexts of the data plane, and who the other end is.

Both ends show a certificate of the job's authority whose SAN URI names (job, epoch, rank). Host names play no part:
workers move between addresses, and a certificate is bound to a place in the job, not to a machine.
"""

from __future__ import annotations

import secrets
import ssl
import tempfile
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization

from distensor.core.errors import HandshakeError
from distensor.core.ids import parse_data_plane_uri
from distensor.transport.types import Credentials, PeerId


def server_context(credentials: Credentials) -> ssl.SSLContext:
    context = _context(ssl.PROTOCOL_TLS_SERVER, credentials)
    # Nobody resumes: tickets would only be unread bytes on connections that carry data one way.
    context.num_tickets = 0
    return context


def client_context(credentials: Credentials) -> ssl.SSLContext:
    return _context(ssl.PROTOCOL_TLS_CLIENT, credentials)


def _context(protocol: int, credentials: Credentials) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=credentials.authority_pem)
        _load_own(context, credentials)
    except (ssl.SSLError, ValueError, TypeError) as error:
        raise HandshakeError(f"our own data-plane credentials cannot be used: {error}") from error
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


def peer_identity(tls: ssl.SSLSocket) -> PeerId:
    """Who the other end of a finished handshake is.

    Raises:
        HandshakeError: its certificate does not name exactly one place on the data plane.
    """
    certificate: Any = tls.getpeercert() or {}
    uris = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
    if len(uris) != 1:
        raise HandshakeError(f"the peer's certificate has {len(uris)} SAN URIs; expected exactly one")
    job_id, epoch, rank = parse_data_plane_uri(uris[0])
    return PeerId(job_id=job_id, epoch=epoch, rank=rank)


def check_identity(found: PeerId, *, me: PeerId) -> None:
    """Raise HandshakeError unless `found` belongs to our job and epoch."""
    if (found.job_id, found.epoch) != (me.job_id, me.epoch):
        raise HandshakeError(f"the peer is {found.uri}; expected a place of job {me.job_id} in epoch {me.epoch}")
