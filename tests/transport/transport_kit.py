"""An authority of our own for data-plane certificates, and meshes of planes inside one process."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from distensor.core.ids import Epoch, JobId, Rank, data_plane_uri
from distensor.transport import Address, Credentials, DataPlane, FrameLimits, Listener, LocalMeeting, PeerId, Timeouts
from distensor.transport.identity import client_context, server_context
from distensor.transport.tls_sockets import TlsSocket

JOB = JobId("j_0123456789abcdef")
QUICK = Timeouts(connect=20.0, silent=10.0, handshake=5.0, goodbye=2.0)
_DAY = datetime.timedelta(days=1)
Ends = tuple[TlsSocket, "TlsSocket | ssl.SSLSocket"]


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


@dataclass(slots=True)
class Authority:
    """Signs certificates as the hub does. With `local`, planes of `mesh` meet on Unix sockets."""

    key: ec.EllipticCurvePrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))
    certificate: x509.Certificate = field(init=False)
    local: LocalMeeting | None = None

    def __post_init__(self) -> None:
        self.certificate = (
            self._builder("authority", self.key.public_key(), 1)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self.key, hashes.SHA256())
        )

    def _builder(
        self, subject: str, key: ec.EllipticCurvePublicKey, days: float, start: datetime.datetime | None = None
    ) -> x509.CertificateBuilder:
        start = start or datetime.datetime.now(datetime.UTC) - _DAY / 24
        return (
            x509.CertificateBuilder()
            .subject_name(_name(subject))
            .issuer_name(_name("authority"))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(start + days * _DAY)
        )

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()

    def sign(self, key: Any, uris: Sequence[str], *, days: float = 1, ago: float = 1 / 24) -> str:
        """A certificate (PEM) over a public key with these SAN URIs, valid from `ago` days ago for `days`."""
        builder = self._builder("place", key, days, datetime.datetime.now(datetime.UTC) - ago * _DAY)
        if uris:
            names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
            builder = builder.add_extension(names, critical=False)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()

    def credentials(self, uris: Sequence[str], *, days: float = 1, ago: float = 1 / 24) -> Credentials:
        """A new key and its certificate, as `sign` makes it."""
        key = ec.generate_private_key(ec.SECP256R1())
        return Credentials(
            key_pem=key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            ),
            certificate_pem=self.sign(key.public_key(), uris, days=days, ago=ago),
            authority_pem=self.pem,
        )

    def place(self, rank: int, *, epoch: int = 1, job: JobId = JOB) -> Credentials:
        return self.credentials([data_plane_uri(job, Epoch(epoch), Rank(rank))])


def peer(rank: int, *, epoch: int = 1, job: JobId = JOB) -> PeerId:
    return PeerId(job_id=job, epoch=Epoch(epoch), rank=Rank(rank))


@contextmanager
def mesh(
    authority: Authority,
    ranks: int,
    *,
    driver: bool = False,
    timeouts: Timeouts = QUICK,
    limits: FrameLimits | None = None,
) -> Iterator[dict[int, DataPlane]]:
    """Planes of all ranks (and the driver), connected to each other, in this process."""
    listeners = {rank: Listener.bind("127.0.0.1") for rank in range(ranks)}
    addresses = {rank: listener.address for rank, listener in listeners.items()}
    planes = open_all(authority, listeners, addresses, driver=driver, timeouts=timeouts, limits=limits)
    try:
        yield planes
    finally:
        closers = [threading.Thread(target=plane.close) for plane in planes.values()]
        for thread in closers:
            thread.start()
        for thread in closers:
            thread.join(20)
        for listener in listeners.values():
            listener.close()


def open_all(
    authority: Authority,
    listeners: dict[int, Listener],
    addresses: dict[int, Address],
    *,
    driver: bool,
    timeouts: Timeouts,
    limits: FrameLimits | None,
) -> dict[int, DataPlane]:
    planes: dict[int, DataPlane] = {}
    errors: list[BaseException] = []

    def open_one(rank: int) -> None:
        try:
            planes[rank] = DataPlane.open(
                peer(rank),
                authority.place(rank),
                listeners.get(rank),
                addresses,
                timeouts=timeouts,
                limits=limits,
                driver=driver,
                local=authority.local,
            )
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread
            errors.append(error)

    threads = [threading.Thread(target=open_one, args=(rank,)) for rank in [*([-1] if driver else []), *listeners]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]
    return planes


def local_meeting(directory: Path, **options: Any) -> LocalMeeting:
    """A place for Unix sockets; skips the test where the system has none that are safe."""
    meeting = LocalMeeting(directory=directory, **options)
    if (reason := LocalMeeting(directory=directory).unavailable()) is not None:
        pytest.skip(reason.reason)
    return meeting


def linked() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname(), timeout=20)
        other, _ = listener.accept()
    other.settimeout(20)
    return one, other


@contextmanager
def secured(authority: Authority, *, stock: bool) -> Iterator[Ends]:
    """Ours, and at the other end ours again or the `stock` socket of Python."""
    one, other = linked()
    client, server = client_context(authority.place(0)), server_context(authority.place(1))
    ours = TlsSocket.over(one, client)

    def serve() -> TlsSocket | ssl.SSLSocket:
        if stock:
            return server.wrap_socket(other, server_side=True)
        end = TlsSocket.over(other, server, server=True)
        end.do_handshake()
        return end

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(serve)
        ours.do_handshake()
        with ours, serving.result(20) as theirs:
            yield ours, theirs
