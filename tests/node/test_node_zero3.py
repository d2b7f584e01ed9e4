"""Engines of several ranks in one process with their weights cut: what one process of plain PyTorch gives."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pytest
import torch
from node_kit import Chain, batch_of, on_all, pieces_of, planes_of
from torch import Tensor, nn

from distensor.core import SYSTEM_CLOCK, DeviceId, Epoch, JobId, ParallelConfig, Rank, RankLayout
from distensor.core.compute import Recompute
from distensor.core.control import DeviceKind
from distensor.core.errors import ProgramRejectedError
from distensor.core.schedules import Schedule, stages_of_rank
from distensor.node.engine import ShardEngine, StepReport
from distensor.node.groups import make_groups
from distensor.node.ipc import WorkerAssignment
from distensor.node.orders import JobPlan, TiedWeight
from distensor.optim import OptimizerSpec
from distensor.optim.clipping import NormType
from distensor.program import Cut
from distensor.sync import Sync
from distensor.transport import DataPlane
from distensor.transport.group import TransportGroup

RANKS = 4
T = TypeVar("T")
_NAMES = itertools.count()


@pytest.fixture(scope="module")
def planes() -> Iterator[dict[int, DataPlane]]:
    with planes_of(RANKS) as opened:
        yield opened


class Mesh:
    """An engine for each rank, over groups of their own."""

    def __init__(self, planes: Mapping[int, DataPlane], parallel: ParallelConfig, plan: JobPlan, pieces: Cut) -> None:
        self.layout = RankLayout(parallel)
        self._planes = planes
        self._plan = plan
        self._pieces = pieces
        self._run = next(_NAMES)
        self._sequence = 1000 * self._run
        self._made: list[TransportGroup] = []
        self.engines = self.on_all(self._engine)

    def on_all(self, function: Callable[[int], T]) -> list[T]:
        return on_all([lambda rank=rank: function(rank) for rank in range(self.layout.config.world_size)])  # type: ignore[misc]

    def _engine(self, rank: int) -> ShardEngine:
        count = itertools.count()

        def new_group(ranks: list[int]) -> TransportGroup | None:
            name = f"{self._run}/{next(count)}"
            if rank not in ranks:
                return None
            group = TransportGroup(
                self._planes[rank], ranks, ranks.index(rank), name=name, timeout=20.0, clock=SYSTEM_CLOCK
            )
            self._made.append(group)
            return group

        assignment = WorkerAssignment(
            job_id=JobId("j_0123456789abcdef"),
            job_name="test",
            epoch=Epoch(1),
            rank=Rank(rank),
            parallel=self.layout.config,
            device_kind=DeviceKind.CPU,
            device_id=DeviceId("cpu"),
            listen_host="127.0.0.1",
            memory_limit=1 << 30,
            threads=1,
        )
        engine = ShardEngine(
            assignment=assignment,
            plane=self._planes[rank],
            device=torch.device("cpu"),
            clock=SYSTEM_CLOCK,
            groups=make_groups(self.layout, rank, new_group),
        )
        own = stages_of_rank(
            self._plan.schedule,
            self.layout.coordinates(rank).pp,
            ranks=self.layout.config.pipeline_parallel,
            stages=self._plan.stages,
        )
        programs = {stage: self._pieces.programs[stage].to_json() for stage in own}
        weights = {stage: dict(self._pieces.weights(stage)) for stage in own}
        engine.load(self._plan, programs, weights)
        assert weights == {}, "nothing of what was loaded is held twice"
        return engine

    def batches(self, rank: int, parts: Sequence[Sequence[Any]]) -> Sequence[Any]:
        return parts[self.layout.coordinates(rank).dp]

    def call(self, function: Callable[[ShardEngine, int, Sequence[Any]], T], parts: Sequence[Sequence[Any]]) -> list[T]:
        """`function` of engine, sequence and own micro-batches on every rank at once."""
        self._sequence += 1
        sequence = self._sequence
        return self.on_all(lambda rank: function(self.engines[rank], sequence, self.batches(rank, parts)))

    def step(self, parts: Sequence[Sequence[Any]], lr: float = 0.05) -> list[StepReport]:
        return self.call(lambda engine, sequence, own: engine.step(sequence, own, lr), parts)

    def state(self) -> dict[str, Tensor]:
        """Of the first replica, by name."""
        return _merged(self.on_all(lambda rank: self.engines[rank].state()))

    def close(self) -> None:
        for group in self._made:
            group.shutdown()


def _merged(found: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    merged: dict[str, Tensor] = {}
    for own in found:
        for key, tensor in own.items():
            merged.setdefault(key.partition("/")[2], tensor.detach().clone())
    return merged


def plan_of(pieces: Cut, **changes: Any) -> JobPlan:
    plan = JobPlan(
        schedule=Schedule.ONE_F_ONE_B,
        stages=len(pieces.programs),
        optimizer=OptimizerSpec(name="adamw", lr=0.05, options={"eps": 1e-4, "weight_decay": 0.1}, ema=0.5),
        clip_norm=0.1,
        norm_type=NormType.TWO,
        seed=0,
        tied=tuple(TiedWeight(holders=tuple((stage, group.name) for stage in group.stages)) for group in pieces.tied),
        sharded=frozenset(),
        recompute=Recompute.NONE,
        sync=Sync.ZERO3,
    )
    return dataclasses.replace(plan, **changes)


def module_of(*, frozen: bool = False) -> Chain:
    module = Chain()
    for parameter in module.layers[0].parameters():
        parameter.requires_grad_(not frozen)
    return module


PARTS = [[batch_of(2), batch_of(3, ignored=1)], [batch_of(4)], [], [batch_of(1)]]
"""Replicas with two micro-batches, one, and none at all."""
CASES = [
    (ParallelConfig(data_parallel=2, pipeline_parallel=2), 2, Schedule.ONE_F_ONE_B),
    (ParallelConfig(data_parallel=2, pipeline_parallel=2, order="dp-pp-tp-cp"), 4, Schedule.LOOPED_BFS),
    (ParallelConfig(data_parallel=3), 4, Schedule.GPIPE),
    (ParallelConfig(data_parallel=4), 1, Schedule.ONE_F_ONE_B),
]


def weighted_mean(module: nn.Module, parts: Sequence[Sequence[Any]]) -> Tensor:
    batches = [batch for own in parts for batch in own]
    weights = [int((batch["labels"] != -100).sum()) for batch in batches]
    return torch.stack([w * module(**batch) for w, batch in zip(weights, batches, strict=True)]).sum() / sum(weights)


def relative(found: Tensor, expected: Tensor) -> float:
    return float(torch.linalg.vector_norm(found - expected) / torch.linalg.vector_norm(expected))


@pytest.mark.parametrize(("parallel", "stages", "schedule"), CASES)
def test_steps_equal_one_process(
    planes: dict[int, DataPlane], parallel: ParallelConfig, stages: int, schedule: Schedule
) -> None:
    """Loss, norm before clipping, weights, average and evaluation; replicas have unequal numbers of micro-batches."""
    module, parts = module_of(frozen=True), PARTS[: parallel.data_parallel]
    pieces = pieces_of(module, stages)
    mesh = Mesh(planes, parallel, plan_of(pieces, schedule=schedule), pieces)
    optimizer = torch.optim.AdamW(
        [p for p in module.parameters() if p.requires_grad], lr=0.05, eps=1e-4, weight_decay=0.1
    )
    average = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
    for _ in range(3):
        reports = mesh.step(parts)
        optimizer.zero_grad()
        loss = weighted_mean(module, parts)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        for name, value in average.items():
            value.lerp_(dict(module.named_parameters())[name].detach(), 0.5)
        assert {(report.loss, report.grad_norm, report.committed) for report in reports} == {
            (reports[0].loss, reports[0].grad_norm, True)
        }
        assert reports[0].loss == pytest.approx(loss.item(), rel=1e-6)
        assert reports[0].grad_norm == pytest.approx(norm.item(), rel=1e-6)
    state = mesh.state()
    for name, parameter in module.named_parameters():
        assert relative(state[name], parameter.detach()) <= 1e-6, name
    found = _merged(mesh.on_all(lambda rank: _averages(mesh.engines[rank])))
    for name, value in average.items():
        assert relative(found[name], value) <= 1e-6, name
    losses = mesh.call(lambda engine, sequence, own: engine.evaluate(sequence, own), parts)
    assert losses[0][0] == pytest.approx(weighted_mean(module, parts).item(), rel=1e-6)
    assert len(set(losses)) == 1
    mesh.close()


def _averages(engine: ShardEngine) -> dict[str, Tensor]:
    return engine.averages([key for key, fields in engine.optimizer_state().items() if fields])


@pytest.mark.parametrize(("parallel", "stages", "schedule"), CASES)
def test_gradients_come_whole_and_change_nothing(
    planes: dict[int, DataPlane], parallel: ParallelConfig, stages: int, schedule: Schedule
) -> None:
    module, parts = module_of(), PARTS[: parallel.data_parallel]
    pieces = pieces_of(module, stages)
    mesh = Mesh(planes, parallel, plan_of(pieces, schedule=schedule), pieces)

    def gradients(engine: ShardEngine, sequence: int, own: Sequence[Any]) -> dict[str, Tensor]:
        return engine.gradients(sequence, own, list(engine.optimizer_state()))[1]

    found = _merged(mesh.call(gradients, parts))
    weighted_mean(module, parts).backward()  # type: ignore[no-untyped-call]
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        assert relative(found[name], parameter.grad) <= 1e-6, name
        assert torch.equal(mesh.state()[name], parameter)
    mesh.close()


def test_weights_are_replaced_in_parts(planes: dict[int, DataPlane]) -> None:
    pieces = pieces_of(module_of(), 2)
    mesh = Mesh(planes, ParallelConfig(data_parallel=2, pipeline_parallel=2), plan_of(pieces), pieces)
    new = {name: torch.randn_like(tensor) for name, tensor in mesh.state().items()}
    mesh.on_all(lambda rank: _replace(mesh.engines[rank], new))
    assert all(torch.equal(tensor, new[name]) for name, tensor in mesh.state().items())
    with pytest.raises(ProgramRejectedError, match="embed"):
        mesh.engines[0].replace({"0/embed.weight": torch.ones(1, 6)})
    mesh.close()


def _replace(engine: ShardEngine, new: Mapping[str, Tensor]) -> None:
    engine.replace({key: new[key.partition("/")[2]] for key in engine.state()})


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_optimizer_state_moves_to_another_number_of_ranks(planes: dict[int, DataPlane], ranks: int) -> None:
    """CKP-11: cut over two ranks, it goes on over one, three or four as if nothing had happened."""
    module, parts = module_of(), PARTS[:2]
    pieces = pieces_of(module, 2)
    first = Mesh(planes, ParallelConfig(data_parallel=2), plan_of(pieces), pieces)
    for _ in range(2):
        first.step(parts)
    weights = first.on_all(lambda rank: first.engines[rank].state())[0]
    state = first.on_all(lambda rank: first.engines[rank].optimizer_state())[0]
    second = Mesh(planes, ParallelConfig(data_parallel=ranks), plan_of(pieces), pieces)
    second.on_all(lambda rank: second.engines[rank].replace(weights))
    second.on_all(lambda rank: second.engines[rank].load_optimizer_state(state))
    gathered = second.on_all(lambda rank: second.engines[rank].optimizer_state())[0]
    for key, fields in state.items():
        assert all(torch.equal(gathered[key][field], value) for field, value in fields.items())
    spread = [[batch] for own in parts for batch in own][:ranks]
    spread = [[batch for own in parts for batch in own]] if ranks == 1 else [*spread, *[[]] * (ranks - len(spread))]
    ours, theirs = second.step(spread)[0], first.step(parts)[0]
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)
    after, expected = second.state(), first.state()
    assert all(relative(after[name], tensor) <= 1e-6 for name, tensor in expected.items())
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: {**state, "9/x": {}}, "9/x"),
        (lambda state: {**state, "0/embed.weight": {"exp_avg": torch.zeros(3)}}, r"exp_avg is \(3,\); expected \(11"),
        (lambda state: {**state, "0/embed.weight": {"step": torch.zeros(2)}}, r"step is \(2,\)"),
        (lambda state: {**state, "0/embed.weight": {"step": torch.zeros(())}}, r"embed.*has \['step'\]"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(planes: dict[int, DataPlane], change: Any, says: str) -> None:
    pieces = pieces_of(module_of(), 1)
    mesh = Mesh(planes, ParallelConfig(data_parallel=2), plan_of(pieces), pieces)
    mesh.step(PARTS[:2])
    state = mesh.on_all(lambda rank: mesh.engines[rank].optimizer_state())[0]
    with pytest.raises(ProgramRejectedError, match=says):
        mesh.engines[0].load_optimizer_state(change(state))
    mesh.close()


def test_an_optimizer_that_needs_whole_weights_is_refused(planes: dict[int, DataPlane]) -> None:
    pieces = pieces_of(module_of(), 1)
    plan = plan_of(pieces, optimizer=OptimizerSpec(name="adafactor", lr=0.1))
    with pytest.raises(ProgramRejectedError, match=r"adafactor.*slice"):
        Mesh(planes, ParallelConfig(data_parallel=2), plan, pieces)
    plan = plan_of(pieces, optimizer=OptimizerSpec(name="adafactor", lr=0.1), sync=Sync.ALLREDUCE)
    Mesh(planes, ParallelConfig(data_parallel=2), plan, pieces).close()
    plan = dataclasses.replace(plan, sharded=frozenset(["embed.weight"]))
    with pytest.raises(ProgramRejectedError, match=r"adafactor.*tensor"):
        Mesh(planes, ParallelConfig(), plan, pieces)
