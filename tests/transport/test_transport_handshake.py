"""Who may connect, and what everybody else can do: nothing, not even delay."""

from __future__ import annotations

import re
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from transport_kit import JOB, QUICK, Authority, mesh, peer

from distensor.comm.identity import new_key_and_csr
from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.errors import ConfigError, HandshakeError, PeerLostError, TransportTimeoutError
from distensor.core.ids import Epoch, JobId, Rank, data_plane_uri, parse_data_plane_uri
from distensor.hub.pki import Authority as HubAuthority
from distensor.transport import Address, Channel, Credentials, DataPlane, FrameLimits, Listener, Tag, Timeouts
from distensor.transport.frames import FrameKind, encode_prefix
from distensor.transport.handshake import Lane
from distensor.transport.identity import client_context
from distensor.transport.wire import WireReader, WireWriter

RANK_1 = [data_plane_uri(JOB, Epoch(1), Rank(1))]
SHORT = replace(QUICK, connect=1.0, handshake=0.5)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


class Opening:
    """A `DataPlane.open` of rank 1 in a thread of its own, which rank 0 is expected to dial."""

    def __init__(self, authority: Authority, timeouts: object = QUICK) -> None:
        self.listener = Listener.bind("127.0.0.1")
        self.plane: DataPlane | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._open, args=(authority.place(1), timeouts))
        self._thread.start()

    def _open(self, credentials: Credentials, timeouts: object) -> None:
        peers = {0: Address(host="127.0.0.1", port=1), 1: self.listener.address}
        try:
            self.plane = DataPlane.open(peer(1), credentials, self.listener, peers, timeouts=timeouts, driver=False)  # type: ignore[arg-type]
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    def finish(self) -> None:
        self._thread.join(30)
        assert not self._thread.is_alive()

    def dial(
        self, credentials: Credentials, *, rank: int = 0, epoch: int = 1, job: JobId = JOB, timeouts: Timeouts = QUICK
    ) -> DataPlane:
        return DataPlane.open(
            peer(0, epoch=epoch, job=job),
            credentials,
            None,
            {1: self.listener.address},
            timeouts=timeouts,
            driver=False,
        )

    def close(self) -> None:
        self.finish()
        if self.plane is not None:
            self.plane.close()
        self.listener.close()


@contextmanager
def opening(authority: Authority, timeouts: object = QUICK) -> Iterator[Opening]:
    waiting = Opening(authority, timeouts)
    try:
        yield waiting
    finally:
        waiting.close()


def connect(address: Address) -> socket.socket:
    return socket.create_connection((address.host, address.port), timeout=10)


def assert_turned_away(connection: socket.socket) -> None:
    """The other end closes without a byte of data; a TLS alert may come first."""
    with connection, suppress(OSError):
        while connection.recv(4096):
            pass


# -- strangers -------------------------------------------------------------------------------------------------------


def speak_garbage(address: Address) -> None:
    connection = connect(address)
    with suppress(OSError):
        connection.sendall(b"\x16\x03\x01\xff\xff" + bytes(range(256)) * 64)
    assert_turned_away(connection)


def speak_plaintext(address: Address) -> None:
    connection = connect(address)
    with suppress(OSError):
        connection.sendall(encode_prefix(FrameKind.HELLO, 1, Tag(Channel.META), 0, 0))
    assert_turned_away(connection)


def speak_http(address: Address) -> None:
    connection = connect(address)
    with suppress(OSError):
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert_turned_away(connection)


def hang_up(address: Address) -> None:
    connect(address).close()


def show_no_certificate(address: Address) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with suppress(OSError), context.wrap_socket(connect(address)) as tls:
        assert tls.recv(1) == b""


def speak_old_tls(address: Address) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    connection = connect(address)
    with pytest.raises(OSError, match=r"(?i)alert|eof|reset|version"):
        context.wrap_socket(connection)
    connection.close()


@pytest.mark.parametrize(
    "stranger", [speak_garbage, speak_plaintext, speak_http, hang_up, show_no_certificate, speak_old_tls]
)
def test_strangers_neither_get_in_nor_keep_a_peer_out(
    authority: Authority, stranger: Callable[[Address], None]
) -> None:
    with opening(authority) as waiting:
        for _ in range(3):
            stranger(waiting.listener.address)
        with waiting.dial(authority.place(0)) as plane:
            waiting.finish()
            assert waiting.plane is not None, waiting.error
            plane.send(1, Tag(Channel.META), b"hello")
            assert waiting.plane.recv(0, Tag(Channel.META), 5).header == b"hello"


def test_many_silent_connections_do_not_keep_a_peer_out(authority: Authority) -> None:
    with opening(authority) as waiting:
        silent = [connect(waiting.listener.address) for _ in range(100)]
        for connection in silent[::2]:
            connection.sendall(b"\x16")
        with waiting.dial(authority.place(0)):
            waiting.finish()
            assert waiting.plane is not None, waiting.error
        for connection in silent:
            connection.close()


def test_a_slow_handshake_is_cut_off_in_time_however_many_bytes_it_drips(authority: Authority) -> None:
    with opening(authority, replace(QUICK, connect=5.0, handshake=0.5)) as waiting:
        connection = connect(waiting.listener.address)
        cut = threading.Event()

        def drip() -> None:
            with suppress(OSError):
                for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200):
                    connection.sendall(bytes([byte]))
                    if cut.wait(0.1):
                        return

        dripping = threading.Thread(target=drip)
        dripping.start()
        assert_turned_away(connection)  # returns only when the other end has closed
        cut.set()
        dripping.join()
        assert waiting.plane is None, "nobody has dialed yet"
        with waiting.dial(authority.place(0)):
            waiting.finish()


# -- wrong papers ----------------------------------------------------------------------------------------------------


def wrong_papers(authority: Authority) -> dict[str, Credentials]:
    mine = data_plane_uri(JOB, Epoch(1), Rank(0))
    return {
        "another authority": replace(Authority().place(0), authority_pem=authority.pem),
        "no identity": authority.credentials([]),
        "two identities": authority.credentials([mine, data_plane_uri(JOB, Epoch(1), Rank(1))]),
        "another scheme": authority.credentials(["https://example.org/1/0"]),
        "another job": authority.place(0, job=JobId("j_other")),
        "an older epoch": authority.place(0, epoch=0),
        "a rank that does not dial": authority.place(2),
        "the listener's own rank": authority.place(1),
        "the driver, where none is expected": authority.place(-1),
    }


def test_wrong_certificates_are_refused_with_a_reason_and_the_right_one_still_gets_in(authority: Authority) -> None:
    with opening(authority) as waiting:
        for name, papers in wrong_papers(authority).items():
            with pytest.raises(HandshakeError) as refused:
                waiting.dial(papers)
            assert re.search(r"^rank 1 at 127\.0\.0\.1:\d+: .*refuse", str(refused.value)), name
        with waiting.dial(authority.place(0)):
            waiting.finish()
            assert waiting.plane is not None, waiting.error


def test_a_newer_epoch_is_not_let_in_but_may_try_again(authority: Authority) -> None:
    """It is the listener that is late; in the next epoch another plane answers on the same port."""
    impatient = replace(SHORT, connect=1.0)
    with opening(authority, impatient) as waiting:
        with pytest.raises(TransportTimeoutError, match="the peer is still distensor://"):
            waiting.dial(authority.place(0, epoch=2), epoch=2, timeouts=impatient)
        waiting.finish()
        assert waiting.plane is None


def test_who_was_turned_away_is_told_when_time_is_up(authority: Authority) -> None:
    with opening(authority, replace(SHORT, connect=2.0)) as waiting:
        with pytest.raises(HandshakeError, match="refuses us: the peer is distensor://j_other/1/0"):
            waiting.dial(authority.place(0, job=JobId("j_other")))
        waiting.finish()
        assert isinstance(waiting.error, TransportTimeoutError)
        said = "not connected after 2 s: rank 0 (did not dial); 0 of 1 expected peers are here; turned away here: "
        assert said in str(waiting.error)


@pytest.mark.parametrize(
    ("credentials", "reason"),
    [
        (lambda ours: Authority().place(1), "certificate verify failed: .*(issuer|signature)"),
        (lambda ours: ours.place(1, job=JobId("j_other")), "expected a place of job"),
        (lambda ours: ours.place(1, epoch=7), "in epoch 1"),
        (lambda ours: ours.place(5), "expected rank 1"),
        (lambda ours: ours.credentials(RANK_1, days=1, ago=3), "is expired: it was valid until"),
        (lambda ours: ours.credentials(RANK_1, days=1, ago=-1), "is not valid yet: it begins"),
    ],
)
def test_a_listener_with_a_wrong_certificate_is_refused(
    authority: Authority, credentials: Callable[[Authority], Credentials], reason: str
) -> None:
    papers = credentials(authority)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.pem"
        path.write_bytes(papers.key_pem + papers.certificate_pem.encode())
        context.load_cert_chain(path)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with suppress(OSError), context.wrap_socket(connection, server_side=True) as tls:
                tls.recv(1)

        server = threading.Thread(target=serve)
        server.start()
        address = Address(host="127.0.0.1", port=listener.getsockname()[1])
        with pytest.raises(HandshakeError, match=reason):
            DataPlane.open(peer(0), authority.place(0), None, {1: address}, timeouts=QUICK, driver=False)
        server.join(10)


def test_a_second_connection_of_the_same_peer_is_refused(authority: Authority) -> None:
    with opening(authority) as waiting, waiting.dial(authority.place(0)):
        waiting.finish()
        with pytest.raises((HandshakeError, TransportTimeoutError)):
            DataPlane.open(
                peer(0), authority.place(0), None, {1: waiting.listener.address}, timeouts=SHORT, driver=False
            )
        assert waiting.plane is not None
        assert not waiting.plane.lost()


def test_nobody_there_is_a_timeout_that_names_the_peer(authority: Authority) -> None:
    with Listener.bind("127.0.0.1")._socket as free:
        port = free.getsockname()[1]
    with pytest.raises(TransportTimeoutError, match=rf"not connected .*rank 1 at 127\.0\.0\.1:{port} \(.*refused"):
        DataPlane.open(
            peer(0), authority.place(0), None, {1: Address(host="127.0.0.1", port=port)}, timeouts=SHORT, driver=False
        )


def test_a_peer_that_comes_late_is_waited_for(authority: Authority) -> None:
    listener = Listener.bind("127.0.0.1")
    planes: list[DataPlane] = []
    dialing = threading.Thread(
        target=lambda: planes.append(
            DataPlane.open(peer(0), authority.place(0), None, {1: listener.address}, timeouts=QUICK, driver=False)
        )
    )
    dialing.start()
    dialing.join(0.3)  # it hangs in the handshake: nobody has a certificate on the other end yet
    assert not planes
    addresses = {0: Address(host="127.0.0.1", port=1), 1: listener.address}
    with DataPlane.open(peer(1), authority.place(1), listener, addresses, timeouts=QUICK, driver=False):
        dialing.join(10)
        planes[0].close()
    listener.close()


# -- members that misbehave after the handshake ----------------------------------------------------------------------


def rogue(authority: Authority, address: Address) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """Both lanes of rank 0, proven, in the hands of the test."""
    lanes = []
    for lane in Lane:
        tls = client_context(authority.place(0)).wrap_socket(connect(address))
        WireWriter(tls, 1).signal(FrameKind.HELLO, tag=Tag(Channel.META, slot=lane))
        prefix, _, _ = WireReader(tls, 1, FrameLimits()).frame()
        assert prefix.kind is FrameKind.WELCOME
        lanes.append(tls)
    return lanes[0], lanes[1]


def huge(kind: FrameKind = FrameKind.DATA) -> bytes:
    prefix = bytearray(encode_prefix(kind, 1, Tag(Channel.P2P), 0, 0))
    prefix[-8:] = (1 << 62).to_bytes(8)
    return bytes(prefix)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"\x00" * 100, "starts with"),
        (huge(), "over the limits"),
        (encode_prefix(FrameKind.DATA, 2, Tag(Channel.P2P), 0, 0), "epoch 2 arrived in epoch 1"),
        (encode_prefix(FrameKind.HELLO, 1, Tag(Channel.META), 0, 0), "HELLO frame after the handshake"),
        (encode_prefix(FrameKind.DATA, 1, Tag(Channel.P2P), 10, 50) + b"cut", "closed without a goodbye"),
    ],
)
def test_a_member_that_sends_no_frames_is_lost_and_nobody_else(authority: Authority, sent: bytes, reason: str) -> None:
    with opening(authority) as waiting:
        out, back = rogue(authority, waiting.listener.address)
        waiting.finish()
        assert waiting.plane is not None, waiting.error
        out.sendall(sent)
        out.close()
        with pytest.raises(PeerLostError, match=reason):
            waiting.plane.recv(0, Tag(Channel.P2P), 10)
        back.close()


# -- certificates of the hub, keys on disk, addresses ----------------------------------------------------------------


def test_the_certificates_that_the_hub_signs_are_good(tmp_path: Path) -> None:
    hub = HubAuthority.load_or_create(tmp_path, SYSTEM_CLOCK)

    def place(rank: int) -> Credentials:
        key, request = new_key_and_csr(JOB, Epoch(1), Rank(rank))
        return Credentials(
            key_pem=key,
            certificate_pem=hub.sign(request, JOB, Epoch(1), Rank(rank)),
            authority_pem=hub.authority_pem,
        )

    with mesh(SimpleNamespace(place=place, local=None), 2, driver=True) as planes:  # type: ignore[arg-type]
        planes[-1].send(1, Tag(Channel.CONTROL), b"go")
        assert planes[1].recv(-1, Tag(Channel.CONTROL), 5).header == b"go"


def test_no_usable_key_ever_lies_on_disk(authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen: list[tuple[int, bytes]] = []
    load = ssl.SSLContext.load_cert_chain

    def spy(self: ssl.SSLContext, path: Path, *rest: object, **options: object) -> None:
        seen.append((path.stat().st_mode & 0o777, path.read_bytes()))
        load(self, path, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", spy)
    client_context(authority.place(0))
    [(mode, content)] = seen
    assert mode == 0o600
    assert b"ENCRYPTED PRIVATE KEY" in content
    assert b"BEGIN PRIVATE KEY" not in content
    assert list(tmp_path.iterdir()) == []


def test_credentials_do_not_show_their_key(authority: Authority) -> None:
    credentials = authority.place(0)
    assert "PRIVATE" not in repr(credentials)


def test_broken_credentials_are_our_own_error(authority: Authority) -> None:
    broken = replace(authority.place(0), key_pem=b"nonsense")
    with pytest.raises(HandshakeError, match="our own data-plane credentials"):
        client_context(broken)
    with pytest.raises(HandshakeError, match="our own data-plane credentials"):
        client_context(replace(authority.place(0), key_pem=authority.place(0).key_pem))


def test_a_port_that_is_taken_is_named() -> None:
    taken = Listener.bind("127.0.0.1")
    with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{taken.address.port}"):
        Listener.bind("127.0.0.1", taken.address.port)
    taken.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "distensor://",
        "distensor://j/1",
        "distensor://j/01/2",
        "distensor://j/1/-2",
        "distensor://j/1/2/3",
        "DISTENSOR://j/1/2",
        "distensor://j/1/2\n",
        "distensor:///1/2",
    ],
)
def test_uris_that_name_no_place(text: str) -> None:  # fmt: skip
    with pytest.raises(HandshakeError, match="names no place"):
        parse_data_plane_uri(text)


@pytest.mark.parametrize("rank", [-1, 0, 17])
def test_uris_go_both_ways(rank: int) -> None:
    assert parse_data_plane_uri(data_plane_uri(JOB, Epoch(4), Rank(rank))) == (JOB, 4, rank)
