"""The life of a worker: listen, get the certificate, join the mesh, obey the driver until it says end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
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
from distensor.node.commands import Commands
from distensor.node.faults import FaultPhase, FaultScript
from distensor.node.ipc import Emitter, Mailbox, WorkerAssignment
from distensor.node.membership import MembershipDesk, Seat
from distensor.node.pacer import Pacer
from distensor.node.progress import ProgressReporter
from distensor.node.replica_meter import ReplicaMeter
from distensor.node.snapshots import SnapshotServer
from distensor.transport import Channel, DataPlane, Listener, LocalMeeting, Timeouts
from distensor.transport.driver import ABORT_SEQUENCE, Command, ReplyCode, receive_named, send_named

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.node.aggregated import Aggregators
    from distensor.node.engine import ShardEngine


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
        self._commands = Commands(
            assignment=assignment,
            emitter=emitter,
            clock=clock,
            progress=self._progress,
            meter=self._meter,
            reach=self._reach,
        )
        self._engine: ShardEngine | None = None
        self._opening: DataPlane | None = None
        self._plane: DataPlane | None = None
        self._aggregators: Aggregators | None = None

    def run(self) -> None:
        """Serve the job. Returns when the driver ended it, or the supervisor drains.

        Raises:
            HandshakeError: a peer could not prove who it is.
            ProgramRejectedError, MemoryError, RuntimeError: what ends this process.
        """
        with contextlib.closing(Listener.bind_one(*self._assignment.listen)) as listener:
            desk = MembershipDesk(
                self._assignment,
                port=listener.address.port,
                mailbox=self._mailbox,
                emitter=self._emitter,
                on_seat=self._give_up_opening,
            )
            self._warm_up()  # whoever says 'ready' keeps no other rank waiting
            desk.start()
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
        self._aggregators = aggregators = self._aggregators_of(seat)
        try:
            self._emitter.emit("connected")
            self._progress.watch(plane, aggregators.stats)
            self._pacer.attach(plane)
            return self._serve(plane)
        finally:
            self._plane = None
            plane.close()
            aggregators.close()

    def _aggregators_of(self, seat: Seat) -> Aggregators:
        from distensor.node.aggregated import Aggregators

        return Aggregators(
            seat,
            timeouts=self._timeouts,
            clock=self._clock,
            on_change=lambda text: self._emitter.event("warning", text),
        )

    def _warm_up(self) -> None:
        """Load torch before anybody listens for us: loading holds the interpreter for longer than a peer may be silent.
        A device that is not there is told later, where the driver hears of it too."""
        import distensor.node.engine
        import distensor.node.sharing
        import distensor.transport.c10d  # noqa: F401 - all that the first commands need
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
        self._commands.enter(self._assignment, plane, SnapshotServer(plane))
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
            self._engine.rejoin(self._assignment, plane, aggregators=self._aggregators)
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
            aggregators=self._aggregators,
            loss=self._faults.loss,
            cheat=self._faults.cheat,
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
            answer, results = self._commands.run(engine, command, sequence, meta, tensors)
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
        try:
            self._commands.finish()
        except Exception as error:  # whatever it is ends this process; the driver hears of it as the next answer
            self._reply_error(plane, sequence + 1, _code_of(error), error)
            raise

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
