"""Sums by day, job and device, the section of the local protocol and the answers of its methods."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distensor.comm import LinkState, LinkStatus
from distensor.core.control import Earnings
from distensor.core.ids import DeviceId, Epoch, JobId, Rank
from distensor.core.statement import HOUR_SECONDS, NodeMoney, RowKey, StatementRow
from distensor_server.income.book import AccountBook
from distensor_server.income.energy import Tariff
from distensor_server.income.methods import statement_rows, unit_page
from distensor_server.income.section import Account, Compared, income
from distensor_server.income.standing import Standing
from distensor_server.income.sums import (
    Calendar,
    Sum,
    by_day,
    by_device,
    by_job,
    hours_together,
    last_hours,
    projection,
    recent_days,
    with_tail,
)
from distensor_server.income.values import Count, Energy
from distensor_server.localserver import RequestError

NOW = 20_000 * 86_400 + 15 * 3600.0
"""Three in the afternoon of day 20000, UTC."""
LINK = LinkStatus(state=LinkState.CONNECTED, address="hub.example:1", since=1.0)


def utc_day(at: float) -> str:
    return f"{int(at // 86_400):05}"


def row(
    hour: int, micro: int, *, job: str = "j_1", device: str = "gpu-a", rank: int = 0, units: int = 1
) -> StatementRow:
    key = RowKey(hour=hour, job_id=JobId(job), epoch=Epoch(1), rank=Rank(rank))
    return StatementRow(key=key, device_id=DeviceId(device), units=units, micro=micro)


def used(hour: int, millijoules: int, *, device: str = "gpu-a", source: str = "measured", of_ms: int = 1000) -> Energy:
    known = of_ms if millijoules else 0
    return Energy(hour=hour, device=device, source=source, millijoules=millijoules, measured_ms=known, work_ms=of_ms)


PRESENT = int(NOW // HOUR_SECONDS)


def account(*rows: StatementRow, **more: Any) -> Account:
    values: dict[str, Any] = {
        "now": NOW,
        "link": LINK,
        "earnings": Earnings(confirmed_micro=sum(r.micro for r in rows), confirmed_units=sum(r.units for r in rows)),
        "rows": rows,
        "energy": (),
        "counts": {},
        "own_micro": 0,
        "compared": Compared(at=NOW - 30),
        "tariff": Tariff(price_micro=0),
        **more,
    }
    return Account(**values)


def shown(one: Account) -> dict[str, Any]:
    section = income(one, Calendar(utc_day), utc_day)
    json.dumps(section, allow_nan=False)
    return section


def test_today_the_week_and_the_month_are_calendar_days() -> None:
    today, yesterday = 20_000 * 24, 19_999 * 24
    section = shown(
        account(
            row(today, 1),
            row(today - 1, 10),
            row(yesterday - 6 * 24 + 24, 100),
            row(yesterday - 6 * 24 + 23, 1000),
            row(yesterday - 29 * 24 + 24, 10_000),
            row(yesterday - 29 * 24 + 23, 100_000),
        )
    )
    assert [section[name]["micro"] for name in ("today", "week", "month", "total")] == [1, 111, 11_111, 111_111]
    assert (len(section["days"]), section["days"][-1]["day"], section["days"][-1]["micro"]) == (30, "20000", 1)
    assert sum(day["micro"] for day in section["days"]) == 11_111


def test_hours_of_two_days_end_with_the_present_one() -> None:
    hours = last_hours([row(PRESENT, 5), row(PRESENT - 47, 7), row(PRESENT - 48, 9), row(0, 1)], NOW)
    assert (len(hours), hours[0], hours[-1], sum(hours)) == (48, 7, 5, 12)


def test_what_the_hub_confirmed_since_the_statement_counts_into_this_hour() -> None:
    rows = with_tail([row(PRESENT - 1, 4000)], 7000, 2, NOW)
    assert [(one.key.hour, one.units, one.micro) for one in rows] == [(PRESENT - 1, 1, 4000), (PRESENT, 1, 3000)]
    assert with_tail([row(PRESENT, 4000)], 3000, 1, NOW) == [row(PRESENT, 4000)], "a hub that says less is read anew"


def test_energy_comes_with_what_is_not_known_and_what_is_the_owners_figure() -> None:
    energy = (used(PRESENT, 500), used(PRESENT, 0, device="cpu"), used(PRESENT, 90, device="machine", source="fixed"))
    section = shown(account(row(PRESENT, 1), energy=energy, no_power={"cpu": "no RAPL here"}))
    today = section["today"]
    assert (today["millijoules"], today["fixed_millijoules"], today["unmeasured_ms"]) == (590, 90, 1000)
    assert (today["cost_micro"], today["worth_micro"], today["net_micro"]) == (None, None, None)
    assert section["no_power"] == {"cpu": "no RAPL here"}
    nothing = shown(account(row(PRESENT, 1), energy=(used(PRESENT, 0),)))["today"]
    assert (nothing["millijoules"], nothing["unmeasured_ms"]) == (None, 1000), "not available is not 0"


def test_the_net_is_worth_less_cost() -> None:
    tariff = Tariff(price_micro=400_000, currency="EUR", credits_micro=2_000_000)
    section = shown(account(row(PRESENT, 2_000_000), energy=(used(PRESENT, 1_800_000_000),), tariff=tariff))
    assert section["today"]["net_micro"] == 1_000_000 - 200_000
    assert section["tariff"] == {"price_micro": 400_000, "currency": "EUR", "credits_micro": 2_000_000}


def test_the_smallest_groups_are_put_together_and_nothing_is_lost() -> None:
    rows = [row(PRESENT, 100 + i, job=f"j_{i:02}") for i in range(25)]
    section = shown(account(*rows, names={"j_24": "llama"}))
    assert [section["jobs"][0][key] for key in ("id", "name", "micro")] == ["j_24", "llama", 124]
    assert section["jobs"][-1]["name"] == "5 others"
    assert sum(job["micro"] for job in section["jobs"]) == section["total"]["micro"]


COUNTS = {Standing.MATCHED: Count(units=5, micro=5000, since=3)}


@pytest.mark.parametrize(
    ("more", "state"),
    [
        ({"counts": COUNTS}, "equal"),
        ({"counts": {**COUNTS, Standing.UNCONFIRMED: Count(units=9, since=3)}}, "equal"),
        ({"counts": {**COUNTS, Standing.REFUSED: Count(units=1)}}, "differs"),
        ({"counts": {**COUNTS, Standing.MISSING_HERE: Count(units=1)}}, "differs"),
        ({"counts": {**COUNTS, Standing.MISSING_THERE: Count(units=1)}}, "differs"),
        ({"counts": COUNTS, "compared": Compared(at=1.0, lasting=1)}, "differs"),
        ({"compared": Compared(problem="too old")}, "unknown"),
        ({"link": LinkStatus(state=LinkState.OFFLINE, address="hub", since=1.0)}, "unconfirmed"),
    ],
)
def test_one_word_for_the_ledger(more: dict[str, Any], state: str) -> None:
    assert shown(account(row(PRESENT, 5000), **more))["ledger"]["state"] == state


def test_where_the_credits_are_is_what_the_hub_said_last() -> None:
    assert shown(account())["money"] is None
    money = NodeMoney(credited=21, pending=1, held=2, payable=3, clearing=4, paid=5, void=6, fees=7)
    section = shown(account(money=money))
    assert (section["paid_micro"], section["payable_micro"]) == (5, 3)
    assert section["money"] == asdict(money)


def test_a_projection_is_what_was_observed_not_what_the_machine_could_do() -> None:
    """MET-07: 30 days at 4 % utilisation. An hour of work is worth 1000; of each day about one hour was paid."""
    full_hour = 1_000_000
    rows = [row((20_000 - day) * 24 + 8, full_hour * 24 * 4 // 100) for day in range(1, 31)]
    section = shown(account(*rows))
    paid = sum(one.micro for one in rows[:29])
    assert section["projection"]["from_days"] == 29
    assert abs(section["projection"]["month_micro"] - paid * 30 / 29) <= 0.1 * paid
    assert section["projection"]["month_micro"] < full_hour * 24 * 30 / 20


def test_idle_days_count_in_the_projection_and_today_does_not() -> None:
    days = recent_days(NOW, 30, utc_day)
    assert projection({"20000": Sum(micro=5)}, days) is None, "not one whole day"
    assert projection({"19990": Sum(micro=100), "20000": Sum(micro=5000)}, days) == (300, 10)
    assert projection({"": Sum(micro=9), "19999": Sum(micro=1)}, days) == (30, 1)


def test_days_are_found_one_by_one_over_a_change_of_clocks() -> None:
    def day_of(at: float) -> str:  # a zone that changes by an hour on day 19990
        return utc_day(at + (3600 if at > 19_990 * 86_400 else 0))

    assert recent_days(NOW, 20, day_of) == [f"{day:05}" for day in range(19_981, 20_001)]


def test_old_hours_become_days_and_very_old_ones_one_sum() -> None:
    hours = [0, 5, PRESENT, PRESENT - 47, PRESENT - 48, PRESENT - 49, 19_900 * 24 + 3, 19_900 * 24 + 9]
    moved = hours_together(hours, NOW, Calendar(utc_day))
    assert moved == {PRESENT - 48: PRESENT - 49, 5: 0, 19_900 * 24 + 9: 19_900 * 24 + 3}


ROWS = st.lists(
    st.builds(
        row,
        st.integers(PRESENT - 24 * 60, PRESENT),
        st.integers(1, 10**9),
        job=st.sampled_from(["j_1", "j_2", "j_3"]),
        device=st.sampled_from(["gpu-a", "gpu-b"]),
        rank=st.integers(0, 3),
        units=st.integers(1, 50),
    ),
    max_size=20,
)
ENERGY = st.lists(
    st.builds(
        used, st.integers(PRESENT - 24 * 60, PRESENT), st.integers(0, 10**12), device=st.sampled_from(["gpu-a", "x"])
    ),
    max_size=10,
)


@settings(max_examples=40)
@given(rows=ROWS, energy=ENERGY, more=st.integers(0, 10**9), since=st.integers(0, 60))
def test_every_grouping_adds_up_to_the_ledger(
    rows: list[StatementRow], energy: list[Energy], more: int, since: int
) -> None:
    micro, units = sum(r.micro for r in rows) + more, sum(r.units for r in rows) + bool(more)
    one = account(*rows, earnings=Earnings(confirmed_micro=micro, confirmed_units=units), energy=energy)
    section = shown(one)
    assert section["total"]["micro"] == micro
    assert section["total"]["units"] == units
    for by in ("day", "job", "device"):
        found = statement_rows({"by": by}, one, Calendar(utc_day))
        assert sum(r["micro"] for r in found["rows"]) == found["total"]["micro"] == micro
        assert sum(r["units"] for r in found["rows"]) == found["total"]["units"] == units
    first = f"{20_000 - since:05}"
    calendar = Calendar(utc_day)
    part = by_day(rows, energy, calendar)
    assert sum((s for day, s in part.items() if day >= first), Sum()).micro == sum(
        r.micro for r in rows if calendar.day(r.key.hour) >= first
    )
    assert sum(s.micro for s in by_job(rows).values()) == sum(s.micro for s in by_device(rows, energy).values())


def test_a_statement_since_a_day_leaves_out_what_was_before() -> None:
    def iso_day(at: float) -> str:
        return f"2024-10-{int(at // 86_400) - 19_970:02}"

    one = account(row(19_998 * 24, 1), row(19_999 * 24, 10), row(20_000 * 24, 100))
    found = statement_rows({"by": "day", "since": "2024-10-29"}, one, Calendar(iso_day))
    assert [(r["id"], r["micro"]) for r in found["rows"]] == [("2024-10-29", 10), ("2024-10-30", 100)]
    assert found["total"]["micro"] == 110


@pytest.mark.parametrize(
    "params", [{"by": "hour"}, {"by": 7}, {"since": "yesterday"}, {"since": "2024-13-01"}, {"since": 20240101}]
)
def test_a_statement_that_cannot_be_is_refused_with_what_would_be_right(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        statement_rows(params, account(), Calendar(utc_day))
    assert refused.value.code == "bad_params"
    assert refused.value.fix


@pytest.mark.parametrize(
    "params",
    [{"most": 0}, {"most": True}, {"most": 501}, {"standing": "paid"}, {"after": 5}, {"after": [1, "j", 1, 1]},
     {"after": [1 << 70, "j", 1, 1, 1]}, {"after": [True, "j", 1, 1, 1]}],
)  # fmt: skip
def test_a_page_of_units_that_cannot_be_is_refused(tmp_path: Path, params: dict[str, Any]) -> None:
    book = AccountBook(tmp_path / "account.sqlite")
    book.open()
    with pytest.raises(RequestError, match=next(iter(params))):
        unit_page(params, book, {})
    book.close()
