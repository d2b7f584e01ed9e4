"""The ledger. Transfers of single units are rows of `entries`, all others are in `transfers` and `legs`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from distensor.core.errors import LedgerError
from distensor.core.ids import AccountId, JobId, NodeId
from distensor.core.statement import HOUR_SECONDS
from distensor.hub.ledger.accounts import Policy, credited
from distensor.hub.ledger.transfers import Kind, Transfer
from distensor.hub.metering import Posting
from distensor.hub.stores.engine import Engine, Row, Table
from distensor.hub.stores.rows import Rows

_ENTRIES = Table(
    name="entries",
    columns=("job_id", "epoch", "step", "rank", "account", "amount", "hour"),
    texts=frozenset({"job_id", "account"}),
    key=5,
)
_TRANSFERS = Table(
    name="transfers",
    columns=("key", "kind", "at", "job_id", "device", "hour"),
    texts=frozenset({"key", "kind", "job_id", "device"}),
    key=1,
)
_LEGS = Table(name="legs", columns=("key", "account", "amount"), texts=frozenset({"key", "account"}), key=2)
_HELD = """
SELECT account, amount FROM transfers JOIN legs USING (key)
WHERE kind = 'hold' AND hour >= ? AND hour < ? AND substr(account, 1, 8) = 'pending:' AND NOT EXISTS (
    SELECT 1 FROM transfers AS decisions
    WHERE decisions.key = 'decision/' || substr(transfers.key, 6) AND decisions.kind = 'release'
)
"""
_CREDITED = """
SELECT account, CAST(sum(amount) AS BIGINT) FROM hourly
WHERE hour >= ? AND hour < ? AND substr(account, 1, 8) = 'pending:' GROUP BY account
"""
_OF_ACCOUNTS = """
SELECT transfers.key, kind, at, job_id, device, hour, account, amount FROM transfers JOIN legs USING (key)
WHERE number IN (SELECT number FROM transfers JOIN legs USING (key) WHERE account = ?) ORDER BY number, account
"""


class LedgerRows(Rows):
    """A `ledger.transfers.LedgerBooks`."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._locked = False

    def alone(self) -> None:
        if not self._locked:
            self._engine.lock_ledger()
            self._locked = True

    def balance(self, account: str) -> int:
        (amount,) = self._run(
            "SELECT coalesce((SELECT amount FROM balances WHERE account = ?), 0) "
            "+ coalesce((SELECT amount FROM moved WHERE account = ?), 0)",
            (account, account),
        ).fetchone()
        return int(amount)

    def find_transfer(self, key: str) -> Transfer | None:
        if key.startswith("unit/"):
            return self._unit_transfer(key)
        row = self._run("SELECT kind, at, job_id, device, hour FROM transfers WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        legs = self._run("SELECT account, amount FROM legs WHERE key = ? ORDER BY account", (key,)).fetchall()
        return _transfer(key, *row, legs=legs)

    def _unit_transfer(self, key: str) -> Transfer | None:
        job_id, epoch, step, rank = _unit_of(key)
        found = self._run(
            "SELECT account, amount, hour, device_id FROM entries JOIN ranks USING (job_id, epoch, rank) "
            "WHERE job_id = ? AND epoch = ? AND step = ? AND rank = ? ORDER BY account",
            (job_id, epoch, step, rank),
        ).fetchall()
        if not found:
            return None
        hour, device = found[0][2:]
        legs = [row[:2] for row in found]
        return _transfer(key, Kind.UNIT, hour * HOUR_SECONDS, job_id, device, hour, legs=legs)

    def enter_transfers(self, transfers: Sequence[Transfer]) -> None:
        entries: list[Row] = []
        rows: list[Row] = []
        legs: list[Row] = []
        for one in transfers:
            if one.kind is Kind.UNIT:
                where = _unit_of(one.key)
                entries += [(*where, account, amount, one.hour) for account, amount in one.legs]
            else:
                rows.append((one.key, one.kind.value, one.at, one.job_id, one.device, one.hour))
                legs += [(one.key, account, amount) for account, amount in one.legs]
        for table, new in ((_ENTRIES, entries), (_TRANSFERS, rows), (_LEGS, legs)):
            if new:
                self._engine.insert(table, new)

    def post(self, postings: Iterable[Posting]) -> None:
        """Credit new units. The same unit twice violates the ledger's unique key."""
        self.alone()
        self.enter_transfers(credited([one.as_credit() for one in postings], self.balance))

    def open_hour(self) -> int:
        row = self._run("SELECT value FROM meta WHERE key = 'open_hour'").fetchone()
        return 0 if row is None else int(row[0])

    def close_hours(self, until: int) -> None:
        self._run(
            "INSERT INTO meta (key, value) VALUES ('open_hour', ?) "
            "ON CONFLICT (key) DO UPDATE SET value = excluded.value",
            (until,),
        )

    def maturing(self, until: int) -> dict[str, int]:
        hours = (self.open_hour(), until)
        sums: Counter[str] = Counter()
        for query in (_CREDITED, _HELD):  # what is held is a negative amount
            for account, amount in self._run(query, hours).fetchall():
                sums[account.partition(":")[2]] += amount
        return dict(sums)

    def policy(self) -> Policy:
        """What the operator decided last."""
        found = dict(self._run("SELECT key, value FROM terms").fetchall())
        known = Policy()
        return Policy(
            deposits=bool(found.get("deposits", known.deposits)),
            fee_per_mille=found.get("fee_per_mille", known.fee_per_mille),
            challenge_seconds=found.get("challenge_seconds", known.challenge_seconds),
            micro_per_micro_batch=found.get("micro_per_micro_batch", known.micro_per_micro_batch),
        )

    def save_policy(self, policy: Policy) -> None:
        for key, value in (
            ("deposits", int(policy.deposits)),
            ("fee_per_mille", policy.fee_per_mille),
            ("challenge_seconds", policy.challenge_seconds),
            ("micro_per_micro_batch", policy.micro_per_micro_batch),
        ):
            self._run(
                "INSERT INTO terms (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                (key, value),
            )

    def transfers_of(self, account: str) -> Iterator[Transfer]:
        """All of an account but those of units, oldest first."""
        return self._whole(self._run(_OF_ACCOUNTS, (account,)).fetchall())

    def transfers_of_kind(self, kind: Kind) -> Iterator[Transfer]:
        """All of a kind other than UNIT, oldest first."""
        return self._whole(
            self._run(
                "SELECT transfers.key, kind, at, job_id, device, hour, account, amount FROM transfers "
                "JOIN legs USING (key) WHERE kind = ? ORDER BY number, account",
                (kind.value,),
            ).fetchall()
        )

    @staticmethod
    def _whole(rows: Iterable[Any]) -> Iterator[Transfer]:
        present: tuple[Any, ...] | None = None
        legs: list[tuple[str, int]] = []
        for *head, account, amount in rows:
            if present is not None and tuple(head) != present:
                yield _transfer(*present, legs=legs)
                legs = []
            present = tuple(head)
            legs.append((account, amount))
        if present is not None:
            yield _transfer(*present, legs=legs)

    def account_balances(self, prefix: str = "") -> dict[str, int]:
        """Of all accounts that begin with `prefix` and have something."""
        sums: Counter[str] = Counter()
        for table in ("balances", "moved"):
            rows = self._run(
                f"SELECT account, amount FROM {table} WHERE substr(account, 1, ?) = ?", (len(prefix), prefix)
            )
            for account, amount in rows.fetchall():
                sums[account] += amount
        return {account: amount for account, amount in sorted(sums.items()) if amount}

    def unit_sums(self, account: str, since_hour: int = 0) -> list[tuple[int, str, str, int, int]]:
        """What units brought an account or took from it: hour, job, device, how many, micro-credits."""
        return [
            tuple(row)
            for row in self._run(
                "SELECT hour, job_id, device_id, CAST(sum(entries) AS BIGINT), CAST(sum(amount) AS BIGINT) "
                "FROM hourly JOIN ranks USING (job_id, epoch, rank) WHERE account = ? AND hour >= ? "
                "GROUP BY hour, job_id, device_id ORDER BY hour, job_id, device_id",
                (account, since_hour),
            ).fetchall()
        ]

    def work_sum(self, account: str) -> tuple[int, int]:
        """What all units together brought an account, and how many they are."""
        row = self._run("SELECT amount, entries FROM balances WHERE account = ?", (account,)).fetchone()
        return (0, 0) if row is None else (row[0], row[1])

    def job_sums(self, job_id: str) -> dict[str, int]:
        return dict(
            self._run(
                "SELECT account, CAST(sum(amount) AS BIGINT) FROM hourly WHERE job_id = ? GROUP BY account "
                "ORDER BY account",
                (job_id,),
            ).fetchall()
        )

    def units_of_job(self, job_id: str) -> int:
        (count,) = self._run(
            "SELECT coalesce(CAST(sum(entries) AS BIGINT), 0) FROM hourly WHERE job_id = ? "
            "AND substr(account, 1, 8) = 'pending:'",
            (job_id,),
        ).fetchone()
        return int(count)

    def nodes_of(self, account: str) -> list[NodeId]:
        rows = self._run("SELECT node_id FROM nodes WHERE account = ? ORDER BY node_id", (account,)).fetchall()
        return [NodeId(node_id) for (node_id,) in rows]

    def jobs_of(self, account: str) -> list[JobId]:
        rows = self._run("SELECT job_id FROM jobs WHERE owner = ? ORDER BY number", (account,)).fetchall()
        return [JobId(job_id) for (job_id,) in rows]

    def owner_of_node(self, node_id: str) -> AccountId | None:
        row = self._run("SELECT account FROM nodes WHERE node_id = ?", (node_id,)).fetchone()
        return None if row is None else AccountId(row[0])

    def open_units(self, job_id: str) -> int:
        """Micro-batches of the job's units of which only one side has said something yet."""
        (size,) = self._run(
            "SELECT coalesce(CAST(sum(coalesce(claimed, received)) AS BIGINT), 0) FROM units "
            "WHERE job_id = ? AND state IN ('claimed', 'received')",
            (job_id,),
        ).fetchone()
        return int(size)


def _unit_of(key: str) -> tuple[str, int, int, int]:
    parts = key.split("/")
    if len(parts) != 5:
        raise LedgerError(f"transfer {key}: expected unit/JOB/EPOCH/STEP/RANK")
    _, job_id, epoch, step, rank = parts
    return job_id, int(epoch), int(step), int(rank)


def _transfer(key: str, kind: str, at: int, job_id: str, device: str, hour: int, *, legs: Iterable[Any]) -> Transfer:
    return Transfer(
        key=key,
        kind=Kind(kind),
        legs=tuple((account, int(amount)) for account, amount in legs),
        at=at,
        job_id=job_id,
        device=device,
        hour=hour,
    )
