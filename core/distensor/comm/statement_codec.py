"""Statements and units: protobuf <-> the values of `distensor.core.statement`, checked like everything that arrives."""

from __future__ import annotations

from distensor.comm.codec import read_earnings, read_name, read_text, write_earnings
from distensor.core.control import UnitKey
from distensor.core.errors import HubProtocolError
from distensor.core.ids import DeviceId, Epoch, JobId, Rank
from distensor.core.statement import (
    MOST_ROWS,
    HubUnit,
    NodeMoney,
    RowKey,
    Statement,
    StatementQuery,
    StatementRow,
    UnitsPage,
    UnitsQuery,
    UnitState,
)
from distensor.proto import control_pb2 as pb

LARGEST = (1 << 63) - 1
"""What a database can hold."""


def _read_number(value: int, field: str) -> int:
    if not 0 <= value <= LARGEST:
        raise HubProtocolError(f"{field}={value}: expected 0 to {LARGEST}")
    return value


def _read_most(value: int) -> int:
    if not 1 <= value <= MOST_ROWS:
        raise HubProtocolError(f"most={value}: expected 1 to {MOST_ROWS}")
    return value


def _check_length(count: int, what: str) -> None:
    if count > MOST_ROWS:
        raise HubProtocolError(f"{count} {what} in one page; at most {MOST_ROWS} are allowed")


def _write_key(key: RowKey) -> pb.StatementKey:
    return pb.StatementKey(hour=key.hour, job_id=key.job_id, epoch=key.epoch, rank=key.rank)


def _read_key(message: pb.StatementKey) -> RowKey:
    return RowKey(
        hour=_read_number(message.hour, "hour"),
        job_id=JobId(read_name(message.job_id, "job_id")),
        epoch=Epoch(_read_number(message.epoch, "epoch")),
        rank=Rank(message.rank),
    )


def write_query(query: StatementQuery) -> pb.StatementRequest:
    after = None if query.after is None else _write_key(query.after)
    return pb.StatementRequest(since_hour=query.since_hour, after=after, most=query.most)


def read_query(message: pb.StatementRequest) -> StatementQuery:
    return StatementQuery(
        since_hour=_read_number(message.since_hour, "since_hour"),
        after=_read_key(message.after) if message.HasField("after") else None,
        most=_read_most(message.most),
    )


def write_statement(statement: Statement) -> pb.StatementReply:
    return pb.StatementReply(
        rows=[
            pb.StatementRowMessage(key=_write_key(row.key), device_id=row.device_id, units=row.units, micro=row.micro)
            for row in statement.rows
        ],
        more=statement.more,
        earnings=write_earnings(statement.earnings),
        money=_write_money(statement.money),
    )


def _write_money(money: NodeMoney) -> pb.NodeMoneyMessage:
    return pb.NodeMoneyMessage(
        credited=money.credited,
        pending=money.pending,
        held=money.held,
        payable=money.payable,
        clearing=money.clearing,
        paid=money.paid,
        void=money.void,
        fees=money.fees,
    )


def _read_money(message: pb.NodeMoneyMessage) -> NodeMoney:
    money = NodeMoney(
        credited=_read_number(message.credited, "credited"),
        pending=_read_number(message.pending, "pending"),
        held=_read_number(message.held, "held"),
        payable=_read_number(message.payable, "payable"),
        clearing=_read_number(message.clearing, "clearing"),
        paid=_read_number(message.paid, "paid"),
        void=_read_number(message.void, "void"),
        fees=_read_number(message.fees, "fees"),
    )
    there = money.pending + money.held + money.payable + money.clearing + money.paid + money.void
    if there != money.credited:
        raise HubProtocolError(f"credited={money.credited}: pending, held, payable, clearing, paid, void are {there}")
    return money


def read_statement(message: pb.StatementReply) -> Statement:
    _check_length(len(message.rows), "rows")
    return Statement(
        rows=tuple(
            StatementRow(
                key=_read_key(row.key),
                device_id=DeviceId(read_text(row.device_id, "device_id", 128)),
                units=_read_number(row.units, "units"),
                micro=row.micro,
            )
            for row in message.rows
        ),
        more=message.more,
        earnings=read_earnings(message.earnings),
        money=_read_money(message.money),
    )


def write_units_query(query: UnitsQuery) -> pb.UnitsRequest:
    return pb.UnitsRequest(
        job_id=query.job_id, epoch=query.epoch, rank=query.rank, from_step=query.from_step, most=query.most
    )


def read_units_query(message: pb.UnitsRequest) -> UnitsQuery:
    return UnitsQuery(
        job_id=JobId(read_name(message.job_id, "job_id")),
        epoch=Epoch(_read_number(message.epoch, "epoch")),
        rank=Rank(message.rank),
        from_step=_read_number(message.from_step, "from_step"),
        most=_read_most(message.most),
    )


def write_units(page: UnitsPage) -> pb.UnitsReply:
    """The keys' other parts are those of the request."""
    return pb.UnitsReply(
        units=[
            pb.UnitMessage(
                step=unit.key.step,
                state=unit.state.value,
                claimed=unit.claimed,
                received=unit.received,
                micro=unit.micro,
            )
            for unit in page.units
        ],
        more=page.more,
    )


def read_units(message: pb.UnitsReply, query: UnitsQuery) -> UnitsPage:
    _check_length(len(message.units), "units")
    return UnitsPage(units=tuple(_read_unit(unit, query) for unit in message.units), more=message.more)


def _read_unit(message: pb.UnitMessage, query: UnitsQuery) -> HubUnit:
    if message.state not in UnitState.__members__.values():
        known = ", ".join(UnitState)
        raise HubProtocolError(f"unit state={message.state[:80]!r}: expected one of {known}")
    step = _read_number(message.step, "step")
    return HubUnit(
        key=UnitKey(job_id=query.job_id, epoch=query.epoch, step=step, rank=query.rank),
        state=UnitState(message.state),
        claimed=message.claimed if message.HasField("claimed") else None,
        received=message.received if message.HasField("received") else None,
        micro=message.micro,
    )
