"""Earnings: exact numbers from the section to the screen, tables, the units beside the hub's, the command."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tui_fake as fake
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tui_cli import ServerThread
from test_tui_screens import VIEWS, live, on, scene, text

from distensor_tui import format as fmt
from distensor_tui import units
from distensor_tui.cli import main
from distensor_tui.commands.earnings import _csv
from distensor_tui.fields import Fields
from distensor_tui.income import read_income
from distensor_tui.keys import press
from distensor_tui.model import Snapshot
from distensor_tui.plain import earnings as plain_earnings
from distensor_tui.scene import Ask, Scene, Screen
from distensor_tui.screens.table import SCREENS, notices
from distensor_tui.sections import apply
from distensor_tui.text import plain
from distensor_tui.views import income as view
from distensor_tui.wire import Answer

EARNINGS = on(Screen.EARNINGS)
LARGE = (1 << 53) + 1
"""The first whole number that a float does not hold."""


def of(**changes: Any) -> str:
    return text(live(income=fake.income(**changes)), (120, 40), EARNINGS)


def with_ledger(state: str, **changes: Any) -> str:
    return of(ledger=fake.ledger(state, **changes))


def test_a_whole_number_does_not_pass_through_a_float() -> None:
    problems: list[str] = []
    assert Fields({"n": LARGE}, "x", problems).whole("n") == LARGE
    assert problems == []
    found = read_income(fake.income(total=fake.income_sum(LARGE, LARGE)), problems)
    assert (found.total.micro, found.total.units) == (LARGE, LARGE)
    assert fmt.credits(LARGE) == "9,007,199,254.740993"


@pytest.mark.parametrize(
    ("micro", "short", "whole"),
    [
        (0, "0.000", "0.000"),
        (1, "0.000001", "0.000001"),
        (999, "0.000999", "0.000999"),
        (1_999_999, "1.999", "1.999999"),
        (-1_999_999, "-1.999", "-1.999999"),
        (1_234_567_891_000, "1,234,567.891", "1,234,567.891"),
        (LARGE, "9,007,199,254.740", "9,007,199,254.740993"),
    ],
)
def test_credits_are_never_rounded_up_and_small_ones_stay_visible(micro: int, short: str, whole: str) -> None:
    assert (fmt.short_credits(micro), fmt.credits(micro)) == (short, whole)


@pytest.mark.parametrize(
    ("micro", "money", "spent"),
    [
        (0, "0.00 EUR", "0.00 EUR"),
        (1, "0.000001 EUR", "0.01 EUR"),
        (1_239_999, "1.23 EUR", "1.24 EUR"),
        (-10_001, "-0.02 EUR", "-0.01 EUR"),
        (1_234_567_000_000, "1,234,567.00 EUR", "1,234,567.00 EUR"),
    ],
)
def test_what_comes_in_is_rounded_down_and_what_goes_out_up(micro: int, money: str, spent: str) -> None:
    assert (fmt.money(micro, "EUR"), fmt.spent(micro, "EUR")) == (money, spent)


def test_energy_has_the_unit_that_fits() -> None:
    assert [fmt.energy(mj) for mj in (None, 0, 3_600_000, 359_999_999, 3_600_000_000)] == [
        "-",
        "0.0 Wh",
        "1.0 Wh",
        "100.0 Wh",
        "1.00 kWh",
    ]


AMOUNTS = st.integers(min_value=0, max_value=10**17)


@settings(max_examples=40, deadline=None)
@given(amounts=st.lists(AMOUNTS, min_size=1, max_size=6))
def test_the_sums_of_what_the_screen_shows_are_the_total(amounts: list[int]) -> None:
    """Read back from the text: nothing was rounded on the way from the section to the screen."""
    days = [{"day": f"2026-09-{i + 1:02}", **fake.income_sum(a, 1, work_ms=1)} for i, a in enumerate(amounts)]
    found = read_income(fake.income(days=days, total=fake.income_sum(sum(amounts), len(amounts))), [])
    rows = view.group_table(view.groups(found, "day"), "day", "", 200)[1:]
    shown = [int(re.sub(r"[,.]", "", _six(plain(row).split()[1]))) for row in rows]
    assert sum(shown) == found.total.micro == sum(amounts)


def _six(credits_text: str) -> str:
    whole, part = credits_text.split(".")
    return f"{whole}.{part.ljust(6, '0')}"


def test_the_summary_answers_how_much_where_and_whether_the_books_agree() -> None:
    shown = of()
    for fact in (
        "1.840 cr",
        "7 d 12.345 cr",
        "12.345 cr 3,086 units",
        "claimed 6 units   fees 0.12345 cr",
        "pending 6.000  held 0.045  payable 4.000  on their way 0.300  paid 2.000",
        "whoever runs the hub pays it out",
        "0.42 kWh 0.13 EUR",
        "= hub ✔ 14:02",
        "6 unconfirmed since 14:13",
        "2026-09-20",
        "4.100001",
    ):
        assert fact in shown, fact


def test_where_the_credits_are_is_not_guessed_for_a_hub_that_has_not_said_it() -> None:
    silent = read_income(fake.income(money=None), [])
    assert silent.money is None
    assert not view._credits(silent)
    told = read_income(fake.income(), []).money
    assert told is not None
    assert told.pending + told.held + told.payable + told.clearing + told.paid + told.void == 12_345_000


@pytest.mark.parametrize(
    ("shown", "says"),
    [
        (lambda: with_ledger("differs", refused=fake.standing(2)), "differs from the hub: 2 refused"),
        (lambda: with_ledger("differs", missing_there=fake.standing(1)), "1 missing at the hub"),
        (lambda: with_ledger("differs", own_micro=1, hub_micro=2), "0.000001 here, 0.000002 there"),
        (lambda: with_ledger("unknown", reason="the hub is too old"), "the hub is too old"),
        (lambda: with_ledger("unknown"), "not compared yet"),
        (lambda: with_ledger("equal", reason="no answer"), "(no answer)"),
        (lambda: text(VIEWS["hub-offline"](), (120, 40), EARNINGS), "unconfirmed since 14:13"),
        (lambda: text(VIEWS["idle"](), (120, 40), EARNINGS), "Nothing earned yet"),
    ],
)  # fmt: skip
def test_every_state_of_the_ledger_has_its_words(shown: Callable[[], str], says: str) -> None:
    assert says in shown()


def test_a_difference_is_also_a_notice() -> None:
    found = live(income=fake.income(ledger=fake.ledger("differs", refused=fake.standing(2))))
    assert any("2 refused" in said for _, said in notices(scene(found, (120, 40))))
    assert not any("ledger" in said for _, said in notices(scene(live(), (120, 40))))


def test_energy_that_is_not_measured_is_said() -> None:
    partly = fake.income_sum(
        1, 1, millijoules=7_200_000, fixed_millijoules=3_600_000, work_ms=9_000, unmeasured_ms=5_000
    )
    shown = of(today=partly, month=partly)
    assert "2.0 Wh partly by your figure, 5 s of work not measured" in shown
    shown = of(**{name: fake.income_sum(1, 1, work_ms=5, unmeasured_ms=5) for name in ("today", "month")})
    assert "today not available" in shown
    assert "energy of cpu is not available: no RAPL counter can be read" in shown


def test_without_an_account_the_hubs_sums_are_shown() -> None:
    shown = text(live(income=None), (120, 40), EARNINGS)
    assert "Units per job" in shown
    assert "12.345 credits" in shown


def pressed(at: Scene, *keys: str) -> tuple[Scene, Any]:
    effect: Any = None
    for key in keys:
        ui, effect = press(at, key, key if len(key) == 1 else None)
        at = replace(at, ui=ui)
    return at, effect


def test_g_goes_through_the_groupings() -> None:
    at = scene(live(), (120, 40), EARNINGS)
    at, _ = pressed(at, "g")
    assert "tiny-stories" in text(at.view, (120, 40), at.ui)
    at, _ = pressed(at, "g")
    shown = text(at.view, (120, 40), at.ui)
    assert "Earnings by device" in shown
    assert "10.345" in shown
    at, _ = pressed(at, "g")
    assert "Earnings by day" in text(at.view, (120, 40), at.ui)


UNIT: dict[str, Any] = {
    "job": "job-1", "job_name": "llama-1b", "epoch": 2, "rank": 1, "step": 18_203, "standing": "refused",
    "claimed": 4, "claimed_at": fake.NOW - 9, "seen": fake.NOW - 9, "hub_state": "mismatched", "hub_claimed": 4,
    "hub_received": 3, "micro": 0,
}  # fmt: skip


def test_v_opens_the_units_beside_the_hubs() -> None:
    at = scene(live(income=fake.income(ledger=fake.ledger("differs", refused=fake.standing(1)))), (120, 40), EARNINGS)
    at, _ = pressed(at, "v")
    assert "1 refused" in text(at.view, (120, 40), at.ui)
    at, _ = pressed(at, "r")
    assert at.ui.place.path == ("refused",)
    assert "Asking for the units" in text(at.view, (120, 40), at.ui)
    ask = SCREENS[Screen.EARNINGS].poll(at)
    assert isinstance(ask, Ask)
    assert (ask.method, ask.params) == ("units", {"most": 200, "standing": "refused"})
    assert ask.then is not None
    answered = ask.then(at, Answer(id="1", ok=True, result={"units": [UNIT, "junk"]}))
    shown = text(at.view, (120, 40), answered)
    assert re.search(r"14:13:11 +llama-1b +1 +18,203 +4 +4/3 +0.000 +refused", shown)
    at, _ = pressed(replace(at, ui=answered), "enter")
    assert "refused: the two sides say different sizes" in text(at.view, (120, 40), at.ui)


def test_a_refused_request_for_units_says_why() -> None:
    ask = units.ask(units.ALL)
    assert ask.then is not None
    at = scene(live(), (120, 40), on(Screen.EARNINGS, path=(units.ALL,)))
    answer = Answer(id="1", ok=False, code="store", message="the account [b", fix="see the log")
    assert "Not available: the account [b (see the log)" in text(at.view, (120, 40), ask.then(at, answer))
    empty = ask.then(at, Answer(id="1", ok=True, result={"units": []}))
    assert "No unit of this kind" in text(at.view, (120, 40), empty)


@pytest.mark.parametrize("size", [(60, 15), (80, 24), (120, 40), (200, 60)])
def test_the_summary_is_there_at_every_size(size: tuple[int, int]) -> None:
    shown = text(live(), size, EARNINGS)
    assert "today" in shown
    assert "1.840" in shown


def test_the_text_of_the_command_has_all_of_it() -> None:
    shown = plain_earnings(apply(Snapshot(), fake.snapshot(), full=True), fake.NOW)
    for fact in ("7 days", "12.345 credits", "net 5.11 EUR", "cost 1.06 EUR", "ledger     equal", "projection 157.575"):
        assert fact in shown, fact


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s") / "s.sock"


ROWS = [{"id": "job-1", "name": "=cmd()", **fake.used(LARGE, 2, 0.5)}, {"id": "", "name": "", **fake.income_sum(1, 1)}]


@pytest.fixture
def server(path: Path) -> Iterator[fake.FakeSupervisor]:
    def respond(request: dict[str, Any]) -> dict[str, Any]:
        if request["method"] == "statement":
            total = fake.used(LARGE + 1, 3, 0.5)
            return {"ok": True, "result": {"rows": ROWS, "total": total, "currency": "EUR", "ledger": fake.ledger()}}
        assert request["method"] == "units"
        last = request["params"]["after"] is not None
        page = [{**UNIT, "step": 2 if last else 3}]
        return {"ok": True, "result": {"units": page, "next": None if last else [1, "j", 1, 1, 1], "counts": {}}}

    thread = ServerThread(path, fake.snapshot(), fake.HELLO)
    thread.fake.respond = respond
    yield thread.fake
    thread.close()


def asked(server: fake.FakeSupervisor) -> list[tuple[str, dict[str, Any]]]:
    return [(request["method"], request["params"]) for request in server.requests]


def test_a_statement_as_text_csv_and_json_has_the_same_numbers(
    server: fake.FakeSupervisor, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ["--socket", str(path)]
    assert main(["earnings", "--by", "job", "--since", "2026-09-01", *at]) == 0
    shown = capsys.readouterr().out
    assert "9,007,199,254.740993 credits" in shown
    assert "total" in shown
    assert "ledger     equal" in shown
    assert main(["earnings", "--csv", *at]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["micro"] for row in rows] == [str(LARGE), "1", str(LARGE + 1)]
    assert sum(int(row["micro"]) for row in rows[:-1]) == int(rows[-1]["micro"])
    assert rows[0]["name"] == "'=cmd()"
    assert main(["earnings", "--by", "device", "--json", *at]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["v"], answer["ok"], answer["result"]["total"]["micro"]) == (1, True, LARGE + 1)
    assert asked(server) == [
        ("statement", {"by": "job", "since": "2026-09-01"}),
        ("statement", {"by": "day"}),
        ("statement", {"by": "device"}),
    ]


def test_units_are_read_page_by_page(
    server: fake.FakeSupervisor, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ["--socket", str(path)]
    assert main(["earnings", "--units", "--standing", "refused", *at]) == 0
    shown = capsys.readouterr().out
    assert "llama-1b epoch 2 rank 1 step 3  here 4  hub claimed 4 received 3" in shown
    assert "step 2" in shown
    assert main(["earnings", "--units", "-n", "1", "--json", *at]) == 0
    answer = json.loads(capsys.readouterr().out)["result"]
    assert ([one["step"] for one in answer["units"]], answer["more"]) == ([3], True)
    assert main(["earnings", "--units", "-n", "0", "--csv", *at]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["step"] for row in rows] == ["3", "2"]
    assert asked(server)[0] == ("units", {"most": 100, "after": None, "standing": "refused"})


@pytest.mark.parametrize("words", [["--since", "yesterday"], ["--by", "hour"], ["-n", "-1"], ["--standing", "paid"]])
def test_what_cannot_be_asked_is_refused_before_anyone_is_asked(
    words: list[str], path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["earnings", *words, "--socket", str(path)]) == 64
    assert words[0].lstrip("-") in capsys.readouterr().err


def test_a_name_that_is_a_formula_does_no_harm_in_a_spreadsheet() -> None:
    assert _csv(("a", "b"), [["=1+1", -5], ["plain", None]]) == "a,b\n'=1+1,-5\nplain,"


@pytest.mark.parametrize(
    ("ledger", "says"),
    [
        (fake.ledger(), "= hub ✔ 14:02"),
        (fake.ledger("differs", refused=fake.standing(2)), "2 units differ from the hub"),
        (fake.ledger("differs"), "the sums differ from the hub"),
        (fake.ledger("unconfirmed"), "the hub is away"),
        (fake.ledger("unknown"), "not compared yet"),
    ],
)
def test_home_says_whether_the_books_agree(ledger: dict[str, Any], says: str) -> None:
    shown = text(live(income=fake.income(ledger=ledger)), (120, 40))
    assert says in shown
    assert re.search(r"7 d +12.345 cr +3.52 kWh", shown)
    assert re.search(r"net 7 d +5.11 EUR", shown)


def test_no_sum_of_days_is_below_today() -> None:
    """The hub confirms at once, the account is asked every some seconds: the screens show what is confirmed."""
    snapshot = apply(Snapshot(), fake.snapshot(), full=True)
    assert snapshot.earnings is not None
    assert snapshot.income is not None
    late = replace(snapshot, earnings=replace(snapshot.earnings, today_micro=snapshot.income.today.micro + 72_000))
    found = late.account
    assert found is not None
    assert found.today.micro == late.earnings.today_micro if late.earnings else False
    assert found.week.micro == snapshot.income.week.micro + 72_000
    assert found.month.micro == snapshot.income.month.micro + 72_000
    early = replace(snapshot, earnings=replace(snapshot.earnings, today_micro=0))
    assert early.account == snapshot.income


def test_pending_is_told_in_credits_once_it_is_known_what_a_unit_is_worth() -> None:
    known = live(earnings=fake.earnings(confirmed_micro=12_000_000, confirmed_units=3000, pending_units=6))
    assert "today 1.840 cr  pending ~0.024" in text(known, (80, 24))
    assert "confirmed 12.000   pending about 0.024 (6 units)" in text(known, (80, 24))
    assert "pending          ~0.024 cr  6 units" in text(known, (120, 40))
    new = live(earnings=fake.earnings(confirmed_micro=0, confirmed_units=0, pending_units=6))
    assert "pending 6 units" in text(new, (80, 24))
    assert "pending ~" not in text(new, (80, 24))
