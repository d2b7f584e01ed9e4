"""Weekly windows: what they hold, and when they change, also when the clocks do."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo

import pytest
from gate_kit import BERLIN, at
from hypothesis import given, settings
from hypothesis import strategies as st

from distensor.core.errors import ConfigError
from distensor_server.policy.windows import (
    DAYS,
    day_of,
    is_open,
    next_change,
    next_midnight,
    next_month,
    parse_windows,
)

LORD_HOWE = ZoneInfo("Australia/Lord_Howe")
"""Its clocks change by half an hour."""


@pytest.mark.parametrize(
    ("text", "when", "inside"),
    [
        ("", "2026-12-01T03:00", True),
        ("mon-fri 18:00-08:00", "2026-12-01T17:59", False),
        ("mon-fri 18:00-08:00", "2026-12-01T18:00", True),
        ("mon-fri 18:00-08:00", "2026-12-05T07:59", True),  # Saturday morning belongs to Friday's window
        ("mon-fri 18:00-08:00", "2026-12-05T08:00", False),
        ("mon-fri 18:00-08:00", "2026-12-07T07:00", False),  # Sunday has none that Monday morning could belong to
        ("sat,sun", "2026-12-06T23:59", True),
        ("sat,sun", "2026-12-07T00:00", False),
        ("fri-mon 10:00-24:00", "2026-12-07T23:59", True),
        ("22:00-06:00", "2026-12-03T05:59", True),
        ("mon 09:00-10:00; tue 11:00-12:00", "2026-12-01T11:30", True),
        ("MON-FRI 09:00-10:00;", "2026-12-01T09:30", True),
        ("00:00-24:00", "2024-02-29T12:00", True),
    ],
)
def test_what_a_window_holds(text: str, when: str, inside: bool) -> None:
    assert is_open(parse_windows(text), at(when), UTC) is inside


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mo 10:00-12:00", "'mo' is no day"),
        ("mon 10-12", "'10-12' is no pair of times"),
        ("mon 25:00-26:00", "from 00:00 to 24:00"),
        ("mon 10:75-11:00", "from 00:00 to 24:00"),
        ("mon 10:00-10:00", "an empty window"),
        ("mon 10:00-11:00 tue", "put ; between windows"),
        ("always", "'always' is no day"),
    ],
)
def test_what_is_no_window_is_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_windows(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "now", "change", "zone"),
    [
        ("18:00-08:00", "2026-12-01T12:00", "2026-12-01T18:00", BERLIN),
        ("18:00-08:00", "2026-12-01T18:00", "2026-12-02T08:00", BERLIN),
        ("sun 10:00-11:00", "2026-12-06T11:00", "2026-12-13T10:00", BERLIN),
        ("mon-sun 00:00-24:00", "2026-12-01T12:00", None, BERLIN),
        # In spring 02:00 is followed by 03:00: a window that would begin at 02:30 begins with the jump.
        ("sun 02:30-04:00", "2027-03-28T01:30", "2027-03-28T03:00", BERLIN),
        # In autumn the hour from 02:00 comes twice, and with it the window.
        ("sun 02:10-02:40", "2026-10-25T01:00", "2026-10-25T02:10", BERLIN),
        ("05:00-06:00", "2026-10-04T01:50", "2026-10-04T05:00", LORD_HOWE),
        ("thu 10:00-12:00", "2024-02-29T11:00", "2024-02-29T12:00", UTC),
    ],
)
def test_when_a_window_changes(text: str, now: str, change: str | None, zone: tzinfo) -> None:
    assert next_change(parse_windows(text), at(now, zone), zone) == (None if change is None else at(change, zone))


def test_an_hour_that_comes_twice_opens_a_window_twice() -> None:
    windows, changes, now = parse_windows("sun 02:10-02:40"), [], at("2026-10-25T01:00", BERLIN)
    for _ in range(4):
        now = next_change(windows, now, BERLIN) or 0.0
        changes.append(datetime.fromtimestamp(now, UTC).strftime("%H:%M"))
    assert changes == ["00:10", "00:40", "01:10", "01:40"]


_TIMES = st.integers(0, 95).map(lambda quarter: f"{quarter // 4:02}:{quarter % 4 * 15:02}")
_WINDOW = st.builds(
    lambda days, start, end: f"{','.join(sorted(days))} {start}-{end}" if start != end else ",".join(sorted(days)),
    st.sets(st.sampled_from(DAYS), min_size=1),
    _TIMES,
    _TIMES,
)


@settings(max_examples=25, deadline=None)
@given(
    text=st.lists(_WINDOW, min_size=1, max_size=3).map("; ".join),
    zone=st.sampled_from([BERLIN, LORD_HOWE, UTC]),
    week=st.integers(0, 60),
    minute=st.integers(0, 7 * 24 * 60),
)
def test_nothing_changes_before_the_next_change_and_everything_at_it(
    text: str, zone: tzinfo, week: int, minute: int
) -> None:
    windows = parse_windows(text)
    now = at("2026-01-01T00:00", zone) + week * 7 * 86400 + minute * 60
    change = next_change(windows, now, zone)
    before = is_open(windows, now, zone)
    end = now + 8 * 86400 if change is None else change
    assert change is None or is_open(windows, change, zone) is not before
    assert all(is_open(windows, now + i * 300, zone) is before for i in range(1, int((end - now) // 300)))


@pytest.mark.parametrize(
    ("now", "midnight", "month"),
    [
        ("2026-12-31T23:59", "2027-01-01T00:00", "2027-01-01T00:00"),
        ("2024-02-28T12:00", "2024-02-29T00:00", "2024-03-01T00:00"),
        ("2027-03-28T01:00", "2027-03-29T00:00", "2027-04-01T00:00"),
        ("2026-10-25T00:00", "2026-10-26T00:00", "2026-11-01T00:00"),
    ],
)
def test_days_and_months_end_by_the_local_clock(now: str, midnight: str, month: str) -> None:
    assert next_midnight(at(now, BERLIN), BERLIN) == at(midnight, BERLIN)
    assert next_month(at(now, BERLIN), BERLIN) == at(month, BERLIN)
    assert day_of(at(now, BERLIN), BERLIN) == now[:10]


def test_a_day_of_a_clock_change_has_23_or_25_hours() -> None:
    for day, hours in (("2027-03-28", 23), ("2026-10-25", 25)):
        begin = at(f"{day}T00:00", BERLIN)
        assert next_midnight(begin, BERLIN) - begin == timedelta(hours=hours).total_seconds()
