"""The account inside a supervisor: units, energy, the comparison with the hub, restarts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server_fakes import (
    AsyncClient,
    FakeAccount,
    Running,
    ShiftedClock,
    assignment,
    eventually,
    supervisor_running,
)
from test_server_account import hub_with_a_job

from distensor.comm import LinkState
from distensor.core.control import Earnings, Unit, WorkerState
from distensor.core.errors import HubUnreachableError
from distensor.core.ids import DeviceId
from distensor.core.reading import Unavailable
from distensor.hub.metering import record_claims, record_receipts
from distensor_server.devices.model import Device
from distensor_server.income.feature import Income
from distensor_server.income.keeper import Keeper
from distensor_server.lifecycle import Life
from distensor_server.messages import Claim
from distensor_server.picture import Picture, WorkerView

pytestmark = pytest.mark.asyncio


def the_income(running: Running) -> Keeper:
    income = next(one for one in running.supervisor.node.features if isinstance(one, Income))
    assert income.keeper is not None
    return income.keeper


def work(running: Running, hub: FakeAccount, *steps: int, receipt: bool = True, size: int = 4) -> None:
    """The worker of rank 0 claims steps; the hub hears of it, and of the receipts, and says its sums."""
    owner = running.supervisor.node._worker_events()
    for step in steps:
        owner.on_claim(assignment(0), Claim(step=step, micro_batches=size))
    settle(running, hub, receipt=receipt)


def settle(running: Running, hub: FakeAccount, *, receipt: bool = True) -> None:
    units: list[Unit] = list(dict.fromkeys(running.link.claims))
    with hub.store.transaction() as books:
        record_claims(books, hub.node_id, units, hour=int(running.supervisor.node.clock.now() // 3600))
        if receipt:
            record_receipts(books, "main", units, hour=int(running.supervisor.node.clock.now() // 3600))
        earnings = books.earnings(hub.node_id)
    running.link.handler.on_earnings(earnings)


async def compared(running: Running) -> dict[str, Any]:
    """The section after one more comparison."""
    income = the_income(running)
    before = income._compared
    income._synced_at = None
    running.supervisor.tick()
    await eventually(lambda: income._compared is not before, "the hub was asked")
    running.supervisor.tick()
    section: dict[str, Any] = running.sections()["income"]
    return section


async def test_work_is_seen_on_both_sides_and_adds_up(short_dir: Path) -> None:
    hub = hub_with_a_job()
    async with supervisor_running(short_dir) as running:
        running.link.account = hub
        work(running, hub, 1, 2)
        work(running, hub, 3, receipt=False)
        section = await compared(running)
        assert section["ledger"]["state"] == "equal"
        assert (section["ledger"]["matched"]["units"], section["ledger"]["unconfirmed"]["units"]) == (3 - 1, 1)
        assert section["ledger"]["own_micro"] == section["ledger"]["hub_micro"] == 8000
        assert section["total"]["micro"] == section["today"]["micro"] == 8000
        assert [(job["name"], job["units"], job["micro"]) for job in section["jobs"]] == [("tiny", 2, 8000)]
        assert section["devices"][0]["id"] == "gpu-a"
        assert section["hours"][-1] + section["hours"][-2] == 8000
        client = await AsyncClient.connect(short_dir / "s.sock")
        answer = await client.request("statement", by="job")
        assert answer["result"]["total"]["micro"] == 8000
        page = (await client.request("units", most=2))["result"]
        rest = (await client.request("units", most=2, after=page["next"]))["result"]
        assert sorted(one["step"] for one in [*page["units"], *rest["units"]]) == [1, 2, 3]
        assert rest["next"] is None
        assert (await client.request("units", standing="unconfirmed"))["result"]["units"][0]["hub_state"] == "claimed"
        assert (await client.request("units", most=0))["error"]["code"] == "bad_params"
        await client.close()


async def test_a_hub_that_is_away_is_said_and_what_was_known_stays(short_dir: Path) -> None:
    hub = hub_with_a_job()
    async with supervisor_running(short_dir) as running:
        running.link.account = hub
        work(running, hub, 1)
        await compared(running)
        hub.failure = HubUnreachableError("no hub answers at hub.example:50051")
        section = await compared(running)
        assert (section["ledger"]["state"], section["ledger"]["reason"]) == (
            "equal",
            "no hub answers at hub.example:50051",
        )
        running.link.show(LinkState.OFFLINE)
        running.supervisor.tick()
        section = running.sections()["income"]
        assert (section["ledger"]["state"], section["total"]["micro"]) == ("unconfirmed", 4000)


def is_shown(running: Running) -> bool:
    """The account opens beside the connection to the hub: neither waits for the other."""
    running.supervisor.tick()
    return running.sections()["income"] is not None


async def test_earnings_go_on_over_three_kills(short_dir: Path) -> None:
    """MET-04: killed three times in a job; nothing restarts at 0, nothing is counted twice, nothing falls."""
    hub = hub_with_a_job()
    totals: list[int] = []
    for life in range(4):
        async with supervisor_running(short_dir) as running:
            running.link.account = hub
            await eventually(lambda running=running: is_shown(running), "the account was opened")
            if totals:
                assert running.sections()["income"]["ledger"]["own_micro"] == totals[-1], "before the hub has spoken"
            if life:
                settle(running, hub)  # the former life's claims are made again; the hub answers the same
            work(running, hub, *range(15 * life, 15 * life + 15))
            section = await compared(running)
            totals.append(section["total"]["micro"])
            assert section["ledger"]["matched"]["units"] == 15 * (life + 1)
            income = the_income(running)
            # As kill -9 leaves it: nothing is written on the way out.
            income._book.close()
            income._usable = False
    assert totals == [60_000 * (life + 1) for life in range(4)]


async def test_a_unit_that_the_account_lost_with_its_process_comes_back_from_the_receipts(short_dir: Path) -> None:
    hub = hub_with_a_job()
    async with supervisor_running(short_dir) as running:
        running.link.account = hub
        work(running, hub, 1)
        the_income(running)._usable = False
        work(running, hub, 2)  # into the receipts only
        the_income(running)._usable = True
        the_income(running)._claimed.clear()
    async with supervisor_running(short_dir) as running:
        running.link.account = hub
        section = await compared(running)
        assert (section["ledger"]["state"], section["ledger"]["matched"]["units"]) == ("equal", 2)


async def test_a_node_that_moves_to_another_hub_begins_another_account(short_dir: Path) -> None:
    hub = hub_with_a_job()
    async with supervisor_running(short_dir) as running:
        running.link.account = hub
        work(running, hub, 1)
        await compared(running)
        running.link.show(LinkState.CONNECTED, node_id="n_other")
        running.link.account = FakeAccount()
        running.link.handler.on_earnings(Earnings())
        section = await compared(running)
        assert section["total"]["micro"] == 0
        assert (short_dir / "state" / "account-n_1.sqlite").exists()
        assert any("former identity" in event["text"] for event in running.sections()["events"])


def picture_with(running: Running, watts: Any) -> Picture:
    picture = running.supervisor.node.picture()
    kind = picture.devices[0].kind
    device = Device(device_id=DeviceId("cpu"), kind=kind, name="CPU", slots=1, power_w=watts)
    given = assignment(0)
    worker = WorkerView(
        worker_id=given.worker_id,
        assignment=given,
        life=Life(state=WorkerState.RUNNING),
        since=1.0,
        pid=None,
        progress=None,
        links=(),
        rss=None,
    )
    return replace(picture, devices=(device,), workers=(worker,))


@pytest.mark.parametrize(
    ("watts", "fixed", "source"),
    [
        (200.0, 0.0, "measured"),
        (Unavailable(reason="no RAPL"), 120.0, "fixed"),
        (Unavailable(reason="no RAPL"), 0.0, ""),
    ],
)
async def test_energy_is_measured_or_the_owners_figure_or_not_available(
    short_dir: Path, watts: Any, fixed: float, source: str
) -> None:
    overrides = {"cpu_workers": 1, "fixed_watts": fixed, "energy_price": 0.5, "currency": "EUR"}
    clock = ShiftedClock()
    async with supervisor_running(short_dir, overrides=overrides, clock=clock) as running:
        income = the_income(running)
        running.supervisor.tick()
        await eventually(lambda: running.supervisor.node.inventory.devices, "devices are known")
        for _ in range(3):
            income.on_tick(picture_with(running, watts))
            clock.monotonic_by += 2.0
        income._write()
        income.on_tick(picture_with(running, watts))
        today = running.sections()["income"]["today"]
        assert 4000 <= today["work_ms"] < 9000
        if source:
            watt = watts if source == "measured" else fixed
            assert today["millijoules"] == pytest.approx(watt * today["work_ms"], abs=watt)
            assert today["unmeasured_ms"] == 0
            assert (today["fixed_millijoules"] > 0) is (source == "fixed")
            assert today["cost_micro"] >= 1
        else:
            assert (today["millijoules"], today["unmeasured_ms"]) == (None, today["work_ms"])
        expected = {} if source == "measured" else {"cpu": "no RAPL"}
        assert running.sections()["income"]["no_power"] == expected
        ended = picture_with(running, watts)
        income.on_tick(replace(ended, workers=()))
        clock.monotonic_by += 60.0
        income.on_tick(replace(ended, workers=(), now=ended.now + 60))
        assert running.sections()["income"]["no_power"] == expected  # the gap is still shown, and so is its reason


async def test_an_account_that_cannot_be_opened_stops_nothing(short_dir: Path) -> None:
    (short_dir / "state" / "account.sqlite.damaged").mkdir(parents=True)
    (short_dir / "state" / "account.sqlite.damaged" / "x").touch()
    (short_dir / "state" / "account.sqlite").write_bytes(b"torn" * 500)
    async with supervisor_running(short_dir) as running:
        running.supervisor.tick()
        assert running.sections()["income"] is None
        client = await AsyncClient.connect(short_dir / "s.sock")
        assert (await client.request("statement"))["error"]["code"] == "no_account"
        await client.close()
