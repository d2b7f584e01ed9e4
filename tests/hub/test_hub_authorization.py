"""Every call of the wire x every kind of key and scope x own, foreign and missing objects, against a real port."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from access_kit import DoorHub, clerk, door_hub
from hub_kit import WordNode, info, spec, until

from distensor.comm import codec, job_codec, progress_codec, statement_codec
from distensor.comm.channels import bearer, open_aio_channel
from distensor.comm.keys import KeyKind
from distensor.comm.messages import Register
from distensor.comm.stream_codec import write_node_message
from distensor.comm.tokens import Role
from distensor.core.control import JobState, Reconfiguration, TakeOver, Unit, UnitKey
from distensor.core.ids import AccountId, Epoch, JobId, NodeId, Rank
from distensor.core.job_report import JobQuery
from distensor.core.parallel import ParallelConfig
from distensor.core.statement import StatementQuery, UnitsQuery
from distensor.hub import access
from distensor.hub.accounts import MAIN
from distensor.hub.administration import create_key, revoke_key, set_disabled
from distensor.hub.audit import Outcome
from distensor.hub.authorization import Operation, Scope, Who
from distensor.hub.hashing import new_secret
from distensor.hub.throttle import DEFAULT_LIMIT, Limit
from distensor.proto import control_pb2 as pb
from distensor.proto.control_pb2_grpc import ControlStub

pytestmark = pytest.mark.asyncio

S = Scope
TABLE: dict[Operation, dict[Who, Scope | None]] = {
    Operation.NODE: {Who.JOIN: None, Who.NODE: None, Who.PROVIDER: S.NODES_JOIN},
    Operation.STATEMENT: {Who.NODE: None},
    Operation.UNITS: {Who.NODE: None},
    Operation.QUERY_MESH: {Who.TRAINER: S.MESH_READ, Who.ADMIN: S.MESH_READ},
    Operation.SUBMIT_JOB: {Who.TRAINER: S.JOBS_WRITE},
    Operation.RECONFIGURE_JOB: {Who.TRAINER: S.JOBS_WRITE},
    Operation.TAKE_OVER_JOB: {Who.TRAINER: S.JOBS_WRITE},
    Operation.WATCH_JOB: {Who.TRAINER: S.JOBS_READ},
    Operation.REPORT_UNITS: {Who.TRAINER: S.JOBS_WRITE},
    Operation.REPORT_PROGRESS: {Who.TRAINER: S.JOBS_WRITE},
    Operation.LIST_JOBS: {Who.TRAINER: S.JOBS_READ, Who.ADMIN: S.JOBS_READ},
    Operation.EXPLAIN_JOB: {Who.TRAINER: S.JOBS_READ, Who.ADMIN: S.JOBS_READ},
    Operation.END_JOB: {Who.TRAINER: S.JOBS_END, Who.ADMIN: S.JOBS_END},
}
"""Written out a second time on purpose: a change of the table has to be meant."""
ALSO_FOREIGN = {(Operation.END_JOB, Who.ADMIN), (Operation.EXPLAIN_JOB, Who.ADMIN)}
ABOUT_JOBS = {
    Operation.RECONFIGURE_JOB,
    Operation.TAKE_OVER_JOB,
    Operation.WATCH_JOB,
    Operation.REPORT_UNITS,
    Operation.REPORT_PROGRESS,
    Operation.EXPLAIN_JOB,
    Operation.END_JOB,
}
MISSING = JobId("j_0123456789abcdef")


@dataclass(frozen=True)
class Caller:
    name: str
    who: Who
    metadata: Any
    scopes: frozenset[Scope] = frozenset(Scope)


@dataclass(frozen=True)
class Answer:
    """`code` is None when the call was answered, or refused for what it says rather than for who says it."""

    code: grpc.StatusCode | None
    words: str = ""


DENIED = grpc.StatusCode.PERMISSION_DENIED
FOR_WHAT_IT_SAYS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.ALREADY_EXISTS,
}
"""Any other code is the answer: a defect of the hub must not read like permission."""


LOST_BY_GRPC = "Internal error from Core"


@dataclass
class World:
    hub: DoorHub
    stub: Any
    node: WordNode
    own: JobId
    foreign: JobId

    async def ask(self, metadata: Any, operation: Operation, job: JobId) -> Answer:
        call = getattr(self.stub, operation.value)
        try:
            if operation is Operation.NODE:
                await self._register(lambda: call(metadata=metadata))
            elif operation is Operation.WATCH_JOB:
                watching = call(_request(operation, job), metadata=metadata, timeout=10)
                await watching.read()
                watching.cancel()
            else:
                await call(_request(operation, job), metadata=metadata, timeout=10)
        except grpc.aio.AioRpcError as error:
            return Answer(None if error.code() in FOR_WHAT_IT_SAYS else error.code(), error.details() or "")
        return Answer(None)

    @staticmethod
    async def _register(open_stream: Callable[[], Any]) -> None:
        while True:
            stream = open_stream()
            try:
                await stream.write(write_node_message(Register(info=info("passer-by"))))
                break
            except grpc.aio.AioRpcError as error:  # the hub had ended the stream, and gRPC did not keep its answer
                if error.details() != LOST_BY_GRPC:
                    raise
        assert (await stream.read()).WhichOneof("kind") == "welcome"
        stream.cancel()


def _request(operation: Operation, job: JobId) -> Any:
    asked = spec(9, 9)  # more than there is: refused for its size
    key = UnitKey(job_id=job, epoch=Epoch(1), step=0, rank=Rank(0))
    change = Reconfiguration(
        job_id=job, request="r", epoch=Epoch(9), parallel=ParallelConfig(), continues=(None,), csr_pem="x"
    )
    requests: dict[Operation, Any] = {
        Operation.STATEMENT: statement_codec.write_query(StatementQuery()),
        Operation.UNITS: statement_codec.write_units_query(UnitsQuery(job_id=job, epoch=Epoch(1), rank=Rank(0))),
        Operation.QUERY_MESH: pb.QueryMeshRequest(),
        Operation.SUBMIT_JOB: codec.write_spec(asked),
        Operation.RECONFIGURE_JOB: codec.write_reconfiguration(change),
        Operation.TAKE_OVER_JOB: codec.write_take_over(TakeOver(job_id=job, request="t", csr_pem="x")),
        Operation.WATCH_JOB: pb.WatchJobRequest(job_id=job),
        Operation.REPORT_UNITS: pb.ReportUnitsRequest(units=[codec.write_unit(Unit(key=key, micro_batches=1))]),
        Operation.REPORT_PROGRESS: progress_codec.write_progress(job, Epoch(1), []),
        Operation.LIST_JOBS: job_codec.write_query(JobQuery()),
        Operation.EXPLAIN_JOB: job_codec.write_explain(job),
        Operation.END_JOB: pb.EndJobRequest(job_id=job, state="running"),  # no end: refused for what it says
    }
    return requests[operation]


@contextlib.asynccontextmanager
async def world(tmp_path: Path, lines: Limit = DEFAULT_LIMIT) -> AsyncIterator[World]:
    """A hub with two accounts, a job of each on a node of the first, and a channel to it."""
    async with door_hub(tmp_path, lines) as hub, open_aio_channel(hub.address, hub.authority_pem) as channel:
        stub = ControlStub(channel)
        for name in ("me", "other"):
            await hub.account(name)
        rig, _ = await hub.key("me", KeyKind.PROVIDER)
        node = WordNode("atlas-1", hub.token(Role.NODE, rig), tmp_path / "n.json", slots=4)
        linking = asyncio.create_task(node.link.run())
        try:
            await until(lambda: node.connected)
            jobs = []
            for name in ("me", "other"):
                text, _ = await hub.key(name, KeyKind.TRAINER)
                reply = await stub.SubmitJob(codec.write_spec(spec()), metadata=bearer("trainer", text), timeout=10)
                jobs.append(JobId(reply.job_id))
            yield World(hub=hub, stub=stub, node=node, own=jobs[0], foreign=jobs[1])
        finally:
            linking.cancel()
            await asyncio.gather(linking, return_exceptions=True)


async def _callers(world: World) -> list[Caller]:
    hub = world.hub
    secret = new_secret()
    token = access.token_for(secret, Role.TRAINER, "me", AccountId("me"))
    await hub.writer.submit(lambda books: books.save_token(token))
    callers = [
        Caller("node", Who.NODE, world.node.link._identity.metadata),
        Caller("trainer token", Who.TRAINER, bearer("trainer", secret)),
    ]
    ways = {KeyKind.PROVIDER: ("join", Who.PROVIDER), KeyKind.TRAINER: ("trainer", Who.TRAINER)}
    ways[KeyKind.ADMIN] = ("trainer", Who.ADMIN)
    for kind, (way, who) in ways.items():
        useful = {row[who] for row in TABLE.values() if who in row} - {None}
        for only in [None, *sorted(scope for scope in useful if scope)]:
            text, _ = await hub.key("me", kind, *([only] if only else []))
            scopes = frozenset({only}) if only else frozenset(Scope)
            callers.append(Caller(f"{kind} {only or 'all'}", who, bearer(way, text), scopes))
    return callers


def _expected(caller: Caller, operation: Operation, owner: str) -> grpc.StatusCode | None:
    row = TABLE[operation]
    if caller.who not in row or (row[caller.who] not in {None, *caller.scopes}):
        return DENIED
    reaches = owner == "me" or (owner == "other" and (operation, caller.who) in ALSO_FOREIGN)
    return None if reaches or operation not in ABOUT_JOBS else grpc.StatusCode.NOT_FOUND


async def test_the_wire_answers_as_the_table_says_and_a_foreign_object_reads_like_a_missing_one(
    tmp_path: Path,
) -> None:
    async with world(tmp_path, lines=Limit(failures=10_000)) as here:
        objects = {"me": here.own, "other": here.foreign, "nobody": MISSING}
        wrong: list[object] = []
        refused: Counter[tuple[str, str]] = Counter()
        for caller in await _callers(here):
            for operation in TABLE:
                answers = {}
                for owner, job in objects.items():
                    answer = answers[owner] = await here.ask(caller.metadata, operation, job)
                    expected = _expected(caller, operation, owner)
                    if answer.code is not expected:
                        wrong.append((caller.name, operation.value, owner, expected, answer))
                    refused[caller.who, operation] += expected is not None and (owner != "nobody" or expected is DENIED)
                if answers["other"].code is grpc.StatusCode.NOT_FOUND:
                    assert answers["other"].words.replace(here.foreign, MISSING) == answers["nobody"].words
        assert not wrong, wrong
        lines = [line for line in await here.hub.audit(10_000) if line.outcome is Outcome.REFUSED]
        written = Counter((_kind(line.actor), line.action) for line in lines)
        assert written == +refused


def _kind(actor: str) -> str:
    return next(who for who in Who if actor.startswith(who))


async def test_a_join_token_joins_and_does_nothing_else(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        for operation in TABLE:
            metadata = bearer("join", await here.hub.join_secret())
            answer = await here.ask(metadata, operation, here.own)
            assert answer.code is (None if operation is Operation.NODE else grpc.StatusCode.PERMISSION_DENIED)


async def test_a_node_reads_nothing_of_jobs_that_it_does_not_work_for(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        text, _ = await here.hub.key("other", KeyKind.PROVIDER)
        stranger = WordNode("bolt", here.hub.token(Role.NODE, text), tmp_path / "b.json")
        linking = asyncio.create_task(stranger.link.run())
        await until(lambda: stranger.connected)
        about = [
            await stranger.link.units(UnitsQuery(job_id=job, epoch=Epoch(1), rank=Rank(0)))
            for job in (here.own, here.foreign, MISSING)
        ]
        assert about[0] == about[1] == about[2]
        linking.cancel()
        await asyncio.gather(linking, return_exceptions=True)


async def test_what_is_not_recognised_is_refused_alike_by_every_call(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        hub = here.hub
        gone, gone_id = await hub.key("me", KeyKind.TRAINER)
        await hub.do(lambda books: revoke_key(books, clerk(), gone_id))
        late = await hub.do(lambda books: create_key(books, clerk(), "me", KeyKind.ADMIN, seconds=-1))
        await hub.account("closed")
        closed, _ = await hub.key("closed", KeyKind.TRAINER)
        await hub.do(lambda books: set_disabled(books, clerk(), "closed", disabled=True))
        rig, _ = await hub.key("me", KeyKind.PROVIDER)
        shown = {
            "nothing": None,
            "no bearer": (("authorization", "Basic dXNlcjpwdw=="),),
            "wrong secret": bearer("trainer", new_secret()),
            "unknown kind": bearer("root", new_secret()),
            "altered": bearer("trainer", gone[:-1] + ("0" if gone[-1] != "0" else "1")),
            "revoked": bearer("trainer", gone),
            "expired": bearer("trainer", late.text),
            "disabled": bearer("trainer", closed),
            "a provider as trainer": bearer("trainer", rig),
            "a trainer as node": bearer("join", gone),
            "another node": bearer("node", "n_0123456789abcdef", new_secret()),
            "no node at all": bearer("node", "x"),
        }
        assert len(shown) < DEFAULT_LIMIT.failures, "nobody is to wait within the first round"
        codes: Counter[grpc.StatusCode | None] = Counter()
        operations = sorted(TABLE, key=lambda operation: operation is Operation.NODE)  # last: it may ask twice
        for number, operation in enumerate(operations):
            may = {grpc.StatusCode.UNAUTHENTICATED} | ({grpc.StatusCode.RESOURCE_EXHAUSTED} if number else set())
            for name, metadata in shown.items():
                answer = await here.ask(metadata, operation, here.own)
                assert answer.code in may, (name, operation, answer)
                codes[answer.code] += 1
                for secret in (gone, late.text, closed, rig):
                    assert secret not in answer.words
        assert codes.keys() == {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED}
        lines = [line for line in await hub.audit() if line.action == "authenticate"]
        assert len(lines) == 20
        assert {line.actor for line in lines} == {"127.0.0.1"}
        assert "further ones are refused without a look" in lines[0].detail
        everything = repr(await hub.audit())
        for secret in (gone, late.text, closed, rig):
            assert secret not in everything


async def test_a_host_that_shows_wrong_keys_waits_and_does_not_keep_out_who_is_known(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        good, _ = await here.hub.key("me", KeyKind.TRAINER)
        fresh, _ = await here.hub.key("me", KeyKind.TRAINER)
        mesh = pb.QueryMeshRequest()
        await here.stub.QueryMesh(mesh, metadata=bearer("trainer", good), timeout=10)
        codes = []
        for _ in range(21):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await here.stub.QueryMesh(mesh, metadata=bearer("trainer", new_secret()), timeout=10)
            codes.append(caught.value.code())
        assert codes == [grpc.StatusCode.UNAUTHENTICATED] * 20 + [grpc.StatusCode.RESOURCE_EXHAUSTED]
        with pytest.raises(grpc.aio.AioRpcError, match=r"too many refused attempts from 127\.0\.0\.1: try again in"):
            await here.stub.QueryMesh(mesh, metadata=bearer("trainer", fresh), timeout=10)
        await here.stub.QueryMesh(mesh, metadata=bearer("trainer", good), timeout=10)
        metadata = here.node.link._identity.metadata
        await here.stub.Statement(statement_codec.write_query(StatementQuery()), metadata=metadata, timeout=10)


async def test_an_admin_ends_a_foreign_job_and_it_is_written_down(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        admin, key = await here.hub.key("me", KeyKind.ADMIN)
        end = pb.EndJobRequest(job_id=here.foreign, state=JobState.CANCELLED.value, reason="abuse")
        await here.stub.EndJob(end, metadata=bearer("trainer", admin), timeout=10)
        await until(lambda: [job for job, _, why in here.node.releases if why == "abuse"] == [here.foreign])
        lines = [line for line in await here.hub.audit() if line.target == here.foreign]
        assert [(line.action, line.outcome) for line in lines] == [("EndJob", Outcome.DONE)]
        assert lines[0].actor == f"admin key me {key} 127.0.0.1"
        assert "job of other" in lines[0].detail


async def test_a_trainer_lists_its_own_jobs_and_an_admin_those_of_all(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        seen = {}
        for kind in (KeyKind.TRAINER, KeyKind.ADMIN):
            text, _ = await here.hub.key("me", kind)
            reply = await here.stub.ListJobs(
                job_codec.write_query(JobQuery()), metadata=bearer("trainer", text), timeout=10
            )
            seen[kind] = [job.job_id for job in job_codec.read_page(reply).jobs]
        assert seen == {KeyKind.TRAINER: [here.own], KeyKind.ADMIN: [here.own, here.foreign]}


async def test_the_jobs_of_a_key_are_its_accounts(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        jobs = here.hub.store.tables.jobs
        assert (jobs[here.own].owner, jobs[here.foreign].owner) == ("me", "other")
        nodes = here.hub.store.tables.nodes.values()
        assert [node.account for node in nodes] == ["me"]
        assert NodeId(here.node.link._identity.node_id or "") in here.hub.store.tables.nodes
        assert MAIN == "main"
