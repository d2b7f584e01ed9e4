"""What a relay and those who use it say before it forwards bytes: lines of JSON, at most `LONGEST` bytes each.

    relay:   {"v": 1, "nonce": "<64 hexadecimal digits>"}
    member:  {"v": 1, "role": "park" | "dial", "to": rank, "certificate": PEM, "signature": hexadecimal}
    relay:   {"parked": true}    the member's place in the queue of those that are dialed
    relay:   {"joined": true}    from here on every byte is the other member's; or {"error": "why not"}

A member shows the certificate that its hub signed for (job, epoch, rank) and signs the nonce with its key: there is no
secret to give to a relay. The relay joins members of one job and epoch only. What they then say is TLS between them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from distensor.core.errors import AuthenticationError, HandshakeError, HubProtocolError
from distensor.core.ids import Epoch, JobId, Rank, parse_data_plane_uri

VERSION = 1
LONGEST = 8192
NONCE_BYTES = 32
SKEW_SECONDS = 3600.0
"""A certificate counts for so much longer at both ends: relay and hub have clocks of their own."""
_CONTEXT = b"distensor relay 1\n"


class Role(StrEnum):
    """`park` waits to be dialed; `dial` reaches one that is parked."""

    PARK = "park"
    DIAL = "dial"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Who a member is."""

    job_id: JobId
    epoch: Epoch
    rank: Rank


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What a proven member wants. `to` is the rank that it dials; its own when it parks."""

    member: Place
    role: Role
    to: Rank

    @property
    def meeting(self) -> Place:
        """Where the two meet: the place of the one that is dialed."""
        return Place(job_id=self.member.job_id, epoch=self.member.epoch, rank=self.to)


def write_line(said: dict[str, Any]) -> bytes:
    return json.dumps(said, separators=(",", ":")).encode() + b"\n"


def read_line(line: bytes) -> dict[str, Any]:
    """Raises HubProtocolError: it is no line of this protocol."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or not line.endswith(b"\n"):
        raise HubProtocolError(f"{line[:80]!r} is no line of the relay's protocol")
    return said


def _is_ours(said: dict[str, Any]) -> bool:
    version = said.get("v")
    return type(version) is int and version == VERSION


def read_nonce(said: dict[str, Any]) -> bytes:
    """Raises HubProtocolError: another version, or no nonce."""
    try:
        nonce = bytes.fromhex(said.get("nonce", ""))
    except (TypeError, ValueError):
        nonce = b""
    if not _is_ours(said) or len(nonce) != NONCE_BYTES:
        raise HubProtocolError(f"not the greeting of a relay of version {VERSION}: {str(said)[:80]}")
    return nonce


def write_wish(role: Role, to: int, nonce: bytes, certificate_pem: str, key_pem: bytes) -> bytes:
    """The member's line."""
    key = serialization.load_pem_private_key(key_pem, password=None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)  # hubs sign no others
    signature = key.sign(_signed(role, to, nonce), ec.ECDSA(hashes.SHA256()))
    words = {"v": VERSION, "role": role.value, "to": to, "certificate": certificate_pem, "signature": signature.hex()}
    return write_line(words)


def read_wish(line: bytes, nonce: bytes, authority: x509.Certificate, now: float) -> Wish:
    """Who the member is, proven, and what it wants. `now` is seconds since 1970.

    Raises:
        HubProtocolError: not a line of this protocol.
        AuthenticationError: the certificate is not of this authority, is not valid now, or is somebody else's.
    """
    said = read_line(line)
    try:
        role, to, signature = Role(said["role"]), said["to"], bytes.fromhex(said["signature"])
        certificate = x509.load_pem_x509_certificate(said["certificate"].encode())
        if not _is_ours(said) or type(to) is not int or not 0 <= to < 1 << 31:
            raise ValueError
    except (KeyError, TypeError, ValueError, AttributeError, x509.InvalidVersion) as error:
        raise HubProtocolError("not the wish of a member: role, to, certificate and signature are expected") from error
    member = _proven(certificate, authority, signature, _signed(role, to, nonce), now)
    if role is Role.PARK and to != member.rank:
        raise AuthenticationError(f"rank {member.rank} may not be dialed as rank {to}")
    return Wish(member=member, role=role, to=Rank(to))


def _signed(role: Role, to: int, nonce: bytes) -> bytes:
    return _CONTEXT + f"{role.value} {to}\n".encode() + nonce


def _proven(
    certificate: x509.Certificate, authority: x509.Certificate, signature: bytes, message: bytes, now: float
) -> Place:
    try:
        certificate.verify_directly_issued_by(authority)
        key = certificate.public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise AuthenticationError("the certificate has no key of the kind that a hub signs")
        key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
        raise AuthenticationError("the certificate is not of this relay's hub, or not the member's own") from error
    begin, end = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    if not begin - SKEW_SECONDS <= now <= end + SKEW_SECONDS:
        raise AuthenticationError(f"the certificate is valid from {begin:.0f} to {end:.0f}; here it is {now:.0f}")
    return _place(certificate)


def _place(certificate: x509.Certificate) -> Place:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        (uri,) = names.get_values_for_type(x509.UniformResourceIdentifier)
        job_id, epoch, rank = parse_data_plane_uri(uri)
    except (x509.ExtensionNotFound, ValueError, HandshakeError) as error:
        raise AuthenticationError("the certificate names no place of a job") from error
    return Place(job_id=job_id, epoch=epoch, rank=rank)
