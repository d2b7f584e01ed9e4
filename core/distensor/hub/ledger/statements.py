"""What an account was given and what was taken from it, by day, job and device. Sums of transfers, nothing else."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum

from distensor.hub.ledger.accounts import DAY
from distensor.hub.ledger.transfers import Transfer


class By(StrEnum):
    DAY = "day"
    JOB = "job"
    DEVICE = "device"


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The transfers of one kind in one group. `day` is counted from 1970 in UTC where the group is a day."""

    group: str
    kind: str
    transfers: int
    micro: int


def lines(transfers: Iterable[Transfer], account: str, by: By) -> tuple[Line, ...]:
    """A statement of one account; its `micro` sum to the account's balance."""
    sums: dict[tuple[str, str], tuple[int, int]] = {}
    for transfer in transfers:
        for owner, amount in transfer.legs:
            if owner == account:
                key = (_group(transfer, by), transfer.kind.value)
                count, micro = sums.get(key, (0, 0))
                sums[key] = (count + 1, micro + amount)
    return tuple(
        Line(group=group, kind=kind, transfers=count, micro=micro)
        for (group, kind), (count, micro) in sorted(sums.items())
    )


def _group(transfer: Transfer, by: By) -> str:
    if by is By.DAY:
        return f"{transfer.at // DAY:06}"
    return transfer.job_id if by is By.JOB else transfer.device


def to_json(statement: Iterable[Line]) -> str:
    return json.dumps([asdict(line) for line in statement], separators=(",", ":"))


def to_csv(statement: Iterable[Line]) -> str:
    """With a header. A text that a table program would take for a formula begins with an apostrophe."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["group", "kind", "transfers", "micro"])
    for line in statement:
        writer.writerow([_plain(line.group), line.kind, line.transfers, line.micro])
    return out.getvalue()


def _plain(text: str) -> str:
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text
