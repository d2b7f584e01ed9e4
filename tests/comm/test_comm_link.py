"""NodeLink against real hubs and against ones that misbehave."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from comm_kit import LocalHub, client_of, hub_of, node_of, running
from hub_kit import WordNode, ready_for, spec, until

from distensor.comm import LinkState, NodeLink
from distensor.comm.address import HubAddress
from distensor.comm.messages import ClaimsAnswer, HeartbeatAnswer, HubToNode, Register, Welcome
from distensor.comm.server import NodeSession, Principal, start_server
from distensor.comm.tokens import JoinToken, Role
from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.control import Earnings, JobState, NodeInfo, Unit, UnitKey
from distensor.core.errors import (
    PlacementError,
)
from distensor.core.ids import Generation, NodeId, Rank
from distensor.core.reading import value_or
from distensor.hub.machine import Patience
from distensor.hub.pki import Authority
from distensor.testing.clock import FakeClock

pytestmark = pytest.mark.asyncio


async def test_connecting_then_connected_with_everything_measured(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, running(node_of(hub, tmp_path)) as node:
        await until(lambda: node.connected)
        first, second = node.statuses[:2]
        assert (first.state, first.node_id, bool(first.rtt_ms)) == (LinkState.CONNECTING, None, False)
        assert second.state is LinkState.CONNECTED
        assert isinstance(second.rtt_ms, float)
        assert 0 < second.rtt_ms < 5000
        assert isinstance(second.hub_clock_skew, float)
        assert abs(second.hub_clock_skew) < 1
        assert second.generation == 1
        assert (second.error, second.next_retry_at) == (None, None)


async def test_the_credential_is_kept_privately_and_the_token_is_not_needed_again(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        async with running(node_of(hub, tmp_path)) as node:
            await until(lambda: node.connected)
            identity = node.link.status.node_id
        path = tmp_path / "atlas-1.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with running(WordNode("renamed", None, path)) as again:
            await until(lambda: again.connected)
            assert again.link.status.node_id == identity
        async with client_of(hub) as client:
            mesh = await asyncio.to_thread(client.query_mesh)
            assert [node.info.name for node in mesh.nodes] == ["renamed"], "one row, not two"


async def test_a_token_works_once(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, running(node_of(hub, tmp_path)) as node:
        await until(lambda: node.connected)
        async with running(node_of(hub, tmp_path, "second")) as second:
            await until(lambda: second.link.status.state is LinkState.REJECTED)
            error = second.link.status.error
            assert error is not None
            assert error.code == "authentication"
            assert f"used already, by node {node.link.status.node_id}" in error.message
            assert "new join token" in error.fix
            assert second.link.status.next_retry_at is not None


async def test_a_node_that_crashed_before_keeping_its_credential_joins_with_the_same_token(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        assert hub.ready is not None
        blocked = tmp_path / "blocked"
        blocked.touch()
        broken = WordNode("atlas-1", hub.ready.node_tokens[0], blocked / "credential.json")
        async with running(broken):
            await until(lambda: broken.link.status.error)
            assert broken.link.status.error is not None
            assert broken.link.status.error.code == "store"
        async with running(node_of(hub, tmp_path)) as node:
            await until(lambda: node.connected)
        async with client_of(hub) as client:
            assert len((await asyncio.to_thread(client.query_mesh)).nodes) == 1


async def test_a_hub_that_restarts_finds_its_nodes_again_by_itself(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, running(node_of(hub, tmp_path)) as node:
        await until(lambda: node.connected)
        await hub.stop()
        await until(lambda: node.link.status.state is LinkState.OFFLINE)
        offline = node.link.status
        assert not offline.rtt_ms
        await until(lambda: node.link.status.error and node.link.status.error.code == "unreachable")
        assert node.link.status.next_retry_at is not None
        await hub.start()
        await until(lambda: node.connected)
        assert node.link.status.generation == 2


async def test_claims_made_while_the_hub_is_away_are_booked_once(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, running(node_of(hub, tmp_path)) as node, client_of(hub) as client:
        await until(lambda: node.connected)
        job_id, epoch = await asyncio.to_thread(client.submit_job, spec(1, 2))
        await until(lambda: node.topologies)
        await hub.stop()
        units = [
            Unit(key=UnitKey(job_id=job_id, epoch=epoch, step=step, rank=Rank(0)), micro_batches=1)
            for step in range(5000)
        ]
        for unit in units:
            node.link.claim(unit)
        assert node.link.unanswered_claims == 5000
        await hub.start()
        await asyncio.to_thread(client.report_units, units)
        await until(lambda: node.link.unanswered_claims == 0)
        await until(lambda: node.earnings.confirmed_units == 5000)
        assert node.earnings.confirmed_micro == 5_000_000
        assert len(node.topologies) == 1, "a repeated topology is not passed on"


async def test_a_worker_that_became_ready_while_the_hub_was_away_is_told_later(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, client_of(hub) as client:
        silent = node_of(hub, tmp_path)
        silent.answers = False
        async with running(silent) as node:
            await until(lambda: node.connected)
            await asyncio.to_thread(client.submit_job, spec(1, 2))
            await until(lambda: len(node.assignments) == 2)
            await hub.stop()
            for ref in sorted(node.held):
                node.link.report(ready_for(*ref))
            await hub.start()
            await until(lambda: node.topologies)
            assert [one.rank for one in node.topologies[0][1]] == [0, 1]


async def test_pausing_is_heard_at_once(tmp_path: Path) -> None:
    slow = Patience(heartbeat=30)
    async with (
        hub_of(tmp_path, patience=slow) as hub,
        running(node_of(hub, tmp_path)) as node,
        client_of(hub) as client,
    ):
        await until(lambda: node.connected)
        node.link.set_accepting(False)
        deadline = asyncio.get_running_loop().time() + 5
        while (await asyncio.to_thread(client.query_mesh)).available_workers:
            assert asyncio.get_running_loop().time() < deadline
        with pytest.raises(PlacementError, match="0 free slots on 1 connected nodes"):
            await asyncio.to_thread(client.submit_job, spec())


async def test_a_node_that_woke_connects_anew_at_once_and_was_never_offline(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, running(node_of(hub, tmp_path)) as node:
        await until(lambda: node.connected)
        before = len(node.statuses)
        node.link.wake()
        await until(lambda: LinkState.CONNECTED in [status.state for status in node.statuses[before:]])
        states = [status.state for status in node.statuses[before:]]
        assert states[0] is LinkState.CONNECTING
        assert LinkState.OFFLINE not in states


async def test_a_node_that_woke_does_not_wait_for_its_next_try(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, running(node_of(hub, tmp_path)) as node:
        await until(lambda: node.connected)
        async with running(node_of(hub, tmp_path, "second")) as second:
            await until(lambda: second.link.status.state is LinkState.REJECTED)  # the next try is 30 s away
            tries = sum(status.state is LinkState.REJECTED for status in second.statuses)
            second.link.wake()
            await until(lambda: sum(status.state is LinkState.REJECTED for status in second.statuses) > tries)


async def test_the_same_credential_twice_the_newer_wins(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, running(node_of(hub, tmp_path)) as old:
        await until(lambda: old.connected)
        async with running(WordNode("atlas-1", None, tmp_path / "atlas-1.json")) as new:
            await until(lambda: new.connected)
            await until(lambda: old.link.status.state is LinkState.REJECTED)
            assert old.link.status.error is not None
            assert old.link.status.error.code == "replaced"
            assert "one supervisor" in old.link.status.error.fix
            assert new.connected


async def test_the_same_name_twice_is_two_nodes(tmp_path: Path) -> None:
    async with hub_of(tmp_path, tokens=2) as hub:
        assert hub.ready is not None
        twins = [WordNode("twin", token, tmp_path / f"{i}.json") for i, token in enumerate(hub.ready.node_tokens)]
        async with running(twins[0]), running(twins[1]), client_of(hub) as client:
            await until(lambda: all(twin.connected for twin in twins))
            mesh = await asyncio.to_thread(client.query_mesh)
            assert [(node.info.name, node.connected) for node in mesh.nodes] == [("twin", True)] * 2


# Time, silence, and hubs that misbehave


async def test_clock_jumps_on_the_hub_move_nothing_but_the_skew_that_is_shown(tmp_path: Path) -> None:
    clock = FakeClock(now=SYSTEM_CLOCK.now())
    hub = LocalHub(tmp_path / "hub", clock=clock)
    await hub.start(1)
    async with running(node_of(hub, tmp_path)) as node, client_of(hub) as client:
        await until(lambda: node.connected)
        job_id, _ = await asyncio.to_thread(client.submit_job, spec())
        for jump in (3600.0, -7200.0, 365 * 86_400.0):
            clock.jump_wall(jump)
            skew = clock.now() - SYSTEM_CLOCK.now()
            await until(lambda skew=skew: abs(value_or(node.link.status.hub_clock_skew, 0) - skew) < 5)  # type: ignore[misc]
            mesh = await asyncio.to_thread(client.query_mesh)
            assert [one.connected for one in mesh.nodes] == [True]
        watched = await asyncio.to_thread(next, client.watch_job(job_id))
        assert watched.state is JobState.RUNNING
        seen = [status.state for status in node.statuses]
        assert seen.count(LinkState.OFFLINE) == 0
    await hub.stop()
    await hub.start()
    assert hub.ready is not None
    assert hub.ready.generation == 2
    await hub.stop()


class MuteHub:
    """A hub that says given words after the registration, and nothing more."""

    def __init__(self, *words: HubToNode) -> None:
        self.words = words
        self.registered = 0

    async def authenticate(self, bearer: object, peer: str) -> Principal:
        return Principal(kind="join", subject="x")

    async def node_joined(self, who: Principal, register: Register, session: NodeSession) -> None:
        self.registered += 1
        for word in self.words:
            session.send(word)

    def node_said(self, session: NodeSession, message: object) -> None:
        """Not even an answer to a heartbeat."""

    def node_left(self, session: NodeSession) -> None:
        """Nothing to forget."""


WELCOME = Welcome(node_id=NodeId("n_1"), credential="c" * 43, generation=Generation(1), heartbeat_seconds=0.1)


@asynccontextmanager
async def node_at(tmp_path: Path, *words: HubToNode) -> AsyncIterator[tuple[WordNode, MuteHub]]:
    (tmp_path / "hub").mkdir()
    authority = Authority.load_or_create(tmp_path / "hub", SYSTEM_CLOCK)
    mute = MuteHub(*words)
    listen = HubAddress(host="127.0.0.1", port=0)
    server = await start_server(mute, authority.server_identity(), listen)  # type: ignore[arg-type]
    token = JoinToken(address=server.address, fingerprint=authority.fingerprint, role=Role.NODE, secret="s" * 40)
    try:
        async with running(WordNode("n", token.encode(), tmp_path / "n.json")) as node:
            yield node, mute
    finally:
        await server.stop()


async def test_a_welcome_alone_is_no_connection(tmp_path: Path) -> None:
    async with node_at(tmp_path, WELCOME) as (node, mute):
        await until(lambda: mute.registered >= 2)
        assert LinkState.CONNECTED not in {status.state for status in node.statuses}
        error = next(status.error for status in node.statuses if status.error is not None)
        assert error.code == "unreachable"
        assert "has not answered for 0.3 s" in error.message


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((ClaimsAnswer(batch=1),), "first message is ClaimsAnswer"),
        ((WELCOME, WELCOME), "second Welcome"),
        ((replace(WELCOME, credential=""),), "no credential"),
        ((replace(WELCOME, hubs=("127.0.0.1:1",) * 6),), "6 addresses of hubs"),
        ((replace(WELCOME, hubs=("nowhere",)),), "expected host:port"),
    ],
)
async def test_a_hub_that_does_not_keep_to_the_protocol_is_told_as_such(
    tmp_path: Path, words: tuple[HubToNode, ...], expected: str
) -> None:
    async with node_at(tmp_path, *words) as (node, mute):
        await until(lambda: node.link.status.error)
        assert node.link.status.error is not None
        assert node.link.status.error.code == "protocol"
        assert expected in node.link.status.error.message
        assert "same version" in node.link.status.error.fix
        await until(lambda: mute.registered >= 2, what="it tries again")


async def test_an_answer_to_a_heartbeat_that_was_never_sent_is_no_connection(tmp_path: Path) -> None:
    lie = HeartbeatAnswer(sequence=99, generation=Generation(1), earnings=Earnings(), hub_time=0.0)
    async with node_at(tmp_path, WELCOME, lie) as (node, mute):
        await until(lambda: mute.registered >= 2)
        assert LinkState.CONNECTED not in {status.state for status in node.statuses}


@pytest.mark.asyncio
async def test_a_beat_that_is_wanted_and_cancelled_at_once_ends(tmp_path: Path) -> None:
    """A node that is stopped says that it takes no more work and cancels its link in the same breath."""

    class Stream:
        def send(self, _message: object) -> None:
            pass

    info = NodeInfo(name="atlas-1", host="127.0.0.1", version="1", devices=())
    handler: Any = None  # nothing is shown: no answer comes
    link = NodeLink(None, tmp_path / "credential.json", lambda: info, lambda: (), handler)
    beating = asyncio.ensure_future(link._beat(Stream(), 60.0))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    link.set_accepting(False)
    await asyncio.sleep(0)
    beating.cancel()
    done, _ = await asyncio.wait([beating], timeout=5)
    assert done
