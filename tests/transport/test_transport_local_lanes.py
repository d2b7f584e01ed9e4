"""Unix sockets instead of TLS within one machine: who gets one, and who does not."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_kit import QUICK, Authority, local_meeting, mesh, open_all, peer

from distensor.core.errors import HandshakeError, PeerLostError
from distensor.transport import Channel, DataPlane, Listener, LocalMeeting, Tag, local_lanes
from distensor.transport.local_lanes import LocalSocket, default_directory
from distensor.transport.wire import cut_off

TAG = Tag(Channel.META, step=3)


@dataclass
class Ends:
    """Of a TLS connection, as far as invitations look at it."""

    here: str = "192.0.2.1"
    there: str = "192.0.2.1"

    def getsockname(self) -> tuple[str, int]:
        return self.here, 1

    def getpeername(self) -> tuple[str, int]:
        return self.there, 2


SAME: Any = Ends()


@pytest.fixture
def meeting() -> Iterator[LocalMeeting]:
    """Near the root: a socket's path has a hundred characters, and those of pytest's folders vary."""
    with tempfile.TemporaryDirectory(prefix="dt-", dir="/tmp") as folder:
        yield local_meeting(Path(folder) / "lanes")


def is_local(plane: DataPlane, rank: int) -> tuple[bool, bool]:
    link = plane._links[rank]
    return isinstance(link.outbound, LocalSocket), isinstance(link.inbound, LocalSocket)


def exchange(planes: dict[int, DataPlane]) -> None:
    """Something small and something large, both ways."""
    for sender, receiver in ((0, 1), (1, 0)):
        for body in (b"", b"x" * 100, os.urandom(300_001)):
            planes[sender].send(receiver, TAG, b"head", [body])
            message = planes[receiver].recv(sender, TAG, 20)
            assert (message.header, bytes(message.body)) == (b"head", body)


def test_peers_of_one_user_leave_tls_on_every_lane(meeting: LocalMeeting) -> None:
    with mesh(Authority(local=meeting), 2, driver=True) as planes:
        assert {is_local(planes[0], 1), is_local(planes[1], 0), is_local(planes[-1], 1)} == {(True, True)}
        exchange(planes)
        assert planes[0].stats()[1].bytes_received >= 300_101
        assert planes[0].stats()[1].local
    assert list(meeting.directory.iterdir()) == []


def test_a_lane_that_breaks_is_noticed_and_named(meeting: LocalMeeting) -> None:
    with mesh(Authority(local=meeting), 2) as planes:
        cut_off(planes[0]._links[1].outbound)
        with pytest.raises(PeerLostError, match="rank 0"):
            planes[1].recv(0, TAG, 20)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 600)), max_size=6))
def test_what_a_ready_socket_takes_at_once_is_taken_whole(before: list[tuple[int, int]]) -> None:
    """The caller's thread never waits, whatever messages nobody has read yet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs, local_lanes._adopted(ours) as sending:
        sending.setblocking(False)
        ready = select.poll()
        ready.register(sending, select.POLLOUT)
        for size, count in before:
            for _ in range(count):
                if ready.poll(0):
                    sending.write(bytes(size))
        if ready.poll(0):
            assert sending.gather([bytes(100), bytes(sending.at_once - 100)]) == sending.at_once


def test_one_side_without_a_place_to_meet_keeps_tls(meeting: LocalMeeting) -> None:
    """Older versions say nothing in HELLO, or do not read what it says."""
    authority = Authority()
    listener = Listener.bind("127.0.0.1")
    for own, other in ((meeting, None), (None, meeting)):
        planes: dict[int, DataPlane] = {}

        def open_zero(local: LocalMeeting | None, planes: dict[int, DataPlane] = planes) -> None:
            planes[0] = DataPlane.open(
                peer(0), authority.place(0), None, {1: listener.address}, timeouts=QUICK, driver=False, local=local
            )

        thread = threading.Thread(target=open_zero, args=(own,))
        thread.start()
        addresses = {0: listener.address, 1: listener.address}
        planes[1] = DataPlane.open(
            peer(1), authority.place(1), listener, addresses, timeouts=QUICK, driver=False, local=other
        )
        thread.join(20)
        assert is_local(planes[0], 1) == is_local(planes[1], 0) == (False, False)
        exchange(planes)
        for plane in planes.values():
            plane.close()
    listener.close()


@pytest.mark.parametrize("spoil", ["mode", "link", "owner", "file", "missing parent"])
def test_a_directory_that_others_could_use_is_not_used(spoil: str, tmp_path: Path) -> None:
    directory = tmp_path / "lanes"
    meeting = local_meeting(directory)
    if spoil == "mode":
        directory.chmod(0o711)
    elif spoil == "link":
        directory.rename(tmp_path / "elsewhere")
        directory.symlink_to(tmp_path / "elsewhere")
    elif spoil == "owner":
        meeting = replace(meeting, uid=os.geteuid() + 1)
    elif spoil == "file":
        directory.rmdir()
        directory.touch(mode=0o700)
    else:
        meeting = LocalMeeting(directory=tmp_path / "no" / "lanes")
    reason = meeting.unavailable()
    assert reason is not None
    assert str(meeting.directory) in reason.reason
    with mesh(Authority(local=meeting), 2) as planes:
        assert is_local(planes[0], 1) == (False, False)
        assert not planes[0].stats()[1].local
        exchange(planes)


def test_a_system_that_does_not_name_the_other_user_keeps_tls(
    meeting: LocalMeeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_lanes, "_PEER_CREDENTIALS", None)
    assert "does not say which user" in getattr(meeting.unavailable(), "reason", "")
    with meeting.invite(SAME) as invitation:
        assert invitation is None


def test_a_peer_elsewhere_is_neither_invited_nor_followed(meeting: LocalMeeting) -> None:
    elsewhere = cast("Any", Ends(there="198.51.100.7"))
    with meeting.invite(elsewhere) as none, meeting.invite(SAME) as invitation:
        assert none is None
        assert invitation is not None
        assert meeting.join(elsewhere, invitation.text, 5) is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"local",
        b"local ../../../../run/docker.sock " + b"0" * 64 + b" " + b"0" * 64,
        b"local " + b"a" * 32 + b" " + b"0" * 64 + b" " + b"0" * 63,
        b"local " + b"a" * 32 + b" " + b"0" * 64 + b" " + b"0" * 64 + b"\n",
        b"local " + b"A" * 32 + b" " + b"0" * 64 + b" " + b"0" * 64,
        b"\xff" * 1024,
        b"local " + b"a" * 32 + b" " + b"0" * 64 + b" " + b"0" * 64,  # well said, but nobody is there
    ],
)
def test_what_is_no_invitation_leads_nowhere(meeting: LocalMeeting, text: bytes) -> None:
    assert meeting.join(SAME, text, 5) is None


def test_who_does_not_know_the_secret_is_shown_out_and_the_guest_gets_in(meeting: LocalMeeting) -> None:
    """A process of the same user can find the socket; it has not heard what was said inside TLS."""
    with ExitStack() as undo:
        invitation = undo.enter_context(meeting.invite(SAME))
        assert invitation is not None
        (path,) = meeting.directory.iterdir()
        strangers = [undo.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
        for stranger, said in zip(strangers, (b"", b"f" * 64, b"GET / HTTP/1.1\r\n"), strict=True):
            stranger.connect(str(path))
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
        guest = meeting.join(SAME, invitation.text, 5)
        assert guest is not None
        host = undo.enter_context(invitation.accept())
        assert guest.confirm().fileno() >= 0
        undo.callback(guest.connection.close)
        for stranger in strangers:
            assert stranger.recv(1) == b""
        host.sendall(b"a frame")
        assert guest.connection.recv(100) == b"a frame"


def test_a_guest_trusts_no_host_without_the_answer(meeting: LocalMeeting) -> None:
    """Somebody who has taken the socket's place, and does not know what the dialer said inside TLS."""
    with meeting.invite(SAME) as invitation:
        assert invitation is not None
        (path,) = meeting.directory.iterdir()
        path.unlink()
        with socket.socket(socket.AF_UNIX) as impostor:
            impostor.bind(str(path))
            impostor.listen()
            guest = meeting.join(SAME, invitation.text, 5)
            assert guest is not None
            connection, _ = impostor.accept()
            with connection:
                connection.sendall(b"0" * 64)
                with pytest.raises(HandshakeError, match="is not the peer that invited"):
                    guest.confirm()
        assert guest.connection.fileno() == -1


def test_the_kernel_is_asked_for_the_user_at_the_other_end(
    meeting: LocalMeeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides, even where the secret is right."""
    with meeting.invite(SAME) as invitation:
        assert invitation is not None
        guest = meeting.join(SAME, invitation.text, 5)
        assert guest is not None
        monkeypatch.setattr(local_lanes, "_user_of", lambda _: os.geteuid() + 1)
        monkeypatch.setattr(local_lanes, "_ACCEPT_SECONDS", 0.05)
        with pytest.raises(TimeoutError):
            invitation.accept()
        assert meeting.join(SAME, invitation.text, 5) is None
        guest.connection.close()


FOREIGN = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
try:
    sock.connect(sys.argv[1])
except PermissionError:
    sys.exit("refused")
sock.sendall(sys.stdin.readline().strip().encode())
print("connected", flush=True)
try:
    heard = sock.recv(64)
except ConnectionResetError:
    heard = b""
sys.exit("heard %d bytes" % len(heard))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
@pytest.mark.parametrize("opened", [False, True])
def test_a_process_of_another_user_cannot_join(opened: bool) -> None:
    """The directory keeps it out; were that open, the kernel's word would, although it knows the secret."""
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)
        meeting = local_meeting(folder / "lanes")
        invitation = undo.enter_context(meeting.invite(SAME))
        assert invitation is not None
        (path,) = meeting.directory.iterdir()
        path.chmod(0o777)
        meeting.directory.chmod(0o777 if opened else 0o700)
        command = [sys.executable, "-ISc", FOREIGN, str(path)]
        process = undo.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(invitation.text.split()[2].decode() + "\n")
        process.stdin.flush()
        first = process.stdout.readline()
        meeting.directory.chmod(0o700)
        guest = meeting.join(SAME, invitation.text, 5)
        assert guest is not None
        undo.callback(guest.connection.close)
        undo.enter_context(invitation.accept())
        guest.confirm()
        _, said = process.communicate(timeout=20)
        assert (first, said.strip()) == (("connected\n", "heard 0 bytes") if opened else ("", "refused"))


def test_who_says_that_it_came_and_did_not_is_met_over_tls(
    meeting: LocalMeeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_lanes, "_ACCEPT_SECONDS", 0.05)
    real = LocalMeeting.join

    def join(self: LocalMeeting, tls: Any, text: bytes, seconds: float) -> Any:
        guest = real(self, tls, text, 0.5)
        if guest is not None:
            cut_off(guest.connection)
        return guest

    monkeypatch.setattr(LocalMeeting, "join", join)
    authority = Authority(local=meeting)
    listeners = {rank: Listener.bind("127.0.0.1") for rank in range(2)}
    addresses = {rank: listener.address for rank, listener in listeners.items()}
    planes = open_all(authority, listeners, addresses, driver=False, timeouts=QUICK, limits=None)
    assert is_local(planes[0], 1) == (False, False)
    exchange(planes)
    for plane in planes.values():
        plane.close()
    for listener in listeners.values():
        listener.close()


def test_the_directory_is_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert default_directory(1234) == tmp_path / "distensor-1234"
    assert LocalMeeting().directory == tmp_path / f"distensor-{os.geteuid()}"
