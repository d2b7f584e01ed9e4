"""The node's own record of the work that it claimed, and totals that survive a restart."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from distensor.core.control import Earnings, Unit, UnitKey
from distensor.core.errors import StoreError
from distensor.core.ids import Epoch, JobId, Rank
from distensor_server.statedir import read_json, write_json


def local_day(now: float) -> str:
    """The owner's calendar day at Unix time `now`: '2026-01-31'."""
    return time.strftime("%Y-%m-%d", time.localtime(now))


class ReceiptLog:
    """One JSON line for each claim, one file for each day, only ever appended to.

    A line is handed to the system before the claim is sent, so it survives the death of this process.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._day = ""
        self._fd: int | None = None

    def append(self, unit: Unit, now: float) -> None:
        key = unit.key
        line = json.dumps(
            {
                "v": 1,
                "at": round(now, 3),
                "job": key.job_id,
                "epoch": key.epoch,
                "step": key.step,
                "rank": key.rank,
                "micro_batches": unit.micro_batches,
            }
        )
        try:
            os.write(self._file(local_day(now)), line.encode() + b"\n")
        except OSError as error:
            raise StoreError(f"cannot write receipts in {self._directory}: {error.strerror}") from error

    def since(self, moment: float, now: float) -> Iterator[Unit]:
        """The claims made from `moment` to `now`; lines that a crash left incomplete are skipped."""
        first, last = local_day(moment), local_day(now)
        for path in sorted(self._directory.glob("????-??-??.jsonl")):
            if first <= path.stem <= last:
                yield from _read(path, moment)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _file(self, day: str) -> int:
        if self._fd is None or day != self._day:
            self.close()
            path = self._directory / f"{day}.jsonl"
            self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            self._day = day
            _end_torn_line(self._fd)
        return self._fd


def _end_torn_line(fd: int) -> None:
    """A write that a full disk or a power cut tore must not swallow the next line."""
    size = os.fstat(fd).st_size
    if size and os.pread(fd, 1, size - 1) != b"\n":
        os.write(fd, b"\n")


def _read(path: Path, moment: float) -> Iterator[Unit]:
    with path.open("rb") as file:
        for line in file:
            unit = _parse(line, moment)
            if unit is not None:
                yield unit


def _parse(line: bytes, moment: float) -> Unit | None:
    try:
        fields = json.loads(line)
        if fields["at"] < moment:
            return None
        key = UnitKey(
            job_id=JobId(str(fields["job"])),
            epoch=Epoch(int(fields["epoch"])),
            step=int(fields["step"]),
            rank=Rank(int(fields["rank"])),
        )
        return Unit(key=key, micro_batches=int(fields["micro_batches"]))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierDay:
    """How a day that is not today began, and what was claimed on it."""

    day: str
    baseline_micro: int
    claimed_units: int


KEPT_DAYS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """What was earned and claimed on one day of the owner's calendar."""

    day: str = ""
    baseline_micro: int = 0
    """What the hub had confirmed when the day began, as far as this node knows."""
    last_micro: int = 0
    claimed_units: int = 0
    earlier: tuple[EarlierDay, ...] = ()
    """The days before, newest last: a clock that was wrong for a while must not end the right day."""

    def on_day(self, day: str) -> Totals:
        """The totals of `day`; a new day starts from what was last confirmed."""
        if day == self.day:
            return self
        before = EarlierDay(day=self.day, baseline_micro=self.baseline_micro, claimed_units=self.claimed_units)
        known = next((item for item in self.earlier if item.day == day), None)
        return Totals(
            day=day,
            baseline_micro=min(known.baseline_micro, self.last_micro) if known else self.last_micro,
            last_micro=self.last_micro,
            claimed_units=known.claimed_units if known else 0,
            earlier=(*(item for item in self.earlier if item.day != day), before)[-KEPT_DAYS:] if self.day else (),
        )

    def claimed(self, day: str) -> Totals:
        today = self.on_day(day)
        return replace(today, claimed_units=today.claimed_units + 1)

    def confirmed(self, day: str, earnings: Earnings) -> Totals:
        """A hub that lost its books says less than before: then the day starts again from there."""
        today = self.on_day(day)
        micro = earnings.confirmed_micro
        return replace(today, last_micro=micro, baseline_micro=min(today.baseline_micro, micro))

    @property
    def today_micro(self) -> int:
        return self.last_micro - self.baseline_micro


def load_totals(path: Path) -> Totals:
    stored = read_json(path) or {}
    try:
        return Totals(
            day=str(stored["day"]),
            baseline_micro=int(stored["baseline_micro"]),
            last_micro=int(stored["last_micro"]),
            claimed_units=int(stored["claimed_units"]),
            earlier=tuple(
                EarlierDay(
                    day=str(item["day"]),
                    baseline_micro=int(item["baseline_micro"]),
                    claimed_units=int(item["claimed_units"]),
                )
                for item in stored.get("earlier", [])
            ),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return Totals()


def save_totals(path: Path, totals: Totals) -> None:
    write_json(
        path,
        {
            "v": 1,
            "day": totals.day,
            "baseline_micro": totals.baseline_micro,
            "last_micro": totals.last_micro,
            "claimed_units": totals.claimed_units,
            "earlier": [asdict(item) for item in totals.earlier],
        },
    )
