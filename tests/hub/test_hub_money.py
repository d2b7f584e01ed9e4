"""Money through a whole hub: real process, real node link and trainer, the operator's commands; the clock is a file."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hub_kit import HubProcess, WordNode, spec, until

from distensor.comm import HubClient
from distensor.core.control import JobSpec, JobState, Unit, UnitKey
from distensor.core.errors import ConfigError, PlacementError
from distensor.core.ids import Epoch, JobId, Rank
from distensor.core.money import credits_text, parse_credits
from distensor.core.statement import NodeMoney, StatementQuery
from distensor.hub import cli

pytestmark = pytest.mark.asyncio
DAY = 86_400


def operator(state: Path, capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """What a command of the operator's prints as JSON."""
    status = cli.main([*words, "--state", str(state), "--json"])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    return json.loads(printed.out)


def refused(state: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    status = cli.main([*words, "--state", str(state)])
    printed = capsys.readouterr()
    assert (status, printed.out) == (64, "")
    return printed.err


@dataclass
class Place:
    """A hub whose clock is a file, one node, one trainer."""

    hub: HubProcess
    node: WordNode
    client: HubClient
    clock: Path

    @property
    def node_id(self) -> str:
        node_id = self.node.link.status.node_id
        assert node_id is not None
        return str(node_id)

    async def call(self, call: Any, *words: Any) -> Any:
        return await asyncio.to_thread(call, *words)

    async def money(self) -> NodeMoney:
        statement = await self.node.link.statement(StatementQuery())
        assert statement.money.credited == statement.earnings.confirmed_micro
        return statement.money

    async def work(self, job_id: JobId, epoch: Epoch, step: int, micro_batches: int) -> None:
        """One step of a job of two ranks, claimed and received."""
        units = [
            Unit(key=UnitKey(job_id=job_id, epoch=epoch, step=step, rank=Rank(rank)), micro_batches=micro_batches)
            for rank in range(2)
        ]
        before = self.node.earnings.confirmed_units
        for unit in units:
            self.node.link.claim(unit)
        await self.call(self.client.report_units, units)
        await until(lambda: self.node.earnings.confirmed_units == before + 2, what="the units are credited")


@asynccontextmanager
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    clock = tmp_path / "clock"
    clock.write_text("0")
    hub = HubProcess(tmp_path / "hub", tokens=1, clock_file=clock)
    node = WordNode("atlas-1", hub.ready["node_tokens"][0], tmp_path / "n.json")
    linking = asyncio.create_task(node.link.run())
    try:
        with HubClient(hub.ready["trainer_token"]) as client:
            there = Place(hub=hub, node=node, client=client, clock=clock)
            await until(lambda: node.connected)
            yield there
    finally:
        linking.cancel()
        await asyncio.gather(linking, return_exceptions=True)
        there.hub.stop()
    assert "Traceback" not in there.hub.log()


def wanted(submission: str, *, steps: int = 3, micro_batches: int = 4) -> JobSpec:
    return replace(spec(1, 2, submission=submission), steps=steps, micro_batches=micro_batches)


async def test_a_job_from_its_deposit_to_the_payout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "hub"
    async with place(tmp_path) as here:
        terms = operator(state, capsys, "price", "--micro", "1001", "--fee", "125", "--deposits", "required")["terms"]
        assert (terms["micro_per_micro_batch"], terms["fee_per_mille"], terms["deposits"]) == (1001, 125, True)
        while (told := (await here.call(here.client.query_mesh)).terms) is None or not told.deposits:  # noqa: ASYNC110  # a hub elsewhere
            await asyncio.sleep(0.05)
        assert told.quote(steps=3, ranks=2, micro_batches=4) == 24_024
        assert str(told) == "a micro-batch on one worker costs 0.001001 credits; a job needs a deposit for its quote"
        with pytest.raises(PlacementError, match="does not say how many steps it will take at most"):
            await here.call(here.client.submit_job, wanted("s0", steps=0))
        operator(state, capsys, "deposit", "main", "0.024023", "--key", "bank-1")
        with pytest.raises(PlacementError, match=r"quoted 24024 .*3 steps x 2 ranks x 4 .* has 24023, 1 more"):
            await here.call(here.client.submit_job, wanted("s1"))
        for _ in range(2):  # the same receipt twice is one deposit
            there = operator(state, capsys, "deposit", "main", "0.976", "--key", "bank-2")["money"]
        assert there == {"account": "main", "deposited": 1_000_023, "deposit": 1_000_023, "escrow": 0}
        assert "already" in refused(state, capsys, "deposit", "main", "5", "--key", "bank-2")

        job_id, epoch = await here.call(here.client.submit_job, wanted("s1"))
        assert await here.call(here.client.submit_job, wanted("s1")) == (job_id, epoch)
        await until(lambda: len(here.node.held) == 2)
        operator(state, capsys, "price", "--micro", "5")  # a job keeps the price that it was quoted
        await here.work(job_id, epoch, 0, 4)
        late = Unit(key=UnitKey(job_id=job_id, epoch=epoch, step=1, rank=Rank(0)), micro_batches=4)
        await here.call(here.client.report_units, [late])
        await here.call(here.client.end_job, job_id, JobState.FINISHED, "done")
        cost = (await here.call(here.client.explain_job, job_id)).cost
        assert (cost.quoted, cost.escrow, cost.refunded) == (24_024, 4004, 24_024 - 8008 - 4004)
        assert (cost.spent, cost.work, cost.fees, cost.units) == (8008, 7008, 1000, 2)
        here.node.link.claim(late)  # after the end: what was kept for it is still there
        await until(lambda: here.node.earnings.confirmed_units == 3)
        pending = await here.money()
        assert pending == NodeMoney(credited=3 * 3504, pending=3 * 3504, fees=1500)

        assert "nothing is payable" in refused(state, capsys, "payout", "make", "main")
        here.clock.write_text(str(2 * DAY + 3600))
        here.hub.kill()  # a hub that starts looks at once; a running one looks every minute
        here.hub = await asyncio.to_thread(here.hub.restart)
        await until(lambda: here.node.connected)
        assert (await here.money()).payable == 3 * 3504
        (part,) = operator(state, capsys, "payout", "make", here.node_id, "0.000512", "--key", "po_part")["payouts"]
        assert part == operator(state, capsys, "payout", "make", here.node_id, "--key", "po_part")["payouts"][0]
        (rest,) = operator(state, capsys, "payout", "make", "main")["payouts"]
        operator(state, capsys, "payout", "fail", "po_part", "--reason", "wrong account number")
        assert "already" in refused(state, capsys, "payout", "confirm", "po_part")
        for _ in range(2):
            assert operator(state, capsys, "payout", "confirm", rest["payout_id"])["payouts"][0]["standing"] == "paid"
        assert await here.money() == NodeMoney(credited=3 * 3504, payable=512, paid=3 * 3504 - 512, fees=1500)
        _check_statements(state, capsys, here.node_id)
        audit = operator(state, capsys, "audit")["entries"]
        assert [one["action"] for one in audit if one["action"] != "join"] == [
            *("payout confirm", "payout fail", "payout make", "payout make"),
            *("price", "deposit", "deposit", "price"),
        ]


def _check_statements(state: Path, capsys: pytest.CaptureFixture[str], node_id: str) -> None:
    """All forms and groups sum to the balances, and the whole ledger to nothing."""
    sums = operator(state, capsys, "statement")
    assert sums["total"] == 0
    assert sums["groups"] == {
        "outside": -1_000_023 + 3 * 3504 - 512,
        "deposit": 1_000_023 - 3 * 4004,
        "payable": 512,
        "fees": 1500,
    }
    for by in ("day", "job", "device"):
        lines = operator(state, capsys, "statement", "main", "--by", by)["lines"]
        for group, micro in sums["groups"].items():
            mine = sum(line["micro"] for line in lines if line["account"].partition(":")[0] == group)
            assert mine == (0 if group == "outside" else micro), (by, group)
        assert cli.main(["statement", node_id, "--by", by, "--format", "csv", "--state", str(state)]) == 0
        table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
        assert sum(int(row["micro"]) for row in table if row["account"].startswith("payable:")) == 512
    assert "expected a node of this hub" in refused(state, capsys, "statement", "nobody")


async def test_without_deposits_the_platform_lends_and_a_node_is_paid_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with place(tmp_path) as here:
        job_id, epoch = await here.call(here.client.submit_job, wanted("s1", steps=0))
        await until(lambda: len(here.node.held) == 2)
        await here.work(job_id, epoch, 0, 4)
        cost = (await here.call(here.client.explain_job, job_id)).cost
        assert (cost.quoted, cost.spent, cost.lent) == (0, 8000, 8000)
        await here.call(here.client.end_job, job_id, JobState.FINISHED, "")
        second, epoch = await here.call(here.client.submit_job, wanted("s2"))
        await until(lambda: sum(ref[0] == second for ref in here.node.held) == 2)
        await here.work(second, epoch, 0, 4)
        await here.call(here.client.end_job, second, JobState.FAILED, "for this test")
        sums = operator(tmp_path / "hub", capsys, "statement")
        assert sums == {"v": 1, "groups": {"pending": 16_000, "platform": -16_000}, "total": 0}


@pytest.mark.parametrize("text", ["0", "-1", "1e3", "1.0000001", "", "1,5", "10000000000001"])
async def test_an_amount_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected credits like 12 or 12\.5"):
        parse_credits(text)


async def test_amounts_are_read_as_they_are_written() -> None:
    for micro in (1, 1_000_000, 1_234_567, 10**18):
        assert parse_credits(credits_text(micro)) == micro
    assert credits_text(-1) == "-0.000001"
