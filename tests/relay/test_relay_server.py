"""A relay on real sockets: who is joined, who is not, and what ends."""

from __future__ import annotations

import socket

import pytest
from relay_kit import Member, relay_of
from transport_kit import Authority

from distensor.comm.relay_words import LONGEST, Role
from distensor.core.clock import SYSTEM_CLOCK
from distensor.relay import server
from distensor.relay.desk import Caps

PARKED, JOINED = {"parked": True}, {"joined": True}


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def test_two_members_are_joined_and_every_byte_arrives(authority: Authority) -> None:
    with relay_of(authority.pem) as relay, Member(relay.address) as listener, Member(relay.address) as dialer:
        listener.wish(Role.PARK, 1, authority.place(1))
        assert listener.line() == PARKED
        dialer.wish(Role.DIAL, 1, authority.place(0))
        assert dialer.line() == listener.line() == JOINED
        data = bytes(range(256)) * 1000
        dialer.socket.sendall(data)
        dialer.socket.shutdown(socket.SHUT_WR)
        got = b"".join(iter(lambda: listener.socket.recv(1 << 16), b""))
        listener.socket.sendall(b"answer")
        listener.socket.shutdown(socket.SHUT_WR)
        assert (got, dialer.socket.recv(99)) == (data, b"answer")
        assert dialer.socket.recv(1) == b""
        assert relay.relay.forwarded == len(data) + 6


def test_a_dialer_waits_for_the_one_that_comes_later(authority: Authority) -> None:
    with relay_of(authority.pem) as relay, Member(relay.address) as dialer, Member(relay.address) as listener:
        dialer.wish(Role.DIAL, 1, authority.place(-1))
        listener.wish(Role.PARK, 1, authority.place(1))
        assert listener.line() == PARKED
        assert dialer.line() == listener.line() == JOINED


def test_members_of_other_jobs_and_epochs_are_not_joined(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "DIAL_SECONDS", 0.3)
    with relay_of(authority.pem) as relay, Member(relay.address) as listener, Member(relay.address) as dialer:
        listener.wish(Role.PARK, 1, authority.place(1, epoch=2))
        assert listener.line() == PARKED
        dialer.wish(Role.DIAL, 1, authority.place(0, epoch=1))
        assert "rank 1 of job" in dialer.line()["error"]
        assert dialer.line() == {}


def test_strangers_hear_why_and_slow_ones_are_closed(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PROOF_SECONDS", 0.3)
    with relay_of(authority.pem) as relay:
        with Member(relay.address) as stranger:
            stranger.wish(Role.PARK, 1, Authority().place(1))
            assert "not of this relay's hub" in stranger.line()["error"]
            assert stranger.line() == {}
        with Member(relay.address) as silent:
            assert silent.line()["v"] == 1
            assert silent.line() == {}
        with Member(relay.address) as talker:
            talker.line()
            talker.socket.sendall(b"x" * (LONGEST * 20))
            assert "no line" in talker.line().get("error", "no line")


def test_a_listener_that_went_away_is_not_joined(authority: Authority) -> None:
    with relay_of(authority.pem) as relay, Member(relay.address) as dialer, Member(relay.address) as listener:
        gone = Member(relay.address).wish(Role.PARK, 1, authority.place(1))
        assert gone.line() == PARKED
        gone.close()
        while relay.relay.connections > 2:
            SYSTEM_CLOCK.sleep(0.01)
        listener.wish(Role.PARK, 1, authority.place(1))
        assert listener.line() == PARKED
        dialer.wish(Role.DIAL, 1, authority.place(0))
        assert dialer.line() == listener.line() == JOINED


def test_connections_beyond_the_cap_hear_so(authority: Authority) -> None:
    caps = Caps(connections=2, job_connections=1)
    with relay_of(authority.pem, caps) as relay, Member(relay.address) as first, Member(relay.address) as second:
        first.wish(Role.PARK, 1, authority.place(1))
        assert first.line() == PARKED
        second.line()
        with Member(relay.address) as third:
            assert "2 connections" in third.line()["error"]
        second.close()
        while relay.relay.connections > 1:
            SYSTEM_CLOCK.sleep(0.01)
        with Member(relay.address) as fourth:
            fourth.wish(Role.PARK, 2, authority.place(2))
            assert "1 connections" in fourth.line()["error"]


def test_a_job_that_used_its_bytes_is_cut_off(authority: Authority) -> None:
    caps = Caps(job_bytes=1000, rate=1e9)
    with relay_of(authority.pem, caps) as relay, Member(relay.address) as listener, Member(relay.address) as dialer:
        listener.wish(Role.PARK, 1, authority.place(1))
        assert listener.line() == PARKED
        dialer.wish(Role.DIAL, 1, authority.place(0))
        assert dialer.line() == listener.line() == JOINED
        dialer.socket.sendall(bytes(1000))
        assert len(listener.socket.recv(1000, socket.MSG_WAITALL)) == 1000
        dialer.socket.sendall(b"x")
        assert listener.socket.recv(1) == b""
        assert "1000 bytes" in relay.lines[0]
        with Member(relay.address) as again:
            again.wish(Role.DIAL, 1, authority.place(0))
            assert "1000 bytes" in again.line()["error"]
