"""Join tokens: whole, cut off, altered, foreign."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distensor.comm.address import HubAddress
from distensor.comm.tokens import JoinToken, Role, decode_token
from distensor.core.errors import AuthenticationError

SECRET = "s" * 43
TOKEN = JoinToken(
    address=HubAddress(host="127.0.0.1", port=50051), fingerprint="ab" * 32, role=Role.NODE, secret=SECRET
)


def forged(fields: object) -> str:
    body = base64.urlsafe_b64encode(json.dumps(fields).encode()).decode().rstrip("=")
    return "dtj_" + body + hashlib.sha256(body.encode()).hexdigest()[:8]


def test_a_token_survives_its_text() -> None:
    assert decode_token(TOKEN.encode()) == TOKEN
    assert decode_token(f"  {TOKEN.encode()}\n") == TOKEN


def test_an_ipv6_hub_survives_too() -> None:
    token = JoinToken(address=HubAddress(host="::1", port=1), fingerprint="0" * 64, role=Role.TRAINER, secret=SECRET)
    assert decode_token(token.encode()) == token


def test_the_other_places_of_a_hub_survive_and_are_not_missed_by_older_readers() -> None:
    token = replace(TOKEN, others=(HubAddress(host="hub2.example", port=7), HubAddress(host="::1", port=8)))
    assert decode_token(token.encode()) == token
    assert [str(one) for one in token.addresses] == ["127.0.0.1:50051", "hub2.example:7", "[::1]:8"]
    assert '"o"' not in base64.urlsafe_b64decode(TOKEN.encode()[4:-8] + "==").decode()


@pytest.mark.parametrize("others", ["127.0.0.1:1", [1], ["nowhere"], ["127.0.0.1:1"] * 5, {"a": 1}])
def test_other_places_that_are_none_are_refused(others: object) -> None:
    with pytest.raises(AuthenticationError, match="cannot be read"):
        decode_token(forged({"a": "127.0.0.1:1", "f": "ab" * 32, "r": "node", "s": SECRET, "o": others}))


@given(st.data())
def test_every_shorter_token_is_refused_as_incomplete(data: st.DataObject) -> None:
    text = TOKEN.encode()
    cut = data.draw(st.integers(min_value=0, max_value=len(text) - 1))
    with pytest.raises(AuthenticationError, match=r"incomplete or altered|should begin with"):
        decode_token(text[:cut])


@given(st.integers(min_value=4), st.characters(codec="ascii"))
def test_one_changed_character_is_noticed(position: int, character: str) -> None:
    text = TOKEN.encode()
    position %= len(text)
    changed = text[:position] + character + text[position + 1 :]
    if changed.strip() != text:
        with pytest.raises(AuthenticationError):
            decode_token(changed)


@given(st.text())
def test_any_other_text_is_refused_in_our_words(text: str) -> None:
    with pytest.raises(AuthenticationError):
        decode_token(text)
    with pytest.raises(AuthenticationError):
        decode_token("dtj_" + text)


GOOD = {"a": "127.0.0.1:1", "f": "0" * 64, "r": "node", "s": SECRET}


@pytest.mark.parametrize(
    "fields",
    [
        [],
        "text",
        None,
        {},
        {**GOOD, "a": "nowhere"},
        {**GOOD, "a": "h:0"},
        {**GOOD, "f": "xyz"},
        {**GOOD, "r": "admin"},
        {**GOOD, "s": "short"},
        {**GOOD, "s": "has space in the middle of it"},
        {**GOOD, "s": 7},
    ],
)
def test_a_well_formed_token_with_wrong_fields_is_refused(fields: object) -> None:
    with pytest.raises(AuthenticationError, match="cannot be read"):
        decode_token(forged(fields))


def test_the_secret_is_not_in_the_representation() -> None:
    assert SECRET not in repr(TOKEN)


def test_an_error_does_not_repeat_the_token() -> None:
    with pytest.raises(AuthenticationError) as caught:
        decode_token(TOKEN.encode()[:-3])
    assert TOKEN.encode()[10:40] not in str(caught.value)
