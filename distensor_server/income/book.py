"""A node's own account in one SQLite file: its units, the hub's statement, the energy. Survives kill -9; bounded.

Not fsynced with every unit: the receipts are the record of claims and the hub has the ledger, so what a power cut takes
from the end of this file comes back from both.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from distensor.core.control import Unit, UnitKey
from distensor.core.errors import StoreError
from distensor.core.ids import DeviceId, Epoch, JobId, Rank
from distensor.core.statement import HubUnit, RowKey, StatementRow, UnitState
from distensor_server.income.schema import SCHEMA, SCHEMA_VERSION
from distensor_server.income.standing import Standing, standing
from distensor_server.income.values import Count, Energy, OwnUnit, RankLine
from distensor_server.workforce import file_word

Row: TypeAlias = tuple[Any, ...]
MATCHED_KEPT = 5000
"""So many of the newest matched units stay single; older ones become sums."""
_UNIT = "job, epoch, rank, step, claimed, seen, standing, hub_state, hub_claimed, hub_received, micro"


class AccountBook:
    """Used by one thread. Every method may raise StoreError; then nothing of its change is kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def open(self) -> str | None:
        """Open or create; the reason when a damaged file was set aside and begun anew."""
        try:
            self._connect()
        except sqlite3.DatabaseError as error:
            self._drop()
            try:
                self._path.replace(self._path.with_name(f"{self._path.name}.damaged"))
                for more in ("-wal", "-shm"):
                    self._path.with_name(self._path.name + more).unlink(missing_ok=True)
                self._connect()
            except (OSError, sqlite3.Error) as again:
                raise StoreError(f"account {self._path}: {again}") from again
            return str(error)
        return None

    def _connect(self) -> None:
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=True, timeout=1.0)
        self._connection = connection
        self._path.chmod(0o600)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA cache_size = -512")  # KiB; the whole supervisor has to stay small
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise sqlite3.DatabaseError(f"version {version}, this program knows up to {SCHEMA_VERSION}")
        if version < SCHEMA_VERSION:
            connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")

    def _drop(self) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None

    def close(self) -> None:
        self._drop()

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        connection = self._required()
        try:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise StoreError(f"account {self._path}: {error}") from error

    def _rows(self, statement: str, *values: object) -> list[Row]:
        try:
            return self._required().execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(f"account {self._path}: {error}") from error

    def _required(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StoreError(f"account {self._path} is not open")
        return self._connection

    # Units

    def claimed(self, units: Iterable[tuple[Unit, float]]) -> None:
        """Units that this node claimed, with their Unix time. Known ones, also compacted ones, stay as they are."""
        with self._change() as connection:
            for unit, at in units:
                key = unit.key
                line = (key.job_id, key.epoch, key.rank)
                if key.step > self._through(connection, line):
                    connection.execute(
                        f"INSERT INTO units ({_UNIT}) VALUES (?, ?, ?, ?, ?, ?, ?, NULL, NULL, NULL, 0) "  # noqa: S608 - own words
                        "ON CONFLICT (job, epoch, rank, step) DO NOTHING",
                        (*line, key.step, unit.micro_batches, int(at), Standing.UNCONFIRMED.value),
                    )

    @staticmethod
    def _through(connection: sqlite3.Connection, line: tuple[str, int, int]) -> int:
        found = connection.execute(
            "SELECT max(through) FROM settled WHERE job = ? AND epoch = ? AND rank = ?", line
        ).fetchone()
        return -1 if found[0] is None else int(found[0])

    def first_single(self, line: RankLine) -> int:
        """The first step of a rank that is not compacted."""
        return self._through(self._required(), (line.job_id, line.epoch, line.rank)) + 1

    def compare(
        self, line: RankLine, hub: Iterable[HubUnit], *, first: int, last: int | None, now: float
    ) -> list[Unit]:
        """Lay the hub's units of steps `first` to `last` (None: to the end) beside ours.

        Returns the units of ours that the hub has never heard of.
        """
        theirs = {unit.key.step: unit for unit in hub}
        lost: list[Unit] = []
        with self._change() as connection:
            first = max(first, self._through(connection, (line.job_id, line.epoch, line.rank)) + 1)
            ours = {unit.step: unit for unit in self._steps(line, first, last)}
            for step in sorted(ours.keys() | {step for step in theirs if step >= first}):
                found = _compared(line, step, ours.get(step), theirs.get(step), now)
                if found is not None and found != ours.get(step):
                    _save(connection, found)
                if found is not None and found.standing is Standing.MISSING_THERE:
                    lost.append(_as_unit(found))
        return lost

    def _steps(self, line: RankLine, first: int, last: int | None) -> list[OwnUnit]:
        found = self._rows(
            f"SELECT {_UNIT} FROM units WHERE job = ? AND epoch = ? AND rank = ? AND step >= ? AND step <= ?",  # noqa: S608 - own words
            line.job_id, line.epoch, line.rank, first, (1 << 62) if last is None else last,
        )  # fmt: skip
        return [_unit(row) for row in found]

    def open_steps(self, since: int) -> dict[RankLine, list[int]]:
        """The steps of each rank of which the hub may have more to say; only ranks that claimed one after `since`."""
        words = (Standing.UNCONFIRMED.value, Standing.MISSING_THERE.value)
        found = self._rows(
            "SELECT job, epoch, rank, step FROM units WHERE standing IN (?, ?) AND (job, epoch, rank) IN ("
            "SELECT job, epoch, rank FROM units WHERE standing IN (?, ?) AND seen >= ?) ORDER BY 1, 2, 3, 4",
            *words, *words, since,
        )  # fmt: skip
        steps: dict[RankLine, list[int]] = {}
        for row in found:
            steps.setdefault(_line(row), []).append(row[3])
        return steps

    def lines_that_differ(self) -> dict[RankLine, tuple[int, int]]:
        """Ranks whose credits differ, with the sums: (ours, the hub's)."""
        own, hub = self.own_sums(), self.hub_sums()
        pairs = {line: (own.get(line, (0, 0))[1], hub.get(line, (0, 0))[1]) for line in own.keys() | hub.keys()}
        return {line: pair for line, pair in pairs.items() if pair[0] != pair[1]}

    def own_sums(self) -> dict[RankLine, tuple[int, int]]:
        """Credited units and micro-credits of each rank, as this node counts them: one by one."""
        return self._line_sums(
            "SELECT job, epoch, rank, sum(units), sum(micro) FROM ("
            "SELECT job, epoch, rank, units, micro FROM settled UNION ALL "
            "SELECT job, epoch, rank, 1, micro FROM units WHERE micro <> 0) GROUP BY job, epoch, rank"
        )

    def hub_sums(self) -> dict[RankLine, tuple[int, int]]:
        """The same as the hub's statement has it."""
        return self._line_sums(
            "SELECT job, epoch, rank, sum(units), sum(micro) FROM statement GROUP BY job, epoch, rank"
        )

    def _line_sums(self, query: str) -> dict[RankLine, tuple[int, int]]:
        return {_line(row): (row[3], row[4]) for row in self._rows(query)}

    def counts(self) -> dict[Standing, Count]:
        """How many units stand where; matched ones with those that were compacted."""
        found = self._rows(
            "SELECT standing, count(*), sum(micro), sum(coalesce(claimed, 0)), min(seen) FROM units GROUP BY standing"
        )
        counts = {Standing(str(word)): _count(*rest) for word, *rest in found}
        ((units, micro),) = self._rows("SELECT coalesce(sum(units), 0), coalesce(sum(micro), 0) FROM settled")
        single = counts.get(Standing.MATCHED, Count())
        whole = Count(units=single.units + units, micro=single.micro + micro, since=single.since)
        return {**{kind: Count() for kind in Standing}, **counts, Standing.MATCHED: whole}

    def units(
        self, standing: Standing | None, before: tuple[int, str, int, int, int] | None, most: int
    ) -> list[OwnUnit]:
        """Single units, the newest first; `before` is where the last page ended."""
        cursor = before or (1 << 62, "", 0, 0, 0)
        word = "%" if standing is None else standing.value
        found = self._rows(
            f"SELECT {_UNIT} FROM units WHERE standing LIKE ? AND (seen, job, epoch, rank, step) < (?, ?, ?, ?, ?) "  # noqa: S608 - own words
            "ORDER BY seen DESC, job DESC, epoch DESC, rank DESC, step DESC LIMIT ?",
            word, *cursor, most,
        )  # fmt: skip
        return [_unit(row) for row in found]

    def last_seen(self) -> int | None:
        """Unix time of the newest unit."""
        return next((row[0] for row in self._rows("SELECT max(seen) FROM units")), None)

    def compact(self) -> None:
        """Sum up old matched units, each rank's up to its first open one, so that no sum counts a unit twice."""
        with self._change() as connection:
            for line, stop in self._old_matched(connection):
                where = (*line, stop)
                connection.execute(
                    "INSERT INTO settled (day, job, epoch, rank, units, micro, through) "
                    "SELECT seen / 86400, job, epoch, rank, count(*), sum(micro), max(step) FROM units "
                    "WHERE job = ? AND epoch = ? AND rank = ? AND step <= ? AND standing = 'matched' "
                    "GROUP BY seen / 86400 "
                    "ON CONFLICT (job, epoch, rank, day) DO UPDATE SET units = units + excluded.units, "
                    "micro = micro + excluded.micro, through = max(through, excluded.through)",
                    where,
                )
                connection.execute(
                    "DELETE FROM units WHERE job = ? AND epoch = ? AND rank = ? AND step <= ? AND standing = 'matched'",
                    where,
                )

    @staticmethod
    def _old_matched(connection: sqlite3.Connection) -> list[tuple[tuple[str, int, int], int]]:
        """For each rank the last step that is old and matched, with nothing open or new before it."""
        border = connection.execute(
            "SELECT seen FROM units WHERE standing = 'matched' ORDER BY seen DESC LIMIT 1 OFFSET ?", (MATCHED_KEPT,)
        ).fetchone()
        if border is None:
            return []
        stops = {
            (job, epoch, rank): step
            for job, epoch, rank, step in connection.execute(
                "SELECT job, epoch, rank, min(step) FROM units WHERE standing IN (?, ?) OR seen > ? "
                "GROUP BY job, epoch, rank",
                (Standing.UNCONFIRMED.value, Standing.MISSING_THERE.value, border[0]),
            )
        }
        lines = connection.execute("SELECT DISTINCT job, epoch, rank FROM units WHERE standing = 'matched'").fetchall()
        return [((job, epoch, rank), stops.get((job, epoch, rank), (1 << 62) + 1) - 1) for job, epoch, rank in lines]

    # The hub's statement

    def replace_statement(self, since_hour: int, rows: Iterable[StatementRow]) -> None:
        """The hub's rows from `since_hour` on are these."""
        with self._change() as connection:
            connection.execute("DELETE FROM statement WHERE hour >= ?", (since_hour,))
            connection.executemany(
                "INSERT INTO statement VALUES (?, ?, ?, ?, ?, ?, ?)",
                [
                    (row.key.hour, row.key.job_id, row.key.epoch, row.key.rank, row.device_id, row.units, row.micro)
                    for row in rows
                ],
            )

    def statement(self) -> list[StatementRow]:
        """What the hub credited, oldest first."""
        found = self._rows("SELECT hour, job, epoch, rank, device, units, micro FROM statement ORDER BY 1, 2, 3, 4")
        return [_statement_row(row) for row in found]

    def last_hour(self) -> int:
        """The newest hour of the statement; what was posted then may have grown since. 0 for none."""
        ((hour,),) = self._rows("SELECT coalesce(max(hour), 0) FROM statement")
        return int(hour)

    # Energy

    def used(self, energy: Iterable[Energy]) -> None:
        with self._change() as connection:
            connection.executemany(
                "INSERT INTO energy VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (hour, device, source) DO UPDATE SET "
                "millijoules = millijoules + excluded.millijoules, measured_ms = measured_ms + excluded.measured_ms, "
                "work_ms = work_ms + excluded.work_ms",
                [(e.hour, e.device, e.source, e.millijoules, e.measured_ms, e.work_ms) for e in energy],
            )

    def energy(self) -> list[Energy]:
        """Oldest first."""
        found = self._rows(
            "SELECT hour, device, source, millijoules, measured_ms, work_ms FROM energy ORDER BY 1, 2, 3"
        )
        return [
            Energy(
                hour=hour,
                device=str(device),
                source=str(source),
                millijoules=mj,
                measured_ms=measured,
                work_ms=work,
            )
            for hour, device, source, mj, measured, work in found
        ]

    def put_together(self, hours: Mapping[int, int]) -> None:
        """Move what stands at each hour to another one: old hours become days, and very old days one sum."""
        moves = [(new, old) for old, new in hours.items() if old != new]
        if not moves:
            return
        with self._change() as connection:
            connection.executemany(
                "INSERT INTO statement SELECT ?, job, epoch, rank, device, units, micro FROM statement WHERE hour = ? "
                "ON CONFLICT (hour, job, epoch, rank) "
                "DO UPDATE SET units = units + excluded.units, micro = micro + excluded.micro",
                moves,
            )
            connection.executemany(
                "INSERT INTO energy SELECT ?, device, source, millijoules, measured_ms, work_ms FROM energy "
                "WHERE hour = ? "
                "ON CONFLICT (hour, device, source) DO UPDATE SET millijoules = millijoules + excluded.millijoules, "
                "measured_ms = measured_ms + excluded.measured_ms, work_ms = work_ms + excluded.work_ms",
                moves,
            )
            olds = [(old,) for _, old in moves]
            connection.executemany("DELETE FROM statement WHERE hour = ?", olds)
            connection.executemany("DELETE FROM energy WHERE hour = ?", olds)

    # Names

    def belongs_to(self, node_id: str) -> bool:
        """Whether this is the account of `node_id`; one of nobody becomes that node's."""
        with self._change() as connection:
            connection.execute("INSERT OR IGNORE INTO owner VALUES (0, ?)", (node_id,))
            return bool(connection.execute("SELECT node_id = ? FROM owner", (node_id,)).fetchone()[0])

    def begin_anew(self) -> Path:
        """Put the file aside, because it belongs to another node's account; where it is now."""
        ((owner,),) = self._rows("SELECT node_id FROM owner")
        self._drop()
        aside = self._path.with_name(f"{self._path.stem}-{file_word(owner)}{self._path.suffix}")
        try:
            self._path.replace(aside)
        except OSError as error:
            raise StoreError(f"account {self._path}: {error.strerror}") from error
        self.open()
        return aside

    def name_job(self, job_id: str, name: str, now: float) -> None:
        with self._change() as connection:
            connection.execute(
                "INSERT INTO jobs VALUES (?, ?, ?) ON CONFLICT (job) DO UPDATE SET name = excluded.name",
                (job_id, name, int(now)),
            )

    def job_names(self) -> dict[str, str]:
        return {str(job): str(name) for job, name in self._rows("SELECT job, name FROM jobs")}


def _compared(line: RankLine, step: int, own: OwnUnit | None, hub: HubUnit | None, now: float) -> OwnUnit | None:
    claimed, seen = (None, int(now)) if own is None else (own.claimed, own.seen)
    found = standing(claimed, hub, now - seen)
    if found is None:
        return None
    return OwnUnit(
        line=line,
        step=step,
        claimed=claimed,
        seen=seen,
        standing=found,
        hub_state=None if hub is None else hub.state,
        hub_claimed=None if hub is None else hub.claimed,
        hub_received=None if hub is None else hub.received,
        micro=0 if hub is None else hub.micro,
    )


def _save(connection: sqlite3.Connection, unit: OwnUnit) -> None:
    line = unit.line
    connection.execute(
        f"INSERT OR REPLACE INTO units ({_UNIT}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",  # noqa: S608 - own words
        (
            line.job_id,
            line.epoch,
            line.rank,
            unit.step,
            unit.claimed,
            unit.seen,
            unit.standing.value,
            None if unit.hub_state is None else unit.hub_state.value,
            unit.hub_claimed,
            unit.hub_received,
            unit.micro,
        ),
    )


def _as_unit(unit: OwnUnit) -> Unit:
    line = unit.line
    key = UnitKey(job_id=line.job_id, epoch=line.epoch, step=unit.step, rank=line.rank)
    return Unit(key=key, micro_batches=unit.claimed or 0)


def _line(row: Row) -> RankLine:
    return RankLine(job_id=JobId(str(row[0])), epoch=Epoch(row[1]), rank=Rank(row[2]))


def _unit(row: Row) -> OwnUnit:
    return OwnUnit(
        line=_line(row),
        step=row[3],
        claimed=row[4],
        seen=row[5],
        standing=Standing(str(row[6])),
        hub_state=None if row[7] is None else UnitState(str(row[7])),
        hub_claimed=row[8],
        hub_received=row[9],
        micro=row[10],
    )


def _count(units: int, micro: int, micro_batches: int, since: int) -> Count:
    return Count(units=units, micro=micro, micro_batches=micro_batches, since=since)


def _statement_row(row: Row) -> StatementRow:
    hour, job, epoch, rank, device, units, micro = row
    key = RowKey(hour=hour, job_id=JobId(str(job)), epoch=Epoch(epoch), rank=Rank(rank))
    return StatementRow(key=key, device_id=DeviceId(str(device)), units=units, micro=micro)
