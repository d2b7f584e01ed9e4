"""What a rank does for each command of its driver, in whatever epoch the command comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from distensor.core import Clock
from distensor.core.digests import programs_digest
from distensor.core.errors import ConfigError, ProgramRejectedError
from distensor.node.faults import FaultPhase
from distensor.node.fetching import Fetcher, Givers
from distensor.node.notebook import Notebook, parse_note
from distensor.node.snapshots import restore, take_snapshot
from distensor.transport.driver import Command

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.node.engine import ShardEngine
    from distensor.node.ipc import Emitter, WorkerAssignment
    from distensor.node.orders import StepOrder, WitnessOrder
    from distensor.node.progress import ProgressReporter
    from distensor.node.replica_meter import ReplicaMeter
    from distensor.node.snapshots import SnapshotServer
    from distensor.node.step_report import StepReport
    from distensor.transport import DataPlane


_OF_THE_EPOCH = frozenset(
    {
        Command.LOAD,
        Command.STATUS,
        Command.SHARE,
        Command.RESOLVE,
        Command.DIGEST,
        Command.TAKE_OVER,
        Command.JOIN,
        Command.PASS,
    }
)


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


class Commands:
    """Carries out commands on the engine of one worker process, and remembers what outlives an epoch: what was loaded,
    and the newest step.

    Args:
        reach: told of each phase of a step, with its number; a fault on purpose may come there.
    """

    def __init__(
        self,
        *,
        assignment: WorkerAssignment,
        emitter: Emitter,
        clock: Clock,
        progress: ProgressReporter,
        meter: ReplicaMeter,
        reach: Callable[[FaultPhase, int], None],
    ) -> None:
        self._assignment = assignment
        self._emitter = emitter
        self._clock = clock
        self._progress = progress
        self._meter = meter
        self._reach = reach
        self._loaded = Loaded()
        self._notebook = Notebook()
        self._in_hand: _StepInHand | None = None
        self._after_reply: Callable[[], None] | None = None
        self._fetcher: Fetcher | None = None

    def enter(self, assignment: WorkerAssignment, plane: DataPlane, snapshots: SnapshotServer) -> None:
        """From now on commands are of the epoch of `assignment`, and come over `plane`."""
        self._assignment, self._plane, self._snapshots = assignment, plane, snapshots
        self._givers, self._fetcher = Givers(plane), Fetcher(plane, self._clock)

    def finish(self) -> None:
        """Do what need not delay the answer to the newest command, once."""
        after, self._after_reply = self._after_reply, None
        if after is not None:
            after()

    def run(
        self,
        engine: ShardEngine,
        command: Command,
        sequence: int,
        meta: Mapping[str, Any],
        tensors: dict[str, Tensor],
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Words and tensors of the answer.

        Raises:
            ProgramRejectedError, MemoryError, TransportError, RuntimeError: what the answer has to say instead.
        """
        from distensor.node.orders import parse_number, parse_wanted, split_batches
        from distensor.node.recovery import finite, report_fields

        self._begin_fetching(command)
        if command in _OF_THE_EPOCH:
            return self._of_the_epoch(engine, command, sequence, meta, tensors)
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

    def _of_the_epoch(
        self,
        engine: ShardEngine,
        command: Command,
        sequence: int,
        meta: Mapping[str, Any],
        tensors: dict[str, Tensor],
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if command is Command.TAKE_OVER:
            return self._hand_over(engine)
        return self._begin_epoch(engine, command, sequence, meta, tensors), {}

    def _begin_fetching(self, command: Command) -> None:
        """What was asked for before is copied now: but for a PASS, during which its sources are at it."""
        if self._fetcher is not None and command is not Command.PASS:
            self._fetcher.begin()

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
            case Command.JOIN:
                return self._join(engine, meta)
            case Command.RESOLVE:
                return self._resolve(engine, meta)
            case Command.PASS:
                return {}
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
        self._loaded, self._notebook = Loaded(meta=meta, programs=programs), Notebook()
        self._progress.loaded(engine.own_stages, plan.sync.value, engine.trained_elements)
        return {"stages": engine.own_stages}

    def _step(
        self, engine: ShardEngine, sequence: int, meta: Mapping[str, Any], tensors: dict[str, Tensor]
    ) -> dict[str, Any]:
        from distensor.node.orders import parse_step, parse_witness, split_batches

        order, note, other = parse_step(meta), parse_note(meta, tensors), parse_witness(meta, tensors)
        batches = split_batches(meta, tensors)
        self._notebook.begin(order.step, note)
        own = self._assignment
        self._in_hand = _StepInHand(order=order, micro_batches=len(batches), epoch=own.epoch, rank=own.rank)
        seen = None if other is None else self._witness(engine, other, sequence, order.step)
        report = engine.step(sequence, batches, order.lr, order.pace, order.step, order.total_steps, order.sketch)
        return {**self._answer(engine, self._in_hand, report), "witnessed": seen}

    def _witness(self, engine: ShardEngine, other: WitnessOrder, sequence: int, step: int) -> dict[str, Any] | None:
        from distensor.node.recovery import sketch_fields

        started = self._clock.monotonic()
        sketch = engine.witness(other, sequence, step)
        seconds = self._clock.monotonic() - started
        return None if sketch is None else {"sketch": sketch_fields(sketch), "seconds": seconds}

    def _answer(self, engine: ShardEngine, hand: _StepInHand, report: StepReport) -> dict[str, Any]:
        if report.committed:
            self._notebook.commit(hand.order.step, report)
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
        if sums is None:
            raise ProgramRejectedError(
                f"step {number} is to be resolved without sums, and this rank has not committed it"
            )
        return self._answer(engine, hand, engine.resolve(number, sums))

    def _share(self, engine: ShardEngine, sequence: int, meta: Mapping[str, Any]) -> dict[str, Any]:
        from distensor.node.sharing import digest, give, parse_share, take

        plane = self._plane
        order, rank = parse_share(meta, self._assignment.parallel.world_size), self._assignment.rank
        if rank in order.joiners:
            self._progress.loading()
            plan, programs = take(engine, plane, order, sequence, self._assignment.memory_limit)
            self._loaded, self._notebook = Loaded(meta=plan, programs=programs), Notebook()
            self._progress.loaded(engine.own_stages, str(plan.get("sync")), engine.trained_elements)
        elif rank in order.sources:
            give(engine, self._loaded.meta, self._loaded.programs, plane, rank, order, sequence)
        return {"digest": digest(engine)} if rank in (*order.joiners, *order.sources) else {}

    def _hand_over(self, engine: ShardEngine) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """To a driver that goes on in the place of another: how far this rank got, and what the other one left here."""
        from distensor.node.recovery import status_of

        done, hand = engine.decided, self._in_hand
        step = 0 if done is None else done.number
        report = None if done is None else done.report
        if report is not None and hand is not None and hand.order.step == step and hand.micro_batches:
            self._answer(engine, hand, report)  # the other driver did not hear of it: it is settled and claimed now
        words, tensors = self._notebook.answer(step)
        return {
            **status_of(engine),
            **words,
            "load": dict(self._loaded.meta),
            "programs": programs_digest(self._loaded.programs),
        }, tensors

    def _join(self, engine: ShardEngine, meta: Mapping[str, Any]) -> dict[str, Any]:
        """A step further on the way of those that take part without having all weights yet."""
        from distensor.node.sharing import parse_join

        engine.require_load()
        fetcher = self._fetcher
        assert fetcher is not None, "an epoch was entered"
        order = parse_join(meta, self._assignment.parallel.world_size)
        for offer in order.offers:
            self._givers.offer(engine, offer.joiner, offer.number, offer.keys)
        fetcher.admit(engine)
        number: int = 0
        wanted: dict[int, list[str]] = {}
        if order.sources and engine.filling is not None and not fetcher.busy:
            number, wanted = fetcher.order(engine, order.sources)
        left = 0 if engine.filling is None else engine.filling.left
        return {"left": left, "number": number, "wanted": {str(source): keys for source, keys in wanted.items()}}

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
