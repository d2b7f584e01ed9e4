"""A node asks its hub for its own account, over real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from comm_kit import client_of, hub_of, node_of, running
from hub_kit import spec, until
from hypothesis import given, settings
from hypothesis import strategies as st
from test_comm_codec import COUNTS, EARNINGS, EPOCHS, NAMES

from distensor.comm import statement_codec as codec
from distensor.core.control import Unit, UnitKey
from distensor.core.errors import HubProtocolError, HubUnreachableError, NotAllowedError
from distensor.core.ids import Epoch, JobId, Rank
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

KEYS = st.builds(RowKey, hour=EPOCHS, job_id=NAMES, epoch=EPOCHS, rank=COUNTS)
QUERY = UnitsQuery(job_id=JobId("j_1"), epoch=Epoch(2), rank=Rank(3))
MICRO: Any = st.integers(min_value=-(2**62), max_value=2**62)
PARTS = ("pending", "held", "payable", "clearing", "paid", "void")
MONEY = st.fixed_dictionaries({part: st.integers(0, 2**59) for part in (*PARTS, "fees")}).map(
    lambda parts: NodeMoney(credited=sum(parts[part] for part in PARTS), **parts)
)
STATEMENTS = st.builds(
    Statement,
    rows=st.lists(
        st.builds(StatementRow, key=KEYS, device_id=st.text(max_size=20), units=EPOCHS, micro=MICRO), max_size=3
    ).map(tuple),
    more=st.booleans(),
    earnings=EARNINGS,
    money=MONEY,
)
STEP_KEYS = st.builds(UnitKey, job_id=st.just("j_1"), epoch=st.just(2), step=EPOCHS, rank=st.just(3))
SIZES: Any = st.none() | st.integers(min_value=0, max_value=2**32 - 1)
PAGES = st.builds(
    UnitsPage,
    units=st.lists(
        st.builds(HubUnit, key=STEP_KEYS, state=st.sampled_from(UnitState), claimed=SIZES, received=SIZES, micro=MICRO),
        max_size=3,
    ).map(tuple),
    more=st.booleans(),
)


@settings(max_examples=25)
@given(statement=STATEMENTS, after=st.none() | KEYS, page=PAGES)
def test_statements_and_units_survive_the_wire(statement: Statement, after: RowKey | None, page: UnitsPage) -> None:
    query = StatementQuery(since_hour=7, after=after, most=9)
    wire = pb.StatementRequest.FromString(codec.write_query(query).SerializeToString())
    assert codec.read_query(wire) == query
    reply = pb.StatementReply.FromString(codec.write_statement(statement).SerializeToString())
    assert codec.read_statement(reply) == statement
    units = pb.UnitsReply.FromString(codec.write_units(page).SerializeToString())
    assert codec.read_units(units, QUERY) == page
    assert codec.read_units_query(codec.write_units_query(QUERY)) == QUERY


def test_what_is_out_of_its_limits_is_named() -> None:
    with pytest.raises(HubProtocolError, match="most=0: expected 1 to 2000"):
        codec.read_query(pb.StatementRequest(most=0))
    with pytest.raises(HubProtocolError, match=f"most={MOST_ROWS + 1}"):
        codec.read_units_query(pb.UnitsRequest(job_id="j_1", most=MOST_ROWS + 1))
    with pytest.raises(HubProtocolError, match="from_step"):
        codec.read_units_query(pb.UnitsRequest(job_id="j_1", from_step=1 << 63, most=1))
    with pytest.raises(HubProtocolError, match=r"credited=5: .* are 4"):
        codec.read_statement(pb.StatementReply(money=pb.NodeMoneyMessage(credited=5, paid=4)))
    with pytest.raises(HubProtocolError, match="unit state='paid'"):
        codec.read_units(pb.UnitsReply(units=[pb.UnitMessage(state="paid")]), QUERY)
    with pytest.raises(HubProtocolError, match="2001 rows"):
        codec.read_statement(pb.StatementReply(rows=[pb.StatementRowMessage()] * 2001))


@pytest.mark.asyncio
async def test_a_node_reads_its_own_statement_and_units(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, client_of(hub) as client:
        node = node_of(hub, tmp_path)
        with pytest.raises(HubUnreachableError, match="not connected"):
            await node.link.statement(StatementQuery())
        async with running(node):
            await until(lambda: node.connected)
            assert (await node.link.statement(StatementQuery())).rows == ()
            job_id, epoch = await asyncio.to_thread(client.submit_job, spec(1, 2))
            await until(lambda: node.topologies)
            keys = [UnitKey(job_id=job_id, epoch=epoch, step=step, rank=Rank(1)) for step in range(3)]
            units = [Unit(key=key, micro_batches=2) for key in keys]
            for unit in units:
                node.link.claim(unit)
            await asyncio.to_thread(client.report_units, units[:2])
            await until(lambda: node.earnings.confirmed_units == 2 and node.earnings.pending_units == 1)
            statement = await node.link.statement(StatementQuery())
            assert sum(row.micro for row in statement.rows) == 4000 == statement.earnings.confirmed_micro
            assert {(row.key.job_id, row.key.rank, row.device_id) for row in statement.rows} == {(job_id, 1, "cpu")}
            page = await node.link.units(UnitsQuery(job_id=job_id, epoch=epoch, rank=Rank(1)))
            assert [(one.state, one.micro) for one in page.units] == [
                (UnitState.CREDITED, 2000),
                (UnitState.CREDITED, 2000),
                (UnitState.CLAIMED, 0),
            ]
            with pytest.raises(HubProtocolError, match="most"):
                await node.link.units(UnitsQuery(job_id=job_id, epoch=epoch, rank=Rank(1), most=5000))


@pytest.mark.asyncio
async def test_the_account_is_for_nodes_only(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, client_of(hub) as client:
        with pytest.raises(NotAllowedError, match="Statement is not for this kind of key"):
            await asyncio.to_thread(client._call, "Statement", pb.StatementRequest(most=1))
