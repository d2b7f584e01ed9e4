"""The life of a worker: listen, get the certificate, join the mesh, obey the driver until it says end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from distensor.comm.identity import new_key_and_csr
from distensor.core import DRIVER_RANK, Clock, RankLayout
from distensor.core.errors import (
    ConfigError,
    DistensorError,
    FrameError,
    PeerLostError,
    ProgramRejectedError,
    TransportError,
)
from distensor.node.ipc import Emitter, Mailbox, TopologyOrder, WorkerAssignment, parse_topology
from distensor.node.pacer import Pacer
from distensor.node.progress import ProgressReporter
from distensor.node.replica_meter import ReplicaMeter
from distensor.node.snapshots import SnapshotServer, restore, take_snapshot
from distensor.transport import (
    Channel,
    Credentials,
    DataPlane,
    Listener,
    LocalMeeting,
    PeerId,
    Timeouts,
    places_at,
    relay_at,
)
from distensor.transport.driver import ABORT_SEQUENCE, Command, ReplyCode, receive_named, send_named

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.node.engine import ShardEngine
    from distensor.node.orders import StepOrder
    from distensor.node.step_report import StepReport


class WorkerRuntime:
    """Drives one worker process through one assignment.

    Args:
        mailbox: what the supervisor says after the assignment, from the stdin thread.
        pacer: how hard to work; by default as hard as possible.
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
    ) -> None:
        self._assignment = assignment
        self._mailbox = mailbox
        self._busy = threading.Lock()
        self._emitter = emitter
        self._clock = clock
        self._timeouts = timeouts
        self._pacer = pacer or Pacer(clock)
        self._replica = RankLayout(assignment.parallel).coordinates(assignment.rank).dp
        meter = ReplicaMeter(RankLayout(assignment.parallel), assignment.rank)
        self._progress = ProgressReporter(emitter=emitter, clock=clock, replicas=meter)
        self._after_reply: Callable[[], None] | None = None

    def run(self) -> None:
        """Serve the job once. Returns when the driver ended it.

        Raises:
            HandshakeError: a peer could not prove who it is.
            PeerLostError: a peer or the driver went away.
        """
        with contextlib.closing(Listener.bind(self._assignment.listen_host)) as listener:
            self._run_on(listener)

    def _run_on(self, listener: Listener) -> None:
        me = self._assignment
        key_pem, csr_pem = new_key_and_csr(me.job_id, me.epoch, me.rank)
        self._emitter.emit("ready", v=1, port=listener.address.port, csr=csr_pem)
        self._warm_up()
        order = self._wait_for_topology()
        plane = DataPlane.open(
            me=PeerId(job_id=me.job_id, epoch=me.epoch, rank=me.rank),
            credentials=Credentials(
                key_pem=key_pem, certificate_pem=order.certificate_pem, authority_pem=order.authority_pem
            ),
            listener=listener,
            peers={
                member.rank: places_at(member.hosts, member.port) for member in order.members if member.rank != me.rank
            },
            timeouts=self._timeouts,
            clock=self._clock,
            local=LocalMeeting(),
            relay=relay_at(order.relay),
        )
        try:
            self._emitter.emit("connected")
            self._progress.watch(plane)
            self._pacer.attach(plane)
            self._serve(plane)
        finally:
            plane.close()

    def _warm_up(self) -> None:
        """Load torch before anybody listens for us: loading holds the interpreter for longer than a peer may be silent.

        A device that is not there is told later, where the driver hears of it too.
        """
        from distensor.node.device import torch_device

        with contextlib.suppress(ConfigError, RuntimeError):
            torch_device(self._assignment.device_kind, self._assignment.device_id)

    def _wait_for_topology(self) -> TopologyOrder:
        while True:
            message = self._mailbox.take()
            if message.get("type") == "topology":
                order, me = parse_topology(message), self._assignment
                if (order.job_id, order.epoch) == (me.job_id, me.epoch):
                    return order
                # What was on its way when the membership changed, or a mistake: never obeyed.
                text = f"refused a topology of job {order.job_id} in epoch {order.epoch}: this worker is of job "
                self._emitter.event("warning", f"{text}{me.job_id} in epoch {me.epoch}")

    def _serve(self, plane: DataPlane) -> None:
        engine = self._make_engine(plane)
        self._snapshots = SnapshotServer(plane)
        stop_watching = _close_on_abort(plane)
        threading.Thread(target=self._close_on_drain, args=(plane,), name="drain-watch", daemon=True).start()
        try:
            sequence = 0
            while self._obey(plane, engine, sequence):
                sequence += 1
        finally:
            stop_watching()
            if self._assignment.parallel.world_size > 1:
                _leave_groups()

    def _close_on_drain(self, plane: DataPlane) -> None:
        """Leave the mesh when the supervisor drains, but let the command in hand finish first."""
        self._mailbox.wait_for_drain()
        with self._busy:
            self._emitter.event("info", "draining: leaving the job after the step in hand")
            plane.close()

    def _make_engine(self, plane: DataPlane) -> ShardEngine:
        import torch

        from distensor.node.device import torch_device
        from distensor.node.engine import ShardEngine
        from distensor.node.memory import keep_freed_memory

        torch.set_num_threads(self._assignment.threads)
        keep_freed_memory()
        device = torch_device(self._assignment.device_kind, self._assignment.device_id)
        world = self._assignment.parallel.world_size
        if world > 1:
            from distensor.transport.c10d import init_process_group

            init_process_group(plane, rank=self._assignment.rank, world_size=world)
        return ShardEngine(
            assignment=self._assignment, plane=plane, device=device, clock=self._clock, pacer=self._pacer
        )

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

        if command is Command.LOAD:
            return self._load(engine, meta, tensors), {}
        engine.require_load()
        self._progress.worked()
        match command:
            case Command.STEP:
                return self._step(engine, sequence, meta, tensors), {}
            case Command.EVALUATE:
                loss, weight = engine.evaluate(sequence, split_batches(meta, tensors))
                return {"loss": _finite(loss), "weight": weight}, {}
            case Command.GRADIENTS:
                batches, wanted = split_batches(meta, tensors), parse_wanted(meta)
                report, named = engine.gradients(sequence, batches, wanted, parse_number(meta, "step"))
                return _report(report), named
            case Command.STATE:
                kept = engine.averages if meta.get("averages") else engine.state
                return {}, kept(parse_wanted(meta))
            case Command.REPLACE:
                engine.replace(tensors)
                return {}, {}
            case Command.SNAPSHOT:
                number, wanted = parse_number(meta, "number"), parse_wanted(meta)
                return take_snapshot(engine, self._snapshots, number, wanted, self._clock), {}
            case Command.RESTORE:
                restore(engine, tensors)
                return {}, {}
            case Command.EXCHANGE:
                engine.exchange()
                return {}, {}
            case _:
                raise ConfigError(f"command {command.value!r} has no place in the sequence of commands")

    def _load(self, engine: ShardEngine, meta: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
        from distensor.node.orders import parse_plan, split_parts

        self._progress.loading()
        programs, weights = split_parts(tensors)
        tensors.clear()  # the engine lets go of each stage's once it has copied them
        plan = parse_plan(meta)
        engine.load(plan, programs, weights)
        self._progress.loaded(engine.own_stages, plan.sync.value, engine.trained_elements)
        return {"stages": engine.own_stages}

    def _step(
        self, engine: ShardEngine, sequence: int, meta: Mapping[str, Any], tensors: dict[str, Tensor]
    ) -> dict[str, Any]:
        from distensor.node.orders import parse_step, split_batches

        order, batches = parse_step(meta), split_batches(meta, tensors)
        report = engine.step(sequence, batches, order.lr, order.pace, order.step, order.total_steps)
        if report.committed:
            self._after_reply = lambda: self._settle(engine, order, report, len(batches))
        figures = None if report.figures is None else asdict(report.figures)
        return {**_report(report), "links": self._progress.links(), "figures": figures}

    def _settle(self, engine: ShardEngine, order: StepOrder, report: StepReport, micro_batches: int) -> None:
        """What all ranks have decided is done here, then claimed."""
        engine.settle()
        if report.noticed is not None and self._replica in report.noticed.dropped:
            self._emitter.event("warning", f"step {order.step}: no finite number here; the others went on without it")
        if micro_batches:
            self._emitter.emit("claim", step=order.step, micro_batches=micro_batches)
        self._progress.step(order, report)

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


def _report(report: StepReport) -> dict[str, Any]:
    return {
        "loss": _finite(report.loss),
        "weight": report.weight,
        "grad_norm": _finite(report.grad_norm),
        "compute_seconds": report.compute_seconds,
        "sync_seconds": report.sync_seconds,
        "wait_seconds": report.wait_seconds,
        "committed": report.committed,
        "noticed": None if report.noticed is None else report.noticed.to_json(),
        "memory": {
            "weights": report.held.weights,
            "optimizer": report.optimizer_bytes,
            "peak": report.held.peak + report.optimizer_bytes,
        },
    }


def _finite(value: float) -> float | None:
    """JSON has no NaN; None says 'not a number' and is never mistaken for a loss."""
    return value if value - value == 0 else None


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
