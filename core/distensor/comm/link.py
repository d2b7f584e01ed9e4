"""A node's link to its hub: one stream, kept up for as long as the node runs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distensor.comm.backoff import Backoff
from distensor.comm.channels import MAX_UNITS_PER_MESSAGE
from distensor.comm.link_failures import ELSEWHERE, REFUSED, LinkDownError, failure_of
from distensor.comm.link_identity import LinkIdentity
from distensor.comm.link_status import LinkError, LinkState, LinkStatus, NodeLinkHandler
from distensor.comm.messages import (
    ClaimsAnswer,
    Heartbeat,
    HeartbeatAnswer,
    HubToNode,
    JobRef,
    Register,
    Rejected,
    Release,
    TopologyGrant,
    Welcome,
)
from distensor.comm.outbox import ClaimBook, ReportBoard
from distensor.comm.reach import GRPC, Reach, Stream
from distensor.comm.statement_codec import (
    read_statement,
    read_units,
    write_query,
    write_units_query,
)
from distensor.core.clock import SYSTEM_CLOCK, Clock
from distensor.core.control import Assignment, NodeInfo, Unit, WorkerChange, WorkerReady
from distensor.core.errors import DistensorError, HubProtocolError, HubUnreachableError
from distensor.core.ids import Epoch, JobId
from distensor.core.reading import Unavailable
from distensor.core.statement import Statement, StatementQuery, UnitsPage, UnitsQuery

CLAIM_SECONDS = 0.5
REJECTED_RETRY_SECONDS = 30.0
WELCOME_SECONDS = 10.0
SILENT_HEARTBEATS = 3


class NodeLink:
    """Connects, registers, beats, reconnects; tells the hub everything again that it may have missed.

    Args:
        token: a join token; needed only until `credential_path` holds the identity that the hub gave.
        credential_path: where that identity is kept, mode 0600.
        describe: what the node is at this moment; a change travels with the next heartbeat.
        running: the ranks whose workers this node has, also those it is about to restart.

    All methods belong to the event loop that runs `run`.
    """

    def __init__(
        self,
        token: str | None,
        credential_path: Path,
        describe: Callable[[], NodeInfo],
        running: Callable[[], Sequence[JobRef]],
        handler: NodeLinkHandler,
        clock: Clock = SYSTEM_CLOCK,
        *,
        backoff: Backoff | None = None,
        reach: Reach = GRPC,
    ) -> None:
        self._credential_path = credential_path
        self._reach = reach
        self._identity = LinkIdentity(token, credential_path, reach.authority)
        self._describe = describe
        self._running = running
        self._handler = handler
        self._clock = clock
        self._backoff = backoff or Backoff()
        self._reports = ReportBoard()
        self._claims = ClaimBook(largest=MAX_UNITS_PER_MESSAGE)
        self._granted: set[tuple[JobId, Epoch]] = set()
        self._accepting = True
        self._beat_now = asyncio.Event()
        self._woken = asyncio.Event()
        self._stream: Stream | None = None
        self._told: NodeInfo | None = None
        self._sequence = 0
        self._sent_at: dict[int, float] = {}
        self._status = LinkStatus(state=LinkState.CONNECTING, address=self._identity.address_text, since=clock.now())

    @property
    def status(self) -> LinkStatus:
        return self._status

    @property
    def unanswered_claims(self) -> int:
        """How many claims the hub has not confirmed yet."""
        return len(self._claims)

    def report(self, report: WorkerReady | WorkerChange) -> None:
        """Tell the hub about a worker, now and again after every reconnect until it is released."""
        self._reports.put(report)
        if self._stream is not None:
            self._stream.send(report)

    def claim(self, unit: Unit) -> None:
        """Claim a unit of work. It is kept and sent again until the hub has it in its books."""
        self._claims.add(unit)

    async def statement(self, query: StatementQuery) -> Statement:
        """One page of what the hub has credited.

        Raises:
            ControlError: the hub is away (HubUnreachableError), or too old to know the question.
        """
        return read_statement(await self._ask("Statement", write_query(query)))

    async def units(self, query: UnitsQuery) -> UnitsPage:
        """One page of units in the hub's books. Raises like `statement`."""
        return read_units(await self._ask("Units", write_units_query(query)), query)

    async def _ask(self, method: str, request: Any) -> Any:
        stream = self._stream
        if stream is None:
            raise HubUnreachableError("not connected to the hub")
        return await stream.ask(method, request, self._identity.metadata)

    def set_accepting(self, accepting: bool) -> None:
        """Whether new work is welcome; the hub hears it at once."""
        if accepting != self._accepting:
            self._accepting = accepting
            self._beat_now.set()

    def wake(self) -> None:
        """The machine slept or this process was stopped: connect anew at once; no dead connection is waited for."""
        self._backoff.reset()
        self._woken.set()

    def use_token(self, token: str | None) -> None:
        """Another token, or none any more: connect anew at once with it. What is not acknowledged yet is kept."""
        self._identity = LinkIdentity(token, self._credential_path, self._reach.authority)
        self.wake()

    async def run(self) -> None:
        """Keep the link up until cancelled."""
        self._show(self._status)
        while True:
            try:
                await _first_to_end(self._connect_once(), self._woken.wait())
                failure = LinkDownError.of("stream_ended", "the hub ended the stream")
            except DistensorError as error:
                failure = failure_of(error, self._identity)
                if failure.error.code in REFUSED and self._identity.refused():
                    continue
            if not self._woken.is_set() and not (failure.error.code in ELSEWHERE and self._identity.turn()):
                await self._wait(failure)
            if self._woken.is_set():
                self._woken.clear()
                self._change(LinkState.CONNECTING, error=None, next_retry_at=None)

    async def _wait(self, failure: LinkDownError) -> None:
        delay = REJECTED_RETRY_SECONDS if failure.final else self._backoff.next_delay()
        if failure.error.code == "no_key":
            self._change(LinkState.NO_KEY, error=failure.error, next_retry_at=None)
        else:
            state = LinkState.REJECTED if failure.final else LinkState.OFFLINE
            self._change(state, error=failure.error, next_retry_at=self._clock.now() + delay)
        await _first_to_end(self._clock.sleep_async(delay), self._woken.wait())

    async def _connect_once(self) -> None:
        address, authority, metadata = await self._identity.resolve()
        stream = await self._reach.open(address, authority, metadata, self._identity.patience)
        try:
            self._told = self._describe()
            node_id = self._identity.node_id
            await stream.write(Register(info=replace(self._told, node_id=node_id), running=tuple(self._running())))
            await self._welcomed(stream)
        finally:
            self._stream = None
            self._claims.connection_lost()
            await stream.close()

    async def _welcomed(self, stream: Stream) -> None:
        welcome = await stream.read(within=WELCOME_SECONDS)
        if isinstance(welcome, Rejected):
            raise LinkDownError.rejected(welcome)
        if not isinstance(welcome, Welcome):
            raise HubProtocolError(f"the hub's first message is {type(welcome).__name__}, expected Welcome")
        await self._identity.welcomed(welcome)
        self._sent_at.clear()
        self._stream = stream
        for report in self._reports.all():
            stream.send(report)
        await _first_to_end(
            self._listen(stream, welcome),
            self._beat(stream, welcome.heartbeat_seconds),
            self._send_claims(stream),
            stream.drain(),
        )

    async def _listen(self, stream: Stream, welcome: Welcome) -> None:
        silence = welcome.heartbeat_seconds * SILENT_HEARTBEATS
        while True:
            message = await stream.read(within=silence)
            if message is None:
                return
            self._receive(message)

    async def _beat(self, stream: Stream, seconds: float) -> None:
        while True:
            self._send_heartbeat(stream)
            self._beat_now.clear()
            # Not `wait_for`: before Python 3.12 it loses a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._beat_now.wait()

    def _send_heartbeat(self, stream: Stream) -> None:
        info = self._describe()
        changed = info if info != self._told else None
        self._told = info
        self._sequence += 1
        self._sent_at[self._sequence] = self._clock.monotonic()
        if changed is not None:
            changed = replace(changed, node_id=self._identity.node_id)
        stream.send(Heartbeat(sequence=self._sequence, info=changed, accepting=self._accepting))

    async def _send_claims(self, stream: Stream) -> None:
        while True:
            if batch := self._claims.next_batch():
                stream.send(batch)
            await self._clock.sleep_async(CLAIM_SECONDS)

    def _receive(self, message: HubToNode) -> None:
        match message:
            case HeartbeatAnswer():
                self._answered(message)
            case Assignment():
                self._handler.on_assignment(message)
            case TopologyGrant():
                self._granted_topology(message)
            case Release():
                self._reports.release(message.job_id, message.epoch)
                self._granted.discard((message.job_id, message.epoch))
                self._handler.on_release(message.job_id, message.epoch, message.reason)
            case ClaimsAnswer():
                self._claims.answered(message.batch)
            case Rejected():
                raise LinkDownError.rejected(message)
            case Welcome():
                raise HubProtocolError("the hub sent a second Welcome")

    def _granted_topology(self, grant: TopologyGrant) -> None:
        membership = (grant.topology.job_id, grant.topology.epoch)
        if membership not in self._granted:
            self._granted.add(membership)
            self._handler.on_topology(grant.topology, grant.certificates)

    def _answered(self, answer: HeartbeatAnswer) -> None:
        sent = self._sent_at.pop(answer.sequence, None)
        if sent is None:
            return
        elapsed = self._clock.monotonic() - sent
        self._backoff.reset()
        self._change(
            LinkState.CONNECTED,
            error=None,
            next_retry_at=None,
            rtt_ms=elapsed * 1000,
            generation=answer.generation,
            hub_clock_skew=answer.hub_time - (self._clock.now() - elapsed / 2),
        )
        self._handler.on_earnings(answer.earnings)

    def _change(
        self, state: LinkState, *, error: LinkError | None, next_retry_at: float | None, **more: object
    ) -> None:
        since = self._status.since if state is self._status.state else self._clock.now()
        if state is not LinkState.CONNECTED:
            more["rtt_ms"] = Unavailable(reason="not connected")
        self._show(
            replace(
                self._status,
                state=state,
                since=since,
                error=error,
                next_retry_at=next_retry_at,
                address=self._identity.address_text,
                node_id=self._identity.node_id,
                **more,  # type: ignore[arg-type]  # the callers above name fields of LinkStatus
            )
        )

    def _show(self, status: LinkStatus) -> None:
        self._status = status
        self._handler.on_status(status)


async def _first_to_end(*coroutines: object) -> None:
    """Run all until the first ends, then cancel the others; its exception is ours."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]  # type: ignore[call-overload]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
