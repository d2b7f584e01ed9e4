"""Hostile peers on real sockets: forged, stale and replayed papers and bytes, and those who only take up room."""

from __future__ import annotations

import datetime
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from transport_kit import JOB, QUICK, Authority, peer

from distensor.comm.identity import new_key_and_csr
from distensor.core.errors import HandshakeError, PeerLostError
from distensor.core.ids import Epoch, Rank, data_plane_uri
from distensor.hub.pki import Authority as HubAuthority
from distensor.testing.clock import FakeClock
from distensor.transport import Address, Channel, Credentials, DataPlane, FrameLimits, Listener, Tag
from distensor.transport.acceptor import MOST_UNPROVEN
from distensor.transport.frames import FrameKind, encode_prefix
from distensor.transport.handshake import Lane
from distensor.transport.identity import client_context, peer_identity, server_context
from distensor.transport.wire import WireReader, WireWriter

HERE = "127.0.0.1"
RANK_0 = [data_plane_uri(JOB, Epoch(1), Rank(0))]


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@dataclass
class Waiting:
    """Rank 1, which waits for rank 0."""

    authority: Authority
    listener: Listener = field(default_factory=lambda: Listener.bind(HERE))
    opened: list[DataPlane] = field(default_factory=list)

    def open(self, silent: float) -> None:
        timeouts = replace(QUICK, silent=silent)
        peers = {0: Address(host=HERE, port=1), 1: self.listener.address}
        plane = DataPlane.open(peer(1), self.authority.place(1), self.listener, peers, timeouts=timeouts, driver=False)
        self.opened.append(plane)

    def meet(self) -> None:
        """The right peer comes, and both are there."""
        with self.dial():
            until(lambda: bool(self.opened))

    def dial(self, address: Address | None = None) -> DataPlane:
        peers = {1: address or self.listener.address}
        return DataPlane.open(peer(0), self.authority.place(0), None, peers, timeouts=QUICK, driver=False)


@contextmanager
def waiting(authority: Authority, silent: float = 10.0) -> Iterator[Waiting]:
    """At the end rank 0 has come, from whoever the test let come last."""
    rank_1 = Waiting(authority)
    thread = threading.Thread(target=rank_1.open, args=(silent,))
    thread.start()
    try:
        yield rank_1
    finally:
        thread.join(30)
        for plane in rank_1.opened:
            plane.close()
        rank_1.listener.close()


def connect(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), timeout=10)


def careless(credentials: Credentials) -> ssl.SSLContext:
    """A context that shows these papers and believes everybody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.pem"
        path.write_bytes(credentials.key_pem + credentials.certificate_pem.encode())
        context.load_cert_chain(path)
    return context


def self_signed(authority: Authority) -> Credentials:
    """Names the right place and claims the right issuer, but its own key signed it."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)
    name = authority.certificate.subject
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(hours=1))
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(RANK_0[0])])
    signed = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    pem = signed.public_bytes(serialization.Encoding.PEM).decode()
    return Credentials(key_pem=private, certificate_pem=pem, authority_pem=authority.pem)


def shown(papers: Credentials, address: Address) -> str:
    """What the listener says to who shows these papers and checks nothing itself."""
    with connect(address) as raw, careless(papers).wrap_socket(raw) as tls:
        try:
            WireWriter(tls, 1).signal(FrameKind.HELLO, tag=Tag(Channel.META, slot=Lane.FROM_DIALER))
            prefix, text, _ = WireReader(tls, 1, FrameLimits()).frame()
        except (ssl.SSLError, ConnectionError) as error:
            return f"tls: {error}"
        return f"{prefix.kind.name}: {text.decode()}"


def test_forged_and_stale_papers_are_refused_and_the_right_peer_still_gets_in(authority: Authority) -> None:
    with waiting(authority) as rank_1:
        where = rank_1.listener.address
        assert shown(self_signed(authority), where).startswith("tls: ")
        assert shown(replace(Authority().place(0), authority_pem=""), where).startswith("tls: ")
        expired = shown(authority.credentials(RANK_0, days=1, ago=3), where)
        assert expired.startswith("REFUSED: the peer's certificate is expired: it was valid until "), expired
        early = shown(authority.credentials(RANK_0, days=1, ago=-1), where)
        assert early.startswith("REFUSED: the peer's certificate is not valid yet: it begins "), early
        rank_1.meet()


# -- time ------------------------------------------------------------------------------------------------------------


def hub_place(hub: HubAuthority, rank: int) -> Credentials:
    key, request = new_key_and_csr(JOB, Epoch(1), Rank(rank))
    certificate = hub.sign(request, JOB, Epoch(1), Rank(rank))
    return Credentials(key_pem=key, certificate_pem=certificate, authority_pem=hub.authority_pem)


def met(ours: ssl.SSLContext, theirs: ssl.SSLContext) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """A TLS connection inside this process: the client's end and the server's."""
    one, other = socket.socketpair()
    for end in (one, other):
        end.settimeout(10)
    server: list[ssl.SSLSocket] = []
    thread = threading.Thread(target=lambda: server.append(theirs.wrap_socket(other, server_side=True)))
    thread.start()
    client = ours.wrap_socket(one)
    thread.join(10)
    return client, server[0]


@pytest.mark.parametrize("wrong_by", [-3e8, -86_400.0, 86_400.0, 3e8])
def test_members_meet_whatever_the_hubs_clock_says(tmp_path: Path, wrong_by: float) -> None:
    """The machine's own clock is right here; the hub's is off by a day, or by ten years."""
    hub = HubAuthority.load_or_create(tmp_path, FakeClock(now=time.time() + wrong_by))
    client, server = met(client_context(hub_place(hub, 0)), server_context(hub_place(hub, 1)))
    with client, server:
        assert (peer_identity(client).rank, peer_identity(server).rank) == (1, 0)


def test_a_certificate_ends_after_its_hours_although_our_clock_is_set_back(tmp_path: Path) -> None:
    hub, clock = HubAuthority.load_or_create(tmp_path, FakeClock()), FakeClock()
    client, server = met(client_context(hub_place(hub, 0), clock), server_context(hub_place(hub, 1), clock))
    with client, server:
        clock.jump_wall(-86_400)
        clock.advance(3 * 3600)
        assert peer_identity(client).rank == 1
        clock.suspend(3 * 3600)  # a machine that sleeps gets no longer life for it
        for end in (client, server):
            with pytest.raises(HandshakeError, match=r"is expired: it was valid until .* by the hub's clock"):
                peer_identity(end)


# -- replays ---------------------------------------------------------------------------------------------------------


class Tap:
    """Forwards connections to an address and keeps what the dialing side sent, connection by connection."""

    def __init__(self, target: Address) -> None:
        self._target = target
        self._listener = socket.create_server((HERE, 0))
        self.address = Address(host=HERE, port=self._listener.getsockname()[1])
        self.sent: list[bytearray] = []
        self.outward: list[socket.socket] = []
        """Towards the target, in the order in which they were made: who holds one may say what he likes there."""
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def _run(self) -> None:
        for _ in Lane:
            inward, _ = self._listener.accept()
            outward = connect(self._target)
            inward.settimeout(None)
            outward.settimeout(None)
            kept = bytearray()
            self.sent.append(kept)
            self.outward.append(outward)
            self._sockets += [inward, outward]
            for source, sink, copy in ((inward, outward, kept), (outward, inward, bytearray())):
                thread = threading.Thread(target=_forward, args=(source, sink, copy))
                self._threads.append(thread)
                thread.start()

    def close(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        for each in (*self._sockets, self._listener):
            each.close()


def _forward(source: socket.socket, sink: socket.socket, copy: bytearray) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            copy += data
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


def test_recorded_bytes_are_worth_nothing_anywhere_else(authority: Authority) -> None:
    """What a member said is said again: to another member on a new connection, and on its own connection once more."""
    with waiting(authority) as first, ExitStack() as stack:
        tap = Tap(first.listener.address)
        stack.callback(tap.close)
        honest = stack.enter_context(first.dial(tap.address))
        until(lambda: bool(first.opened))
        honest.send(1, Tag(Channel.P2P, step=1), b"pay once")
        assert first.opened[0].recv(0, Tag(Channel.P2P, step=1), 5).header == b"pay once"

        with waiting(authority) as second:
            for kept in tap.sent:
                with connect(second.listener.address) as replay, suppress(OSError):
                    replay.sendall(bytes(kept))
                    replay.shutdown(socket.SHUT_WR)
                    while replay.recv(1 << 16):
                        pass
            second.meet()
        assert not second.opened[0].has(0, Tag(Channel.P2P, step=1)), "nothing of it was taken for a message"

        lane = next(index for index, kept in enumerate(tap.sent) if len(kept) == max(map(len, tap.sent)))
        tap.outward[lane].sendall(bytes(tap.sent[lane][-80:]))
        with pytest.raises(PeerLostError, match=r"(?i)bad record mac|decryption failed|wrong version|bad length"):
            first.opened[0].recv(0, Tag(Channel.P2P, step=1), 5)


# -- those who take up room --------------------------------------------------------------------------------------------


def test_five_hundred_silent_connections_cost_no_thread_and_keep_nobody_out(authority: Authority) -> None:
    with waiting(authority) as rank_1, ExitStack() as stack:
        before, most = threading.active_count(), 0
        for _ in range(500):
            stack.enter_context(connect(rank_1.listener.address))
            most = max(most, threading.active_count() - before)
        rank_1.meet()
        assert most <= 4, "those that say nothing cost no thread"


def test_three_hundred_that_begin_and_stop_cost_bounded_threads_and_keep_nobody_out(authority: Authority) -> None:
    with waiting(authority) as rank_1, ExitStack() as stack:
        before, most = threading.active_count(), 0
        for _ in range(300):
            connection = stack.enter_context(connect(rank_1.listener.address))
            connection.sendall(b"\x16\x03\x01")
            most = max(most, threading.active_count() - before)
        rank_1.meet()
        assert most <= 2 * MOST_UNPROVEN, "each has a thread until it is dropped"


def test_a_flood_that_goes_on_keeps_nobody_out(authority: Authority) -> None:
    with waiting(authority) as rank_1:
        over = threading.Event()

        def flood() -> None:
            held: list[socket.socket] = []
            while not over.is_set():
                with suppress(OSError):
                    held.append(connect(rank_1.listener.address))
                if len(held) > 100:
                    held.pop(0).close()
            for each in held:
                each.close()

        flooding = threading.Thread(target=flood)
        flooding.start()
        try:
            rank_1.meet()
        finally:
            over.set()
            flooding.join(10)


def rogue(authority: Authority, address: Address) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """Both lanes of rank 0, proven, in the hands of the test."""
    lanes = []
    for lane in Lane:
        tls = client_context(authority.place(0)).wrap_socket(connect(address))
        WireWriter(tls, 1).signal(FrameKind.HELLO, tag=Tag(Channel.META, slot=lane))
        assert WireReader(tls, 1, FrameLimits()).frame()[0].kind is FrameKind.WELCOME
        lanes.append(tls)
    return lanes[0], lanes[1]


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="after the handshake"),
        pytest.param(encode_prefix(FrameKind.DATA, 1, Tag(Channel.P2P), 9, 0)[:20], id="in a prefix"),
        pytest.param(encode_prefix(FrameKind.DATA, 1, Tag(Channel.P2P), 9, 7 << 30) + b"half", id="in a header"),
        pytest.param(encode_prefix(FrameKind.DATA, 1, Tag(Channel.P2P), 0, 7 << 30) + bytes(9999), id="in a body"),
    ],
)
def test_a_peer_that_stops_in_the_middle_of_a_frame_is_silent_like_any_other(authority: Authority, sent: bytes) -> None:
    with waiting(authority, silent=1.2) as rank_1:
        out, back = rogue(authority, rank_1.listener.address)
        until(lambda: bool(rank_1.opened))
        out.sendall(sent)
        with pytest.raises(PeerLostError, match=r"not a byte came from it for 1 s"):
            rank_1.opened[0].recv(0, Tag(Channel.P2P), 10)
        out.close()
        back.close()


def until(condition: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)
