"""The hub's own certificate authority: made once, kept in the state directory, key readable by the owner only."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from distensor.comm.bootstrap import HUB_NAME, fingerprint_of
from distensor.comm.identity import data_plane_uri, private_key_pem
from distensor.comm.server import ServerIdentity
from distensor.core.clock import Clock
from distensor.core.errors import HubProtocolError, StoreError
from distensor.core.ids import Epoch, JobId, Rank

_DAY = datetime.timedelta(days=1)
_AUTHORITY_LIFE = 7300 * _DAY
_SERVER_LIFE = 3650 * _DAY
_MEMBER_LIFE = datetime.timedelta(hours=6)
"""It is looked at when connections are made, and they are made when a membership begins: longer jobs keep theirs."""
_SERVER_SKEW = 365 * _DAY
"""How far a node's clock may be behind the hub's, whose own may have jumped: trust is the pinned authority."""
_MEMBER_SKEW = datetime.timedelta()
"""None: a member reads from its own certificate what time it is for the hub (`transport.identity`)."""

_UNREADABLE = (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.InvalidVersion)
"""What `cryptography` raises for what a stranger may send as a request or certificate."""

_KEY_FILE = "authority.key"
_CERTIFICATE_FILE = "authority.pem"


class Authority:
    """Signs the hub's own certificate and those of jobs' members."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate, clock: Clock) -> None:
        self._key = key
        self._certificate = certificate
        self._clock = clock
        self._wall_at_zero = clock.now() - clock.monotonic()
        self.authority_pem = certificate.public_bytes(serialization.Encoding.PEM).decode()

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self._certificate.public_bytes(serialization.Encoding.DER))

    @classmethod
    def load_or_create(cls, directory: Path, clock: Clock) -> Authority:
        """Raises: StoreError: the files cannot be read or written, or do not belong together."""
        key_path, certificate_path = directory / _KEY_FILE, directory / _CERTIFICATE_FILE
        try:
            if not certificate_path.exists():
                _create(key_path, certificate_path, clock)
            key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
            certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
        except OSError as error:
            raise StoreError(f"{error.filename or directory}: {error.strerror}") from error
        except _UNREADABLE as error:
            raise StoreError(f"{key_path} or {certificate_path} is damaged; restore both from a backup") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise StoreError(f"{key_path} is not the key of {certificate_path}; restore both from a backup")
        return cls(key, certificate, clock)

    def server_identity(self) -> ServerIdentity:
        """A fresh key and certificate for the hub's server, with the authority behind it."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = self._builder(HUB_NAME, _SERVER_SKEW, _SERVER_LIFE).public_key(key.public_key())
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(HUB_NAME)]), critical=False)
        leaf = _sign(_as_leaf(builder, [ExtendedKeyUsageOID.SERVER_AUTH]), self._key)
        chain = leaf.public_bytes(serialization.Encoding.PEM) + self.authority_pem.encode()
        return ServerIdentity(key_pem=private_key_pem(key), chain_pem=chain)

    def sign(self, csr_pem: str, job_id: JobId, epoch: Epoch, rank: Rank) -> str:
        """A member's certificate. Only the key is taken from the request; the identity is the hub's word.

        Raises:
            HubProtocolError: the request cannot be read, is not signed by its own key, or is not P-256.
        """
        return self._sign_member(_public_key(csr_pem), data_plane_uri(job_id, epoch, rank))

    def sign_anew(self, certificate_pem: str, job_id: JobId, epoch: Epoch, rank: Rank) -> str:
        """A certificate over the key of one that we signed, with the life of one that is signed now.

        Raises:
            HubProtocolError: `certificate_pem` is none of ours.
        """
        try:
            old = x509.load_pem_x509_certificate(certificate_pem.encode())
            old.verify_directly_issued_by(self._certificate)
        except _UNREADABLE as error:
            raise HubProtocolError(f"the certificate of rank {rank} of job {job_id} is none of this hub") from error
        key = old.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)  # we sign no others
        return self._sign_member(key, data_plane_uri(job_id, epoch, rank))

    def _sign_member(self, key: ec.EllipticCurvePublicKey, uri: str) -> str:
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
        builder = self._builder("distensor-member", _MEMBER_SKEW, _MEMBER_LIFE)
        builder = builder.public_key(key).add_extension(names, critical=False)
        usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        signed = _sign(_as_leaf(builder, usage), self._key)
        return signed.public_bytes(serialization.Encoding.PEM).decode()

    def _builder(self, name: str, skew: datetime.timedelta, life: datetime.timedelta) -> x509.CertificateBuilder:
        # The wall clock of our start, carried on by the monotonic one: a clock that is set changes nothing.
        builder = _dated(name, self._wall_at_zero + self._clock.monotonic(), skew, life)
        key_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return builder.issuer_name(self._certificate.subject).add_extension(key_id, critical=False)


def _create(key_path: Path, certificate_path: Path, clock: Clock) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _dated("disTensor hub authority", clock.now(), _SERVER_SKEW, _AUTHORITY_LIFE)
    builder = builder.issuer_name(_name("disTensor hub authority")).public_key(key.public_key())
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(ca=True), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    write_private(key_path, private_key_pem(key))
    write_private(certificate_path, _sign(builder, key).public_bytes(serialization.Encoding.PEM))


def write_private(path: Path, content: bytes) -> None:
    """Write a file of mode 0600 in one step."""
    temporary = path.with_name(path.name + ".new")
    temporary.unlink(missing_ok=True)
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _dated(name: str, at: float, skew: datetime.timedelta, life: datetime.timedelta) -> x509.CertificateBuilder:
    now = datetime.datetime.fromtimestamp(at, tz=datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(_name(name)).serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - skew).not_valid_after(now + life)


def _as_leaf(builder: x509.CertificateBuilder, usage: list[x509.ObjectIdentifier]) -> x509.CertificateBuilder:
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage(usage), critical=False)
    return builder.add_extension(_usage(ca=False), critical=True)


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _sign(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    return builder.sign(key, hashes.SHA256())


def _public_key(csr_pem: str) -> ec.EllipticCurvePublicKey:
    try:
        request = x509.load_pem_x509_csr(csr_pem.encode())
        key = request.public_key()
        genuine = request.is_signature_valid
    except _UNREADABLE as error:
        raise HubProtocolError(f"the certificate request cannot be read ({type(error).__name__})") from error
    if not genuine or not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != "secp256r1":
        raise HubProtocolError("the certificate request is not signed by its own P-256 key")
    return key
