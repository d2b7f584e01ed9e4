"""NodeLink and HubClient against a hub in the same loop: real sockets, real TLS, short heartbeats."""

from __future__ import annotations

import asyncio
import socket
import ssl
import stat
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hub_kit import WordNode, ready_for, spec, until

from distensor.comm import HubClient, LinkState
from distensor.comm.address import HubAddress
from distensor.comm.bootstrap import fetch_authority
from distensor.comm.credential import load_credential
from distensor.comm.messages import ClaimsAnswer, HeartbeatAnswer, HubToNode, Register, Welcome
from distensor.comm.server import NodeSession, Principal, start_server
from distensor.comm.tokens import JoinToken, Role, decode_token
from distensor.core.clock import SYSTEM_CLOCK, Clock
from distensor.core.control import Earnings, JobState, JobUpdate, Unit, UnitKey, WorkerChange, WorkerState
from distensor.core.errors import (
    AuthenticationError,
    ControlError,
    HubProtocolError,
    HubUnreachableError,
    PlacementError,
)
from distensor.core.ids import Generation, JobId, NodeId, Rank
from distensor.core.reading import value_or
from distensor.hub.app import HubConfig, Ready, run_hub
from distensor.hub.machine import Patience
from distensor.hub.pki import Authority
from distensor.testing.clock import FakeClock

QUICK = Patience(heartbeat=0.1)
pytestmark = pytest.mark.asyncio


@dataclass
class LocalHub:
    """A hub in this process that can be stopped and started on the same port."""

    state: Path
    ready: Ready | None = None
    clock: Clock = SYSTEM_CLOCK
    lines: list[str] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, tokens: int = 0, patience: Patience = QUICK) -> Ready:
        port = self.ready.address.port if self.ready else 0
        listen = HubAddress(host="127.0.0.1", port=port)
        config = HubConfig(state=self.state, listen=listen, node_tokens=tokens, patience=patience)
        ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        running = run_hub(config, clock=self.clock, on_ready=ready.set_result, log=self.lines.append, stop=self._stop)
        self._task = asyncio.create_task(running)
        await asyncio.wait([ready, self._task], return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            self._task.result()
        self.ready = ready.result()
        return self.ready

    async def stop(self) -> None:
        self._stop.set()
        if self._task is not None:
            await self._task


@asynccontextmanager
async def hub_of(tmp_path: Path, tokens: int = 1, patience: Patience = QUICK) -> AsyncIterator[LocalHub]:
    hub = LocalHub(tmp_path / "hub")
    await hub.start(tokens, patience)
    try:
        yield hub
    finally:
        await hub.stop()


@asynccontextmanager
async def running(node: WordNode) -> AsyncIterator[WordNode]:
    task = asyncio.create_task(node.link.run())
    try:
        yield node
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            task.result()


def node_of(hub: LocalHub, tmp_path: Path, name: str = "atlas-1") -> WordNode:
    assert hub.ready is not None
    return WordNode(name, hub.ready.node_tokens[0], tmp_path / f"{name}.json")


@asynccontextmanager
async def client_of(hub: LocalHub) -> AsyncIterator[HubClient]:
    assert hub.ready is not None
    client = HubClient(hub.ready.trainer_token, timeout=5)
    try:
        yield client
    finally:
        await asyncio.to_thread(client.close)


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


# Who is trusted


async def test_another_hub_at_the_address_is_refused_before_any_secret(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        assert hub.ready is not None
        true = decode_token(hub.ready.node_tokens[0])
        wrong = replace(true, fingerprint="0" * 64).encode()
        async with running(WordNode("atlas-1", wrong, tmp_path / "n.json")) as node:
            await until(lambda: node.link.status.state is LinkState.REJECTED)
            assert node.link.status.error is not None
            assert "No secret was sent" in node.link.status.error.message
        wrong = replace(decode_token(hub.ready.trainer_token), fingerprint="0" * 64).encode()
        with pytest.raises(AuthenticationError, match="No secret was sent"):
            await asyncio.to_thread(HubClient(wrong).query_mesh)


class Eavesdropper:
    """A hub of someone else, which shows the true authority's certificate without having its key."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    async def authenticate(self, bearer: object) -> object:
        self.heard.append(bearer)
        raise AuthenticationError("heard you")

    def node_left(self, session: object) -> None:
        """Nothing to forget."""


async def test_a_copied_authority_certificate_gains_nothing(tmp_path: Path) -> None:
    for name in ("true", "false"):
        (tmp_path / name).mkdir()
    true = Authority.load_or_create(tmp_path / "true", SYSTEM_CLOCK)
    false = Authority.load_or_create(tmp_path / "false", SYSTEM_CLOCK).server_identity()
    copied = replace(false, chain_pem=false.chain_pem + true.authority_pem.encode())
    listener = Eavesdropper()
    server = await start_server(listener, copied, HubAddress(host="127.0.0.1", port=0))  # type: ignore[arg-type]
    try:
        token = JoinToken(address=server.address, fingerprint=true.fingerprint, role=Role.TRAINER, secret="s" * 40)
        fetched = await asyncio.to_thread(fetch_authority, token.address, token.fingerprint, 5)
        assert fetched.strip() == true.authority_pem.strip(), "the probe alone is fooled, and sends nothing"
        with pytest.raises(HubUnreachableError):
            await asyncio.to_thread(HubClient(token.encode(), timeout=1.5).query_mesh)
        node_token = replace(token, role=Role.NODE).encode()
        async with running(WordNode("n", node_token, tmp_path / "n.json")) as node:
            await until(lambda: node.link.status.state is LinkState.OFFLINE)
        assert listener.heard == []
    finally:
        await server.stop()


async def test_a_wrong_secret_is_told_as_such(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        assert hub.ready is not None
        for text, expected in ((hub.ready.trainer_token, "trainer"), (hub.ready.node_tokens[0], "node")):
            token = replace(decode_token(text), secret="x" * 43).encode()
            if expected == "trainer":
                with pytest.raises(AuthenticationError, match="does not know this join token"):
                    await asyncio.to_thread(HubClient(token).query_mesh)
            else:
                async with running(WordNode("n", token, tmp_path / "n.json")) as node:
                    await until(lambda: node.link.status.state is LinkState.REJECTED)
                    assert "does not know" in node.link.status.error.message  # type: ignore[union-attr]


async def test_tokens_are_not_exchangeable_between_roles(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        assert hub.ready is not None
        with pytest.raises(AuthenticationError, match="is for a node"):
            HubClient(hub.ready.node_tokens[0])
        relabelled = replace(decode_token(hub.ready.node_tokens[0]), role=Role.TRAINER).encode()
        with pytest.raises(AuthenticationError, match="for a node, not for a trainer"):
            await asyncio.to_thread(HubClient(relabelled).query_mesh)
        async with running(WordNode("n", hub.ready.trainer_token, tmp_path / "n.json")) as node:
            await until(lambda: node.link.status.state is LinkState.REJECTED)
            assert "is for a trainer" in node.link.status.error.message  # type: ignore[union-attr]


async def test_a_nodes_credential_is_no_trainers(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, running(node_of(hub, tmp_path)) as node:
        await until(lambda: node.connected)
        assert hub.ready is not None
        credential = load_credential(tmp_path / "atlas-1.json")
        assert credential is not None
        stolen = replace(decode_token(hub.ready.trainer_token), secret=credential.secret).encode()
        with pytest.raises(AuthenticationError):
            await asyncio.to_thread(HubClient(stolen).query_mesh)


async def test_a_damaged_token_or_no_token_is_told_without_a_connection(tmp_path: Path) -> None:
    for token, expected in (("dtj_short", "incomplete"), (None, "no join token was given"), ("hello", "dtj_")):
        async with running(WordNode("n", token, tmp_path / "n.json")) as node:
            await until(lambda: node.link.status.state is LinkState.REJECTED)
            assert expected in node.link.status.error.message  # type: ignore[union-attr]


async def test_a_hub_that_was_replaced_is_told_from_one_that_is_away(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, running(node_of(hub, tmp_path)) as node:
        await until(lambda: node.connected)
        await hub.stop()
        other = LocalHub(tmp_path / "another", ready=hub.ready)
        await other.start()
        await until(lambda: node.link.status.state is LinkState.REJECTED)
        assert node.link.status.error is not None
        assert "its state was replaced" in node.link.status.error.message
        await other.stop()


# What stands in the way


@contextmanager
def silent_port() -> Iterator[int]:
    """A port that accepts and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextmanager
def rude_port(answer: bytes) -> Iterator[int]:
    """A port that answers everyone with the same bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def trainer_at(port: int) -> HubClient:
    address = HubAddress(host="127.0.0.1", port=port)
    token = JoinToken(address=address, fingerprint="0" * 64, role=Role.TRAINER, secret="s" * 40)
    return HubClient(token.encode(), timeout=0.5)


async def test_nobody_there_names_the_address_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(HubUnreachableError, match=f"no hub at 127.0.0.1:{port}: Connection refused"):
        await asyncio.to_thread(trainer_at(port).query_mesh)


async def test_a_silent_port_is_given_up_in_time() -> None:
    with silent_port() as port, pytest.raises(HubUnreachableError, match=r"within 0\.5 s"):
        await asyncio.to_thread(trainer_at(port).query_mesh)


async def test_something_that_is_no_hub_is_told_as_such() -> None:
    with rude_port(b"HTTP/1.0 400 Bad Request\r\n\r\n") as port, pytest.raises(HubProtocolError, match="not as a hub"):
        await asyncio.to_thread(trainer_at(port).query_mesh)


async def test_proxies_in_the_environment_do_not_matter_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with hub_of(tmp_path) as hub, running(node_of(hub, tmp_path)) as node, client_of(hub) as client:
        await until(lambda: node.connected)
        assert (await asyncio.to_thread(client.query_mesh)).available_workers == 2


async def test_an_old_protocol_of_tls_is_not_spoken(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        assert hub.ready is not None
        address = hub.ready.address

        def offer_old() -> None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            context.set_ciphers("AES128-SHA")
            with socket.create_connection((address.host, address.port), 5) as raw:
                context.wrap_socket(raw)

        with pytest.raises(ssl.SSLError):
            await asyncio.to_thread(offer_old)


# The trainer's calls


async def collect(client: HubClient, job_id: JobId, into: list[JobUpdate]) -> None:
    def drain() -> None:
        into.extend(client.watch_job(job_id))

    await asyncio.to_thread(drain)


async def test_a_watch_goes_on_over_a_restart_and_ends_with_the_job(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, running(node_of(hub, tmp_path)) as node, client_of(hub) as client:
        await until(lambda: node.connected)
        job_id, epoch = await asyncio.to_thread(client.submit_job, spec())
        updates: list[JobUpdate] = []

        watching = asyncio.create_task(collect(client, job_id, updates))
        await until(lambda: updates and updates[-1].state is JobState.RUNNING)
        await hub.stop()
        await hub.start()
        await until(lambda: node.connected)
        lost = WorkerChange(
            job_id=job_id,
            epoch=epoch,
            rank=Rank(0),
            state=WorkerState.EXITED,
            restarts=1,
            reason="killed by signal 9 (SIGKILL)",
        )
        node.link.report(lost)
        await until(lambda: updates[-1].workers == (lost,))
        await asyncio.to_thread(client.end_job, job_id, JobState.FAILED, "a worker was lost")
        await asyncio.wait_for(watching, 10)
        assert (updates[-1].state, updates[-1].reason) == (JobState.FAILED, "a worker was lost")
        assert len(updates) == len({repr(update) for update in updates}), "no update is passed on twice in a row"


async def test_a_watch_is_closed_from_another_thread(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, running(node_of(hub, tmp_path)) as node, client_of(hub) as client:
        await until(lambda: node.connected)
        job_id, _ = await asyncio.to_thread(client.submit_job, spec())
        updates: list[JobUpdate] = []
        watching = asyncio.create_task(collect(client, job_id, updates))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(client.close)
        await asyncio.wait_for(watching, 5)
        with pytest.raises(HubUnreachableError, match="has been closed"):
            client.query_mesh()


async def test_a_call_waits_for_a_hub_that_restarts(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, client_of(hub) as client:
        await asyncio.to_thread(client.query_mesh)
        await hub.stop()
        asking = asyncio.create_task(asyncio.to_thread(client.query_mesh))
        await asyncio.sleep(0.3)
        await hub.start()
        assert (await asyncio.wait_for(asking, 10)).generation == 2


async def test_a_call_gives_up_on_a_hub_that_stays_away(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        assert hub.ready is not None
        client = HubClient(hub.ready.trainer_token, timeout=1)
        await asyncio.to_thread(client.query_mesh)
        await hub.stop()
        with pytest.raises(HubUnreachableError, match=str(hub.ready.address)):
            await asyncio.to_thread(client.query_mesh)
        client.close()


async def test_errors_of_the_hub_arrive_with_their_words(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, client_of(hub) as client:
        unit = Unit(key=UnitKey(job_id=JobId("j_x"), epoch=1, step=0, rank=Rank(0)), micro_batches=1)  # type: ignore[arg-type]
        calls = [
            (lambda: client.submit_job(spec(2, 2)), PlacementError, "needs 4 workers"),
            (lambda: client.submit_job(spec(csr="junk")), PlacementError, "free slots"),
            (lambda: client.end_job(JobId("j_x"), JobState.FINISHED), ControlError, "knows no job j_x"),
            (lambda: list(client.watch_job(JobId("j_x"))), ControlError, "knows no job j_x"),
            (lambda: client.end_job(JobId("j_x"), JobState.PLACED), HubProtocolError, "placed"),
            (lambda: client.report_units([unit]), ControlError, "never placed"),
            (lambda: client.submit_job(spec(name="bad name")), HubProtocolError, "'bad name'"),
        ]
        for call, kind, words in calls:
            with pytest.raises(kind, match=words):
                await asyncio.to_thread(call)


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

    async def authenticate(self, bearer: object) -> Principal:
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
