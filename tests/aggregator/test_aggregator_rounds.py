"""The rounds of a group at an aggregator, and the words by which they travel. No socket, no clock."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distensor.aggregator.rounds import Deliver, Rounds
from distensor.aggregator.words import Hello, read_hello, read_set, write_set
from distensor.core.errors import FrameError
from distensor.transport import Message

STAR = Hello(group=(0, 2, 4), site=(0, 2, 4))


def to(deliveries: list[Deliver]) -> dict[int, dict[int, Any]]:
    return {each.to: dict(each.found) for each in deliveries}


def test_a_round_is_delivered_once_all_have_contributed() -> None:
    rounds = Rounds(STAR)
    assert rounds.contribute(2, 1, b"two", 0.0) == []
    assert rounds.contribute(0, 1, b"", 0.0) == []
    whole = {0: b"", 2: b"two", 4: b"four"}
    assert to(rounds.contribute(4, 1, b"four", 9.0)) == {0: whole, 2: whole, 4: whole}
    assert rounds.number == 2


def test_who_comes_too_late_is_left_out_and_gets_the_set() -> None:
    rounds = Rounds(Hello(group=(0, 2, 4), site=(0, 2, 4), patience=5.0))
    rounds.contribute(0, 1, b"a", 10.0)
    rounds.contribute(2, 1, b"b", 12.0)
    assert rounds.tick(14.9) == []
    assert to(rounds.tick(15.0)) == {rank: {0: b"a", 2: b"b"} for rank in (0, 2, 4)}
    assert rounds.contribute(4, 1, b"late", 15.1) == []
    assert rounds.tick(100.0) == []  # nobody has begun the next one
    for rank in (4, 0):
        assert rounds.contribute(rank, 2, b"x", 101.0) == []
    assert to(rounds.contribute(2, 2, b"x", 101.0))[4] == {0: b"x", 2: b"x", 4: b"x"}


def test_a_lost_member_is_not_waited_for() -> None:
    rounds = Rounds(STAR)
    rounds.contribute(0, 1, b"a", 0.0)
    assert rounds.lose(4) == []
    assert to(rounds.contribute(2, 1, b"b", 0.0)) == {rank: {0: b"a", 2: b"b"} for rank in (0, 2)}
    rounds.contribute(0, 2, b"a", 0.0)
    assert to(rounds.lose(2)) == {0: {0: b"a"}}


def test_sites_exchange_what_their_members_sent() -> None:
    one = Rounds(Hello(group=(0, 1, 2, 3), site=(0, 1), others=(11,)))
    two = Rounds(Hello(group=(0, 1, 2, 3), site=(2, 3), others=(10,)))
    one.contribute(0, 1, b"0", 0.0)
    (sent,) = one.contribute(1, 1, b"1", 0.0)
    assert (sent.to, dict(sent.found)) == (11, {0: b"0", 1: b"1"})
    assert two.site_set(10, 1, sent.found) == []  # before its own are there
    two.contribute(2, 1, b"2", 0.0)
    back, *delivered = two.contribute(3, 1, b"3", 0.0)
    whole = {0: b"0", 1: b"1", 2: b"2", 3: b"3"}
    assert to(delivered) == {2: whole, 3: whole}
    # The other site may have closed its next round before it hears of ours.
    assert one.site_set(11, 2, {2: b"x", 3: b"x"}) == []
    assert to(one.site_set(11, 1, back.found)) == {0: whole, 1: whole}
    one.contribute(0, 2, b"y", 0.0)
    answer = to(one.contribute(1, 2, b"y", 0.0))
    assert answer[0] == {0: b"y", 1: b"y", 2: b"x", 3: b"x"}


def test_the_aggregator_of_another_site_dies() -> None:
    """Its site is missing from the set, which the members notice: the other site's have none."""
    rounds = Rounds(Hello(group=(0, 1), site=(0,), others=(11,)))
    rounds.contribute(0, 1, b"0", 0.0)
    assert to(rounds.lose(11)) == {0: {0: b"0"}}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda r: r.contribute(3, 1, b"", 0.0),
        lambda r: r.contribute(0, 2, b"", 0.0),
        lambda r: (r.contribute(0, 1, b"", 0.0), r.contribute(0, 1, b"", 0.0)),
        lambda r: r.site_set(11, 1, {0: b""}),
        lambda r: r.site_set(12, 1, {}),
        lambda r: r.site_set(11, 3, {}),
    ],
)
def test_what_does_not_belong_is_refused(wrong: Any) -> None:
    with pytest.raises(FrameError):
        wrong(Rounds(Hello(group=(0, 1, 2), site=(0, 1), others=(11,))))


messages = st.lists(st.one_of(st.none(), st.binary(max_size=20)), min_size=1, max_size=6)


@given(messages, st.data())
def test_a_set_there_and_back(contributions: list[bytes | None], data: st.DataObject) -> None:
    group = tuple(range(0, 3 * len(contributions), 3))
    found = {rank: each for rank, each in zip(group, contributions, strict=True) if each is not None}
    reader = data.draw(st.sampled_from(group))
    header, body = write_set(group, found, leave_out=reader)
    message = Message(header, b"".join(map(bytes, body)))
    assert read_set(group, message, own=(reader, found.get(reader, b""))) == found
    with pytest.raises(FrameError):
        read_set(group, Message(header, bytes(message.body) + b"x"), own=(reader, b""))


def test_hellos_that_are_none() -> None:
    good = STAR.to_bytes()
    assert read_hello(good, 2) == STAR
    words = json.loads(good)
    for change in (
        {"group": [2, 0, 4]}, {"site": [0, 1]}, {"site": [0]}, {"others": [0]}, {"patience": -1}, {"patience": True},
        {"group": "abc"}, {"more": 1}, {"patience": float("inf")},
    ):  # fmt: skip
        with pytest.raises(FrameError):
            read_hello(json.dumps({**words, **change}).encode(), 2)
    for text in (b"", b"[]", b"\xff", b"[" * 5000):
        with pytest.raises(FrameError):
            read_hello(text, 2)
