"""The node's own account at work: units and energy into the book, the hub's account beside them, the section."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distensor.comm import LinkState
from distensor.core.control import Assignment, Earnings, Unit, WorkerState
from distensor.core.errors import ControlError, StoreError
from distensor.core.reading import Unavailable
from distensor.core.statement import hour_of
from distensor_server.config import Limits
from distensor_server.income.book import AccountBook
from distensor_server.income.energy import EnergyMeter, Tariff, Used
from distensor_server.income.methods import answered, statement_rows, unit_page
from distensor_server.income.section import Account, Compared, income
from distensor_server.income.sums import Calendar, hours_together
from distensor_server.income.sync import Synchroniser
from distensor_server.income.values import Energy
from distensor_server.localserver import RequestError
from distensor_server.node import Node
from distensor_server.picture import Picture
from distensor_server.receipts import local_day
from distensor_server.sections import Section

SYNC_SECONDS = 20.0
"""So often at most the hub is asked, and only when there is something to ask."""
IDLE_SYNC_SECONDS = 900.0
ENERGY_SECONDS = 30.0
"""So much energy a kill -9 can cost: it is written this often."""
WORKING = (WorkerState.RUNNING, WorkerState.DRAINING)
OVERLAP_SECONDS = 60.0
MACHINE = "machine"
"""The device of the owner's own figure of power."""


class Keeper:
    """What `feature.Income` does once it is loaded. All methods belong to the event loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._book = AccountBook(node.state.root / "account.sqlite")
        self._sync = Synchroniser(book=self._book, source=node.link, clock=node.clock, claim_again=node.link.claim)
        self._meter = EnergyMeter()
        self._used: dict[tuple[int, str, str], Energy] = {}
        self._used_at = node.clock.monotonic()
        self._no_power: dict[str, str] = {}
        self._calendar = Calendar(local_day)
        self._compared = Compared()
        self._wake = asyncio.Event()
        self._synced_at: float | None = None
        self._news = True
        self._claimed: list[tuple[Unit, float]] = []
        self._names: dict[str, str] = {}
        self._usable = False
        self._section: Section = None
        self._stale = True
        self._shown_at = -1
        self._shown_link: LinkState | None = None
        self._tariff = _tariff(node.limits)

    # The supervisor's calls

    def open(self) -> None:
        self._node.journal.guarded(self._open)

    def _open(self) -> None:
        damaged = self._book.open()
        self._usable = True
        if damaged is not None:
            text = f"account.sqlite was damaged ({damaged}): kept as account.sqlite.damaged, begun anew from the hub"
            self._node.journal.add("warning", "earnings", text)
        self._names = self._book.job_names()
        now = self._node.clock.now()
        last = self._book.last_seen()
        # The receipts are written first, so they may know of units that this file lost with its process.
        self._book.claimed([(unit, now) for unit in self._node.books.since(last - OVERLAP_SECONDS if last else now)])

    def close(self) -> None:
        if self._usable:
            self._node.journal.guarded(self._write)
            self._book.close()

    def on_claim(self, assignment: Assignment, unit: Unit) -> None:
        self._claimed.append((unit, self._node.clock.now()))
        self._news = self._stale = True
        self._node.journal.guarded(lambda: self._write_claims(assignment))

    def _write_claims(self, assignment: Assignment | None = None) -> None:
        """What could not be written, as on a full disk, waits for the next time."""
        if not self._usable:
            return
        if assignment is not None and assignment.job_id not in self._names:
            self._book.name_job(assignment.job_id, assignment.job_name, self._node.clock.now())
            self._names[assignment.job_id] = assignment.job_name
        if self._claimed:
            self._book.claimed(self._claimed)
            self._claimed.clear()

    def on_earnings(self, earnings: Earnings) -> None:
        self._news = self._stale = True

    def on_limits(self, limits: Limits) -> None:
        self._tariff = _tariff(limits)
        self._stale = True

    def on_woken(self) -> None:
        self._meter.interrupt()

    def on_clock_set(self, by: float) -> None:
        self._calendar.forget()

    def on_tick(self, picture: Picture) -> None:
        if not self._usable:
            return
        self._measure(picture)
        self._node.journal.guarded(self._write_claims)
        if self._used and self._node.clock.monotonic() - self._used_at >= ENERGY_SECONDS:
            self._node.journal.guarded(self._write)
        if self._due(picture):
            self._wake.set()
        self._refresh(picture)

    # Energy

    def _measure(self, picture: Picture) -> None:
        """Add what the devices of running workers used since the last tick."""
        working = {w.assignment.device_id for w in picture.workers if w.life.state in WORKING}
        watts: dict[str, float | None] = {}
        missing: dict[str, str] = {}
        for device in picture.devices:
            if device.device_id not in working:
                continue
            if isinstance(device.power_w, Unavailable):
                missing[device.device_id] = device.power_w.reason
            else:
                watts[device.device_id] = device.power_w
        # The reason is shown as long as the gap that it explains: after the work, too.
        known = {device.device_id for device in picture.devices} - watts.keys()
        self._no_power = {name: why for name, why in (self._no_power | missing).items() if name in known}
        fixed = self._node.limits.fixed_watts
        if missing and fixed > 0:
            watts[MACHINE] = fixed
        elif missing:
            watts.update(dict.fromkeys(missing))
        hour = hour_of(picture.now)
        for name, used in self._meter.sample(self._node.clock.monotonic(), watts).items():
            self._add(hour, name, used)

    def _add(self, hour: int, device: str, used: Used) -> None:
        key = (hour, device, "fixed" if device == MACHINE else "measured")
        before = self._used.get(key)
        self._used[key] = Energy(
            hour=hour,
            device=device,
            source=key[2],
            millijoules=used.millijoules + (before.millijoules if before else 0),
            measured_ms=used.measured_ms + (before.measured_ms if before else 0),
            work_ms=used.work_ms + (before.work_ms if before else 0),
        )

    def _write(self) -> None:
        self._write_claims()
        self._book.used(self._used.values())
        self._used.clear()
        self._used_at = self._node.clock.monotonic()
        self._stale = True

    # The comparison with the hub

    def _due(self, picture: Picture) -> bool:
        if picture.link.state is not LinkState.CONNECTED or picture.link.node_id is None:
            return False
        if self._synced_at is None:
            return True
        waited = self._node.clock.monotonic() - self._synced_at
        return waited >= (SYNC_SECONDS if self._news else IDLE_SYNC_SECONDS)

    async def keep_comparing(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            self._synced_at = self._node.clock.monotonic()
            self._news = False
            await self._compare()
            self._stale = True
            self._node.on_change()

    async def _compare(self) -> None:
        try:
            self._bind()
            await self._sync.run()
            self._tidy()
        except (ControlError, StoreError) as error:
            self._compared = replace(self._compared, problem=str(error))
            self._news = True
        else:
            now = self._node.clock.now()
            self._compared = Compared(at=now, problem=None, lasting=self._sync.lasting)

    def _bind(self) -> None:
        """The account is one node's at one hub; a node that moved to another hub begins another one."""
        node_id = self._node.link.status.node_id
        if node_id is not None and not self._book.belongs_to(node_id):
            aside = self._book.begin_anew()
            self._book.belongs_to(node_id)
            text = f"this node is {node_id} now: the account of its former identity is kept as {aside.name}"
            self._node.journal.add("info", "earnings", text)

    def _tidy(self) -> None:
        self._book.compact()
        hours = [row.key.hour for row in self._book.statement()] + [one.hour for one in self._book.energy()]
        self._book.put_together(hours_together(hours, self._node.clock.now(), self._calendar))

    # What is shown

    def _refresh(self, picture: Picture) -> None:
        """Make the section anew when something happened, and once a minute because time goes on."""
        minute = int(picture.now // 60)
        changed = self._shown_at != minute or self._stale or picture.link.state is not self._shown_link
        if changed:
            self._node.journal.guarded(self._make)
            self._shown_at, self._shown_link, self._stale = minute, picture.link.state, False

    def _make(self) -> None:
        self._section = income(self._account(), self._calendar, local_day)

    def _account(self) -> Account:
        node = self._node
        return Account(
            now=node.clock.now(),
            link=node.link.status,
            earnings=node.books.earnings,
            rows=self._book.statement(),
            energy=[*self._book.energy(), *self._used.values()],
            counts=self._book.counts(),
            own_micro=sum(micro for _, micro in self._book.own_sums().values()),
            compared=self._compared,
            tariff=self._tariff,
            no_power=self._no_power,
            names=self._names,
            money=self._sync.money,
        )

    @property
    def section(self) -> Section:
        """None until the first tick."""
        return self._section

    def statement(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        self._require()
        return answered(lambda: statement_rows(params, self._account(), self._calendar))

    def units(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        self._require()
        return answered(lambda: unit_page(params, self._book, self._names))

    def _require(self) -> None:
        if not self._usable:
            fix = f"make room or repair the permissions in {self._node.state.root}, then restart the supervisor"
            raise RequestError(code="no_account", message="the account cannot be opened; see `distensor logs`", fix=fix)


def _tariff(limits: Limits) -> Tariff:
    return Tariff(
        price_micro=round(limits.energy_price * 1_000_000),
        currency=limits.currency,
        credits_micro=round(limits.credits_per_currency * 1_000_000),
    )
