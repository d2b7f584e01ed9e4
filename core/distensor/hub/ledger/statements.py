"""What an account was given and what was taken from it, by day, job and device. Sums of transfers, nothing else."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from enum import StrEnum

from distensor.hub.ledger.accounts import DAY
from distensor.hub.ledger.transfers import Kind, Transfer

_FIRST_DAY = date(1970, 1, 1).toordinal()


class By(StrEnum):
    DAY = "day"
    JOB = "job"
    DEVICE = "device"


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The transfers of one kind in one group, as one account saw them. `micro` micro-credits came, or went if negative.

    A group is a day (1970-01-01, in UTC), a job or a device; it is empty for what belongs to none.
    """

    account: str
    group: str
    kind: str
    transfers: int
    micro: int


class Sums:
    """A statement in the making."""

    def __init__(self, by: By) -> None:
        self._by = by
        self._sums: dict[tuple[str, str, str], tuple[int, int]] = {}

    def add(self, account: str, kind: Kind, micro: int, *, at: int, job_id: str, device: str, count: int = 1) -> None:
        group = {By.DAY: day_of(at), By.JOB: job_id, By.DEVICE: device}[self._by]
        key = (account, group, kind.value)
        transfers, before = self._sums.get(key, (0, 0))
        self._sums[key] = (transfers + count, before + micro)

    def add_transfer(self, transfer: Transfer, account: str) -> None:
        for owner, amount in transfer.legs:
            if owner == account:
                self.add(account, transfer.kind, amount, at=transfer.at, job_id=transfer.job_id, device=transfer.device)

    def lines(self) -> tuple[Line, ...]:
        """In order of account, group and kind."""
        return tuple(
            Line(account=account, group=group, kind=kind, transfers=count, micro=micro)
            for (account, group, kind), (count, micro) in sorted(self._sums.items())
        )


def day_of(at: int) -> str:
    return date.fromordinal(_FIRST_DAY + at // DAY).isoformat()


def lines(transfers: Iterable[Transfer], accounts: Sequence[str], by: By) -> tuple[Line, ...]:
    """A statement of some accounts; the `micro` of each sum to its balance."""
    sums = Sums(by)
    for transfer in transfers:
        for account in accounts:
            sums.add_transfer(transfer, account)
    return sums.lines()


def to_json(statement: Iterable[Line]) -> str:
    return json.dumps([asdict(line) for line in statement], separators=(",", ":"))


def to_csv(statement: Iterable[Line]) -> str:
    """With a header. A text that a table program would take for a formula begins with an apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["account", "group", "kind", "transfers", "micro"])
    for line in statement:
        writer.writerow([_plain(line.account), _plain(line.group), line.kind, line.transfers, line.micro])
    return out.getvalue()


def _plain(text: str) -> str:
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
