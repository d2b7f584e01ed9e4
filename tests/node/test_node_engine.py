"""One rank's engine without a cluster: plans that do not fit are refused, steps are applied or not."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from node_kit import Chain, batch_of, pieces_of, planes_of

from distensor.core import SYSTEM_CLOCK, DeviceId, Epoch, JobId, ParallelConfig, Rank
from distensor.core.compute import Recompute
from distensor.core.control import DeviceKind
from distensor.core.errors import ProgramRejectedError
from distensor.core.schedules import Schedule
from distensor.node.engine import ShardEngine, StepReport
from distensor.node.ipc import Emitter, WorkerAssignment
from distensor.node.orders import JobPlan, Pace, StepOrder, TiedWeight
from distensor.node.progress import ProgressReporter
from distensor.node.snapshots import restore
from distensor.optim import OptimizerSpec
from distensor.optim.clipping import NormType
from distensor.optim.sparse_spec import SparseRule, SparseSpec
from distensor.program import Cut
from distensor.sync import Held
from distensor.testing.clock import FakeClock

PLAN = JobPlan(
    schedule=Schedule.GPIPE,
    stages=2,
    optimizer=OptimizerSpec(name="sgd", lr=0.1),
    clip_norm=None,
    norm_type=NormType.TWO,
    seed=0,
    tied=(TiedWeight(holders=((0, "embed.weight"), (1, "embed.weight"))),),
    sharded=frozenset(),
    recompute=Recompute.NONE,
)
ASSIGNMENT = WorkerAssignment(
    job_id=JobId("j_0123456789abcdef"),
    job_name="test",
    epoch=Epoch(1),
    rank=Rank(0),
    parallel=ParallelConfig(),
    device_kind=DeviceKind.CPU,
    device_id=DeviceId("cpu"),
    listen_host="127.0.0.1",
    memory_limit=1 << 30,
    threads=1,
)


@pytest.fixture(scope="module")
def engine() -> Iterator[ShardEngine]:
    """One rank that holds both stages; two planes only because a mesh of one has nobody to meet."""
    with planes_of(2) as planes:
        yield ShardEngine(assignment=ASSIGNMENT, plane=planes[0], device=torch.device("cpu"), clock=SYSTEM_CLOCK)


@pytest.fixture
def module() -> Chain:
    return Chain()


def load(engine: ShardEngine, pieces: Cut, **changes: Any) -> None:
    programs = {stage: program.to_json() for stage, program in enumerate(pieces.programs)}
    weights = {stage: pieces.weights(stage) for stage in programs}
    engine.load(dataclasses.replace(PLAN, **changes), programs, weights)


@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_a_step_is_torchs_step(engine: ShardEngine, module: Chain, clip_norm: float | None) -> None:
    load(engine, pieces_of(module, 2), clip_norm=clip_norm)
    batches = [batch_of(2), batch_of(3, ignored=1)]
    weights = [int((batch["labels"] != -100).sum()) for batch in batches]
    report = engine.step(1, batches, 0.5)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    loss = torch.stack([w * module(**batch) for w, batch in zip(weights, batches, strict=True)]).sum() / sum(weights)
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), math.inf if clip_norm is None else clip_norm)
    optimizer.step()
    assert report.committed
    whole = sum(parameter.nbytes for parameter in module.parameters()) + module.embed.weight.nbytes
    assert (report.held, report.optimizer_bytes) == (Held(weights=whole, peak=2 * whole), 0), "both tied copies count"
    assert report.loss == pytest.approx(loss.item(), rel=1e-6)
    assert report.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    state = engine.state()
    for name, parameter in module.named_parameters():
        found = state.get(f"0/{name}", state.get(f"1/{name}"))
        assert found is not None
        torch.testing.assert_close(found, parameter.detach(), rtol=1e-5, atol=1e-7)
    assert torch.equal(state["0/embed.weight"], state["1/embed.weight"]), "copies of a tied weight stay equal"


def test_a_batch_without_an_element_updates_nothing(engine: ShardEngine, module: Chain) -> None:
    load(engine, pieces_of(module, 2))
    before = {name: tensor.clone() for name, tensor in engine.state().items()}
    report = engine.step(2, [batch_of(2, ignored=5)], 0.5)
    assert not report.committed
    assert math.isnan(report.loss)
    assert report.weight == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.state().items())


def test_gradients_and_evaluation_update_nothing(engine: ShardEngine, module: Chain) -> None:
    load(engine, pieces_of(module, 2))
    before = {name: tensor.clone() for name, tensor in engine.state().items()}
    report, gradients = engine.gradients(3, [batch_of(2)], ["0/embed.weight", "1/layers.1.bias"])
    loss, weight = engine.evaluate(4, [batch_of(2)])
    assert loss == pytest.approx(report.loss, rel=1e-6)
    assert weight == report.weight == 10
    assert not report.committed
    assert list(gradients) == ["0/embed.weight", "1/layers.1.bias"]
    assert all(gradient.any() for gradient in gradients.values())
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.state().items())


def raw(engine: ShardEngine) -> torch.Tensor:
    """A weight as it lies in memory, past everything that would settle."""
    return engine._runners[0].parameters["embed.weight"].detach().clone()


def test_an_update_is_owed_until_somebody_looks(engine: ShardEngine, module: Chain) -> None:
    """The first is carried out at once, for its memory; the others when the answer is out, or before the next look."""
    load(engine, pieces_of(module, 2), optimizer=OptimizerSpec(name="adamw", lr=0.1))
    before = raw(engine)
    assert engine.step(1, [batch_of(2)], 0.1).optimizer_bytes > 0
    first = raw(engine)
    assert not torch.equal(before, first)
    assert engine.step(2, [batch_of(2)], 0.1).committed
    assert torch.equal(raw(engine), first)
    engine.settle()
    second = raw(engine)
    assert not torch.equal(second, first)
    engine.settle()
    assert torch.equal(raw(engine), second), "once is enough"
    engine.step(3, [batch_of(2)], 0.1)
    assert not torch.equal(engine.state()["0/embed.weight"], second), "who looks sees the weights after the step"
    straight = Chain()
    load(engine, pieces_of(straight, 2), optimizer=OptimizerSpec(name="adamw", lr=0.1))
    for number in range(3):
        engine.step(10 + number, [batch_of(2)], 0.1)
        engine.settle()
    settled = raw(engine)
    load(engine, pieces_of(Chain(), 2), optimizer=OptimizerSpec(name="adamw", lr=0.1))
    for number in range(3):
        engine.step(20 + number, [batch_of(2)], 0.1)
    assert torch.equal(engine.state()["0/embed.weight"], settled), "the next step looks too"


def test_an_update_that_needs_other_ranks_is_never_owed(engine: ShardEngine, module: Chain) -> None:
    """A rank that is lost meanwhile must be the answer to this step, not a surprise after it."""
    sparse = SparseSpec(rule=SparseRule.DISTRO, k=4, chunk=16)
    load(engine, pieces_of(module, 2), optimizer=OptimizerSpec(name="adamw", lr=0.1, sparse=sparse))
    engine.step(40, [batch_of(2)], 0.1)
    first = raw(engine)
    engine.step(41, [batch_of(2)], 0.1)
    assert not torch.equal(raw(engine), first)


def test_a_load_forgets_what_is_owed(engine: ShardEngine, module: Chain) -> None:
    load(engine, pieces_of(module, 2))
    for number in (30, 31):
        engine.step(number, [batch_of(2)], 0.1)
    load(engine, pieces_of(module, 2))
    assert torch.equal(engine.state()["0/embed.weight"], module.embed.weight)


def test_weights_are_replaced_or_refused(engine: ShardEngine, module: Chain) -> None:
    load(engine, pieces_of(module, 2))
    engine.replace({"0/embed.weight": torch.ones(11, 6)})
    assert torch.equal(engine.state()["0/embed.weight"], torch.ones(11, 6))
    for name, tensor in (("0/nothing", torch.ones(1)), ("0/embed.weight", torch.ones(1, 6))):
        with pytest.raises(ProgramRejectedError, match=name):
            engine.replace({name: tensor})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stages": 1}, "given stages"),
        ({"stages": 1 << 50}, "given stages"),
        ({"stages": 0}, "0 stages"),
        ({"tied": (TiedWeight(holders=((0, "nothing"), (1, "head.weight"))),)}, "stage 0 holds no such"),
        ({"tied": (TiedWeight(holders=((0, "embed.weight"), (9, "head.weight"))),)}, "stage 9 holds no such"),
        ({"tied": (TiedWeight(holders=((0, "embed.weight"), (0, "layers.0.weight"))),)}, "differ in shape"),
        ({"optimizer": OptimizerSpec(name="sgd", lr=0.1, options={"nesterov": True})}, "nesterov|Nesterov"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_and_nothing_stays(
    engine: ShardEngine, module: Chain, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ProgramRejectedError, match=says):
        load(engine, pieces_of(module, 2), **changes)


def test_stages_of_another_rank_are_refused(engine: ShardEngine, module: Chain) -> None:
    pieces = pieces_of(module, 2)
    with pytest.raises(ProgramRejectedError, match=r"given stages \[1\]"):
        engine.load(PLAN, {1: pieces.programs[1].to_json()}, {1: pieces.weights(1)})


def test_a_warm_up_of_another_mesh_is_refused(engine: ShardEngine, module: Chain) -> None:
    load(engine, pieces_of(module, 2), schedule=Schedule.ONE_F_ONE_B)
    with pytest.raises(ProgramRejectedError, match=r"warm_up=\[2, 0\]: expected 1 numbers"):
        engine.step(5, [batch_of(2)], 0.1, Pace(warm_up=(2, 0)))


REPORT = StepReport(
    loss=1.5, weight=4.0, grad_norm=1.0, compute_seconds=0.1, sync_seconds=0.2, wait_seconds=0.3, committed=True,
    held=Held(weights=8, peak=16), optimizer_bytes=4, scale=0.25,
)  # fmt: skip


class TestProgress:
    """At most two lines a second, and the last step at once."""

    def lines(self, stream: io.StringIO) -> list[dict[str, Any]]:
        return [json.loads(line) for line in stream.getvalue().splitlines()]

    def test_steps_are_thinned_out_and_the_last_is_sent(self) -> None:
        stream, clock = io.StringIO(), FakeClock()
        progress = ProgressReporter(emitter=Emitter(stream), clock=clock)
        for step in range(1, 11):
            progress.step(StepOrder(step=step, lr=0.1, total_steps=10, tokens_per_second=7.0), REPORT)
            clock.advance(0.1)
        assert [line["step"] for line in self.lines(stream)] == [1, 6, 10]

    def test_a_line_holds_the_figures(self) -> None:
        stream = io.StringIO()
        progress = ProgressReporter(emitter=Emitter(stream), clock=FakeClock())
        progress.loading()
        progress.loaded([0, 2])
        progress.step(StepOrder(step=1, lr=0.1, total_steps=1, tokens_per_second=None), REPORT)
        loading, loaded, step = self.lines(stream)
        assert (loading["state"], loaded["state"], step["state"]) == ("loading", "waiting", "training")
        assert loaded["stages"] == [0, 2]
        assert (step["loss"], step["tokens_per_second"], step["wait_s"], step["links"]) == (1.5, None, 0.3, [])
        assert step["rss"] > 0


def flat_state(engine: ShardEngine) -> dict[str, torch.Tensor]:
    state = engine.optimizer_state()
    return {f"{key}/{field}": value.clone() for key, fields in state.items() for field, value in fields.items()}


def test_an_engine_gives_what_it_keeps_and_takes_an_optimizer_state_back(engine: ShardEngine) -> None:
    pieces = pieces_of(Chain(), 2)
    load(engine, pieces, optimizer=OptimizerSpec(name="adamw", lr=0.1))
    engine.step(1, [batch_of(3)], 0.1)
    weights, state = engine.kept(["0/embed.weight"])
    assert list(weights) == list(state) == ["0/embed.weight"]
    assert sorted(state["0/embed.weight"]) == ["exp_avg", "exp_avg_sq", "step"]
    saved = flat_state(engine)
    engine.step(1, [batch_of(3)], 0.1)
    restore(engine, saved)
    assert all(torch.equal(flat_state(engine)[key], value) for key, value in saved.items())
    restore(engine, {})
    assert not any(engine.optimizer_state().values()), "of what nothing is given, it starts anew"
    for wrong in ({"0/nobody/step": torch.tensor(1.0)}, {"0/embed.weight/step": torch.tensor(1.0)}):
        with pytest.raises(ProgramRejectedError, match="optimizer state"):
            restore(engine, wrong)
    with pytest.raises(ProgramRejectedError, match="asked for '0/nobody'"):
        engine.kept(["0/nobody"])
