"""The life of a worker: listen, get the certificate, join the mesh, obey the driver until it says end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distensor.core import DRIVER_RANK, Clock, RankLayout
from distensor.core.errors import (
    ConfigError,
    DistensorError,
    FrameError,
    HandshakeError,
    PeerLostError,
    ProgramRejectedError,
    TransportError,
)
from distensor.node.faults import FaultPhase, FaultScript
from distensor.node.ipc import Emitter, Mailbox, WorkerAssignment
from distensor.node.membership import MembershipDesk, Seat
from distensor.node.pacer import Pacer
from distensor.node.progress import ProgressReporter
from distensor.node.replica_meter import ReplicaMeter
from distensor.node.snapshots import SnapshotServer, restore, take_snapshot
from distensor.transport import Channel, DataPlane, Listener, LocalMeeting, Timeouts
from distensor.transport.driver import ABORT_SEQUENCE, Command, ReplyCode, receive_named, send_named

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.node.engine import ShardEngine
    from distensor.node.orders import StepOrder
    from distensor.node.step_report import StepReport


_OF_THE_EPOCH = frozenset({Command.LOAD, Command.STATUS, Command.SHARE, Command.RESOLVE, Command.DIGEST})


@dataclass(frozen=True, kw_only=True, slots=True)
class _StepInHand:
    """The newest step, in the epoch and as the rank that it was begun in: work is claimed for those."""

    order: StepOrder
    micro_batches: int
    epoch: int
    rank: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What the load command said: a rank that joins later needs it too."""

    meta: Mapping[str, Any] = field(default_factory=dict)
    programs: Mapping[int, bytes] = field(default_factory=dict)


class WorkerRuntime:
    """Drives one worker process through the epochs of one job.

    Args:
        mailbox: what the supervisor says after the assignment, from the stdin thread.
        pacer: how hard to work; by default as hard as possible.
        faults: what to suffer on purpose; by default nothing.
    """

    def __init__(
        self,
        *,
        assignment: WorkerAssignment,
        mailbox: Mailbox,
        emitter: Emitter,
        clock: Clock,
        timeouts: Timeouts,
        pacer: Pacer | None = None,
        faults: FaultScript | None = None,
    ) -> None:
        self._assignment = assignment
        self._mailbox = mailbox
        self._busy = threading.Lock()
        self._emitter = emitter
        self._clock = clock
        self._timeouts = timeouts
        self._pacer = pacer or Pacer(clock)
        self._faults = faults or FaultScript()
        self._meter = ReplicaMeter(RankLayout(assignment.parallel), assignment.rank)
        self._progress = ProgressReporter(emitter=emitter, clock=clock, replicas=self._meter)
        self._after_reply: Callable[[], None] | None = None
        self._engine: ShardEngine | None = None
        self._loaded = Loaded()
        self._in_hand: _StepInHand | None = None
        self._opening: DataPlane | None = None
        self._plane: DataPlane | None = None

    def run(self) -> None:
        """Serve the job. Returns when the driver ended it, or the supervisor drains.

        Raises:
            HandshakeError: a peer could not prove who it is.
            ProgramRejectedError, MemoryError, RuntimeError: what ends this process.
        """
        with contextlib.closing(Listener.bind(self._assignment.listen_host)) as listener:
            desk = MembershipDesk(
                self._assignment,
                port=listener.address.port,
                mailbox=self._mailbox,
                emitter=self._emitter,
                on_seat=self._give_up_opening,
            )
            desk.start()
            self._warm_up()
            threading.Thread(target=self._leave_on_drain, args=(desk,), name="drain-watch", daemon=True).start()
            epoch = -1
            while (seat := desk.next(epoch)) is not None:
                epoch = seat.assignment.epoch
                if self._serve_epoch(seat, listener):
                    return

    def _serve_epoch(self, seat: Seat, listener: Listener) -> bool:
        """True once the job is over. A healthy rank whose peer went away waits for what its supervisor says next."""
        self._assignment = seat.assignment
        self._meter.move(RankLayout(seat.assignment.parallel), seat.assignment.rank)
        try:
            return self._take_part(seat, listener)
        except HandshakeError as error:
            if self._engine is None:
                raise
            self._emitter.event("warning", f"epoch {seat.assignment.epoch} was not entered: {error}")
        except TransportError as error:
            if not self._mailbox.draining:
                planned = isinstance(error, PeerLostError) and error.rank == DRIVER_RANK
                text = f"epoch {seat.assignment.epoch} is over: {error}"
                self._emitter.event("info" if planned else "warning", text)
        return False

    def _take_part(self, seat: Seat, listener: Listener) -> bool:
        plane = DataPlane.open(
            me=seat.me,
            credentials=seat.credentials,
            listener=listener,
            peers=seat.peers,
            timeouts=self._timeouts,
            clock=self._clock,
            local=LocalMeeting(),
            relay=seat.relay,
            on_opening=self._note_opening,
        )
        self._opening, self._plane = None, plane
        try:
            self._emitter.emit("connected")
            self._progress.watch(plane)
            self._pacer.attach(plane)
            return self._serve(plane)
        finally:
            self._plane = None
            plane.close()

    def _warm_up(self) -> None:
        """Load torch before anybody listens for us: loading holds the interpreter for longer than a peer may be silent.
        A device that is not there is told later, where the driver hears of it too."""
        from distensor.node.device import torch_device

        with contextlib.suppress(ConfigError, RuntimeError):
            torch_device(self._assignment.device_kind, self._assignment.device_id)

    def _note_opening(self, plane: DataPlane) -> None:
        self._opening = plane

    def _give_up_opening(self) -> None:
        """There is a newer epoch: whoever is awaited in this one may never come."""
        if (opening := self._opening) is not None:
            opening.close()

    def _serve(self, plane: DataPlane) -> bool:
        engine = self._seated_engine(plane)
        self._snapshots = SnapshotServer(plane)
        stop_watching = _close_on_abort(plane)
        try:
            sequence = 0
            while self._obey(plane, engine, sequence):
                sequence += 1
            return True
        finally:
            stop_watching()
            if self._assignment.parallel.world_size > 1:
                plane.close()  # first: it wakes the threads of the groups, wherever they wait
                _leave_groups()

    def _leave_on_drain(self, desk: MembershipDesk) -> None:
        """Leave the mesh when the supervisor drains, but let the command in hand finish first."""
        self._mailbox.wait_for_drain()
        with self._busy:
            desk.leave()
            if self._plane is not None:
                self._emitter.event("info", "draining: leaving the job after the step in hand")
                self._plane.close()
            self._give_up_opening()

    def _seated_engine(self, plane: DataPlane) -> ShardEngine:
        world = self._assignment.parallel.world_size
        if world > 1:
            from distensor.transport.c10d import init_process_group

            init_process_group(plane, rank=self._assignment.rank, world_size=world)
        if self._engine is None:
            self._engine = self._make_engine(plane)
        else:
            self._engine.rejoin(self._assignment, plane)
        return self._engine

    def _make_engine(self, plane: DataPlane) -> ShardEngine:
        import torch

        from distensor.node.device import torch_device
        from distensor.node.engine import ShardEngine
        from distensor.node.memory import keep_freed_memory

        torch.set_num_threads(self._assignment.threads)
        keep_freed_memory()
        device = torch_device(self._assignment.device_kind, self._assignment.device_id)
        return ShardEngine(
            assignment=self._assignment,
            plane=plane,
            device=device,
            clock=self._clock,
            pacer=self._pacer,
            reach=self._reach,
        )

    def _reach(self, phase: FaultPhase, step: int) -> None:
        self._faults.reach(phase, rank=self._assignment.rank, epoch=self._assignment.epoch, step=step)

    def _obey(self, plane: DataPlane, engine: ShardEngine, sequence: int) -> bool:
        """Run one command and answer it; False once the job is over."""
        most = self._assignment.memory_limit
        meta, tensors = receive_named(plane, DRIVER_RANK, Channel.CONTROL, sequence, None, most=most)
        with self._busy:
            return self._obey_one(plane, engine, sequence, meta, tensors)

    def _obey_one(
        self,
        plane: DataPlane,
        engine: ShardEngine,
        sequence: int,
        meta: Mapping[str, Any],
        tensors: dict[str, Tensor],
    ) -> bool:
        command = _command(meta)
        if command is Command.END:
            self._reply(plane, sequence, {"code": ReplyCode.OK.value}, {})
            return False
        try:
            answer, results = self._run(engine, command, sequence, meta, tensors)
        except PeerLostError as error:
            self._reply_error(plane, sequence, ReplyCode.PEER_LOST, error, peer=error.rank)
            raise
        except ProgramRejectedError as error:
            self._reply_error(plane, sequence, ReplyCode.REFUSED_PROGRAM, error)
            self._emitter.event("error", f"refused: {error}")
            return True
        except MemoryError as error:
            self._reply_error(plane, sequence, ReplyCode.OUT_OF_MEMORY, error)
            raise
        except DistensorError as error:
            self._reply_error(plane, sequence, ReplyCode.ERROR, error)
            raise
        except RuntimeError as error:
            # torch reports its failures, a lost peer inside a collective among them, as RuntimeError.
            lost = _peer_behind(plane, error)
            if lost is not None:
                self._reply_error(plane, sequence, ReplyCode.PEER_LOST, error, peer=lost)
                raise PeerLostError(lost, str(error)) from error
            if _is_out_of_memory(error):
                self._reply_error(plane, sequence, ReplyCode.OUT_OF_MEMORY, error)
                raise MemoryError(str(error)) from error
            self._reply_error(plane, sequence, ReplyCode.ERROR, error)
            raise
        except Exception as error:  # whatever it is ends this process; the driver is to hear why from us
            self._reply_error(plane, sequence, ReplyCode.ERROR, error)
            raise
        self._reply(plane, sequence, {"code": ReplyCode.OK.value, **answer}, results)
        self._finish(plane, sequence)
        return True

    def _finish(self, plane: DataPlane, sequence: int) -> None:
        """Do what need not delay the answer, while the driver prepares its next command."""
        after, self._after_reply = self._after_reply, None
        try:
            if after is not None:
                after()
        except Exception as error:  # whatever it is ends this process; the driver hears of it as the next answer
            self._reply_error(plane, sequence + 1, _code_of(error), error)
            raise

    def _run(
        self,
        engine: ShardEngine,
        command: Command,
        sequence: int,
        meta: Mapping[str, Any],
        tensors: dict[str, Tensor],
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        from distensor.node.orders import parse_number, parse_wanted, split_batches
        from distensor.node.recovery import finite, report_fields

        if command in _OF_THE_EPOCH:
            return self._begin_epoch(engine, command, sequence, meta, tensors), {}
        engine.require_load()
        self._progress.worked()
        match command:
            case Command.STEP:
                return self._step(engine, sequence, meta, tensors), {}
            case Command.EVALUATE:
                loss, weight = engine.evaluate(sequence, split_batches(meta, tensors))
                return {"loss": finite(loss), "weight": weight}, {}
            case Command.GRADIENTS:
                batches, wanted = split_batches(meta, tensors), parse_wanted(meta)
                report, named = engine.gradients(sequence, batches, wanted, parse_number(meta, "step"))
                return report_fields(report), named
            case Command.STATE:
                kept = engine.averages if meta.get("averages") else engine.state
                return {}, kept(parse_wanted(meta))
            case Command.REPLACE:
                engine.replace(tensors)
                return {}, {}
            case Command.SNAPSHOT:
                number, wanted = parse_number(meta, "number"), parse_wanted(meta)
                self._reach(FaultPhase.CHECKPOINT, 0 if engine.decided is None else engine.decided.number)
                return take_snapshot(engine, self._snapshots, number, wanted, self._clock), {}
            case Command.RESTORE:
                restore(engine, tensors)
                return {}, {}
            case Command.EXCHANGE:
                engine.exchange()
                return {}, {}
            case _:
                raise ConfigError(f"command {command.value!r} has no place in the sequence of commands")

    def _begin_epoch(
        self,
        engine: ShardEngine,
        command: Command,
        sequence: int,
        meta: Mapping[str, Any],
        tensors: dict[str, Tensor],
    ) -> dict[str, Any]:
        """What makes the ranks hold what they should; none of it needs programs to be here already."""
        from distensor.node.recovery import status_of
        from distensor.node.sharing import digest

        match command:
            case Command.LOAD:
                return self._load(engine, meta, tensors)
            case Command.STATUS:
                return status_of(engine)
            case Command.SHARE:
                return self._share(engine, sequence, meta)
            case Command.RESOLVE:
                return self._resolve(engine, meta)
            case _:
                engine.require_load()
                return {"digest": digest(engine)}

    def _load(self, engine: ShardEngine, meta: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        from distensor.node.orders import parse_plan, split_parts

        self._progress.loading()
        programs, weights = split_parts(tensors)
        tensors.clear()  # the engine lets go of each stage's once it has copied them
        plan = parse_plan(meta)
        engine.load(plan, programs, weights)
        self._loaded = Loaded(meta=meta, programs=programs)
        self._progress.loaded(engine.own_stages, plan.sync.value, engine.trained_elements)
        return {"stages": engine.own_stages}

    def _step(
        self, engine: ShardEngine, sequence: int, meta: Mapping[str, Any], tensors: dict[str, Tensor]
    ) -> dict[str, Any]:
        from distensor.node.orders import parse_step, split_batches

        order, batches = parse_step(meta), split_batches(meta, tensors)
        own = self._assignment
        self._in_hand = _StepInHand(order=order, micro_batches=len(batches), epoch=own.epoch, rank=own.rank)
        report = engine.step(sequence, batches, order.lr, order.pace, order.step, order.total_steps)
        return self._answer(engine, self._in_hand, report)

    def _answer(self, engine: ShardEngine, hand: _StepInHand, report: StepReport) -> dict[str, Any]:
        if report.committed:
            self._after_reply = lambda: self._settle(engine, hand, report)
        from distensor.node.recovery import report_fields

        figures = None if report.figures is None else asdict(report.figures)
        return {**report_fields(report), "links": self._progress.links(), "figures": figures}

    def _resolve(self, engine: ShardEngine, meta: Mapping[str, Any]) -> dict[str, Any]:
        """The step that an epoch before this one did not bring to its end on every rank."""
        from distensor.node.recovery import parse_resolve

        number, sums = parse_resolve(meta)
        done = engine.decided
        hand = self._in_hand
        if hand is None or hand.order.step != number:
            raise ProgramRejectedError(f"step {number} is to be resolved, and this rank was not in it")
        if done is not None and done.number == number and done.report is not None:
            return self._answer(engine, hand, done.report)
        return self._answer(engine, hand, engine.resolve(number, sums))

    def _share(self, engine: ShardEngine, sequence: int, meta: Mapping[str, Any]) -> dict[str, Any]:
        from distensor.node.sharing import digest, give, parse_share, take

        plane = self._plane
        assert plane is not None, "a command came over it"
        order, rank = parse_share(meta, self._assignment.parallel.world_size), self._assignment.rank
        if rank in order.joiners:
            self._progress.loading()
            plan, programs = take(engine, plane, order, sequence, self._assignment.memory_limit)
            self._loaded = Loaded(meta=plan, programs=programs)
            self._progress.loaded(engine.own_stages, str(plan.get("sync")), engine.trained_elements)
        elif rank in order.sources:
            give(engine, self._loaded.meta, self._loaded.programs, plane, rank, order, sequence)
        return {"digest": digest(engine)} if rank in (*order.joiners, *order.sources) else {}

    def _settle(self, engine: ShardEngine, hand: _StepInHand, report: StepReport) -> None:
        """What all ranks have decided is done here, then claimed, once."""
        engine.settle()
        if report.noticed is not None and self._meter.replica in report.noticed.dropped:
            text = f"step {hand.order.step}: no finite number here; the others went on without it"
            self._emitter.event("warning", text)
        if hand.micro_batches and self._in_hand is hand:
            self._emitter.emit(
                "claim", step=hand.order.step, micro_batches=hand.micro_batches, epoch=hand.epoch, rank=hand.rank
            )
            self._in_hand = replace(hand, micro_batches=0)
        self._progress.step(hand.order, report)

    def _reply(self, plane: DataPlane, sequence: int, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        send_named(plane, DRIVER_RANK, Channel.REPLY, sequence, meta, tensors)

    def _reply_error(
        self, plane: DataPlane, sequence: int, code: ReplyCode, error: BaseException, *, peer: int | None = None
    ) -> None:
        # The notes name the operation and the module of the user's model.
        message = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        try:
            self._reply(plane, sequence, {"code": code.value, "message": message, "peer": peer}, {})
        except TransportError:
            # The driver is gone too; the original error is the one to raise.
            self._emitter.event("warning", "the driver could not be told of the error")


def _command(meta: Mapping[str, Any]) -> Command:
    try:
        return Command(meta.get("command", ""))
    except ValueError:
        raise FrameError(f"command {meta.get('command')!r}: expected one of {', '.join(Command)}") from None


def _peer_behind(plane: DataPlane, error: BaseException) -> int | None:
    """The lost peer that made a collective fail, if that is what happened."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, PeerLostError):
            return seen.rank
        seen = seen.__cause__ or seen.__context__
    lost = plane.lost()
    return next(iter(lost), None)


def _code_of(error: Exception) -> ReplyCode:
    out = isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _is_out_of_memory(error))
    return ReplyCode.OUT_OF_MEMORY if out else ReplyCode.ERROR


def _is_out_of_memory(error: RuntimeError) -> bool:
    """A card's memory has an error of its own; for the machine's, torch has only words."""
    import torch

    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _close_on_abort(plane: DataPlane) -> Callable[[], None]:
    """Close the plane when the driver says abort or vanishes: it wakes whatever waits on another peer."""
    over = threading.Event()

    def watch() -> None:
        with contextlib.suppress(TransportError):
            receive_named(plane, DRIVER_RANK, Channel.CONTROL, ABORT_SEQUENCE, None)
        if not over.is_set():
            plane.close()

    threading.Thread(target=watch, name="abort-watch", daemon=True).start()
    return over.set


def _leave_groups() -> None:
    from distensor.transport.c10d import destroy_process_group

    destroy_process_group()
