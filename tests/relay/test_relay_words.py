"""What members prove to a relay, and what they cannot."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transport_kit import JOB, Authority

from distensor.comm.relay_words import NONCE_BYTES, SKEW_SECONDS, Role, read_line, read_nonce, read_wish, write_wish
from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.errors import AuthenticationError, HubProtocolError
from distensor.transport import Credentials

NONCE = bytes(range(NONCE_BYTES))
AUTHORITY = Authority()
DAY = 86_400


def wish(credentials: Credentials, role: Role = Role.DIAL, to: int = 1, nonce: bytes = NONCE) -> bytes:
    return write_wish(role, to, nonce, credentials.certificate_pem, credentials.key_pem)


def read(line: bytes, later: float = 0.0) -> object:
    return read_wish(line, NONCE, AUTHORITY.certificate, SYSTEM_CLOCK.now() + later)


def test_a_member_is_who_its_certificate_says() -> None:
    found = read_wish(wish(AUTHORITY.place(0, epoch=3)), NONCE, AUTHORITY.certificate, SYSTEM_CLOCK.now())
    assert (found.member.job_id, found.member.epoch, found.member.rank) == (JOB, 3, 0)
    assert (found.role, found.to) == (Role.DIAL, 1)
    assert (found.meeting.epoch, found.meeting.rank) == (3, 1)
    read(wish(AUTHORITY.place(-1), to=0))


def test_whatever_is_forged_is_refused() -> None:
    mine, other = AUTHORITY.place(0), AUTHORITY.place(1)
    stolen = Credentials(key_pem=mine.key_pem, certificate_pem=other.certificate_pem, authority_pem=AUTHORITY.pem)
    for line in (
        wish(Authority().place(0)),
        wish(stolen),
        wish(mine, nonce=bytes(NONCE_BYTES)),
        wish(mine).replace(b'"to":1', b'"to":2'),
        wish(mine).replace(b"dial", b"park"),
        wish(AUTHORITY.credentials(["https://example.org"])),
        wish(AUTHORITY.credentials([])),
        wish(mine, Role.PARK, to=1),
    ):
        with pytest.raises(AuthenticationError):
            read(line)


def test_a_certificate_counts_for_its_time_and_an_hour_of_skew() -> None:
    line = wish(AUTHORITY.place(0))  # from an hour ago to 23 hours ahead
    read(line, later=23 * 3600 + SKEW_SECONDS - 60)
    read(line, later=-3600 - SKEW_SECONDS + 60)
    for later in (DAY, -2.1 * 3600):
        with pytest.raises(AuthenticationError, match="valid from"):
            read(line, later=later)


@settings(max_examples=60)
@given(
    st.one_of(
        st.binary(max_size=200), st.recursive(st.none() | st.text() | st.integers(), st.lists).map(repr).map(str.encode)
    )
)
def test_nothing_that_comes_breaks_a_reader(line: bytes) -> None:
    for reader in (read, read_line, lambda raw: read_nonce(read_line(raw))):
        with pytest.raises(HubProtocolError):
            reader(line)


@settings(max_examples=60)
@given(
    st.sampled_from(["v", "role", "to", "certificate", "signature"]),
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=20), st.lists(st.integers(), max_size=2)),
)
def test_a_wish_with_a_wrong_field_is_refused(field: str, value: object) -> None:
    said = json.loads(wish(MINE))
    if said[field] == value and type(said[field]) is type(value):
        return
    with pytest.raises((HubProtocolError, AuthenticationError)):
        read(json.dumps({**said, field: value}).encode() + b"\n")


MINE = AUTHORITY.place(0)


@pytest.mark.parametrize("said", [{}, {"v": 2, "nonce": "00" * 32}, {"v": 1, "nonce": 7}, {"v": 1, "nonce": "00"}])
def test_a_greeting_of_another_protocol_is_none(said: dict[str, object]) -> None:
    with pytest.raises(HubProtocolError, match="not the greeting"):
        read_nonce(said)
