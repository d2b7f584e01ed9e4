"""A placed job whose workers answer what a test tells them to: no lie becomes a result."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from distensor.core import SYSTEM_CLOCK, Epoch, JobId, ParallelConfig
from distensor.core.errors import CaptureError, WorkerFailedError
from distensor.nn import DistributedModel
from distensor.program import capture
from distensor.training.job import TrainingJob
from distensor.training.options import TrainerOptions
from distensor.training.pieces import MeshPieces
from distensor.training.replies import Reply
from distensor.transport.driver import Command

STEP: dict[str, Any] = {
    "loss": 1.5, "weight": 4.0, "grad_norm": 0.5, "committed": True,
    "compute_seconds": 0.1, "sync_seconds": 0.1, "wait_seconds": 0.1, "links": [{"peer": -1, "sent": 9, "received": 9}],
    "memory": {"weights": 8, "optimizer": 16, "peak": 32},
}  # fmt: skip


class Connection:
    """Two ranks that give prepared answers."""

    job_id, epoch, ranks, restarts = JobId("j"), Epoch(1), range(2), 0
    topology = SimpleNamespace(members=(None, None))

    def __init__(self) -> None:
        self.meta: list[dict[str, Any]] = [dict(STEP), dict(STEP)]
        self.tensors: list[dict[str, Tensor]] = [{}, {}]
        self.asked: list[tuple[Command, Any, Any]] = []

    def stats(self) -> Mapping[int, Any]:
        return {}

    def bytes_moved(self) -> tuple[int, int]:
        return 0, 0

    def command(
        self, command: Command, meta: Any, tensors: Any = None, extra: Any = None, most_bytes: Any = None
    ) -> list[Reply]:
        self.asked.append((command, extra, most_bytes))
        return [
            Reply(rank=rank, who=f"rank {rank} on node 'n{rank}'", meta=self.meta[rank], tensors=self.tensors[rank])
            for rank in self.ranks
        ]

    def end(self, state: Any, reason: str = "") -> None: ...


class Receipts:
    def __init__(self) -> None:
        self.units: list[Any] = []
        self.told: list[Any] = []

    def add(self, units: Sequence[Any]) -> None:
        self.units.extend(units)

    def note(self, *told: Any) -> None:
        self.told.append(told)

    def object_to(self, unit: Any) -> None:
        raise AssertionError(f"{unit}: nothing is checked here")

    def close(self, timeout: float) -> int:
        return len(self.units)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("shift", torch.arange(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) + self.shift).square().mean()  # type: ignore[no-any-return]


@pytest.fixture
def connection() -> Connection:
    return Connection()


@pytest.fixture
def job(connection: Connection) -> TrainingJob:
    model = DistributedModel(Model())
    options = TrainerOptions.of(
        model=model, parallel=ParallelConfig(data_parallel=2), schedule="1f1b", micro_batches=None, sync="allreduce",
        clip_norm=None, norm_type=2.0, precision="fp32", recompute="none",
        accumulate=1, context_attention="all_gather", checkpoint=None, backend="tls", lr_schedule=None, seed=0,
        elastic=False,
    )  # fmt: skip
    captured = capture(model.module, torch.ones(4, 3), loss_weight="rows")
    pieces = MeshPieces.of(captured, model, options)
    return TrainingJob(
        connection=cast("Any", connection),
        model=model,
        pieces=pieces,
        options=options,
        receipts=cast("Any", Receipts()),
        clock=SYSTEM_CLOCK,
        note_measures=lambda _: pytest.fail("one rank a pipeline has nothing to measure"),
    )


BATCH = torch.ones(4, 3)


def test_a_step_is_a_result_and_its_receipts(job: TrainingJob, caplog: pytest.LogCaptureFixture) -> None:
    result, committed = job.step(1, [BATCH], 0.1, None)
    assert committed
    assert (result.loss, result.tokens, result.grad_norm) == (1.5, 4, 0.5)
    assert job.units_done == 2
    ((_, epoch, told),) = cast("Any", job._receipts).told
    assert (epoch, told.step, told.loss, told.tokens, told.seconds) == (1, 1, 1.5, 4, result.seconds)
    assert [memory.peak for memory in result.memory] == [32, 32]
    assert job.bytes_per_link() == {(0, -1): 9, (1, -1): 9}
    with caplog.at_level(logging.WARNING):
        job.end(cast("Any", None))
    assert "receipts of 2 finished units" in caplog.text, "what the hub has not taken is said"


def test_the_rank_that_computes_longest_is_named(job: TrainingJob, connection: Connection) -> None:
    """Five times the others: it is the bottleneck, and the step says so by name."""
    connection.meta[1]["compute_seconds"] = 0.5
    result, _ = job.step(1, [BATCH], 0.1, None)
    assert (result.slowest, result.compute_seconds) == ("rank 1 on node 'n1'", 0.5)


def test_a_step_that_nobody_applied_is_not_paid(job: TrainingJob, connection: Connection) -> None:
    for meta in connection.meta:
        meta.update(committed=False, loss=None, grad_norm=None)
    _, committed = job.step(1, [BATCH], 0.1, None)
    assert not committed
    assert cast("Any", job._receipts).told == []
    assert job.units_done == 0


@pytest.mark.parametrize(
    "change",
    [{"committed": False}, {"loss": 1.25}, {"grad_norm": 0.75}, {"weight": 5.0}, {"loss": "low"}, {"links": 3}],
)
def test_ranks_that_differ_or_lie_are_no_result(
    job: TrainingJob, connection: Connection, change: dict[str, Any]
) -> None:
    connection.meta[1].update(change)
    with pytest.raises(WorkerFailedError, match="rank 1 on node 'n1'"):
        job.step(1, [BATCH], 0.1, None)
    assert job.units_done == 0


GRADIENTS = {"0/layer.weight": torch.ones(2, 3), "0/layer.bias": torch.ones(2)}
STATE = {**GRADIENTS, "0/shift": torch.zeros(2)}


def test_gradients_come_from_the_first_replica_alone(job: TrainingJob, connection: Connection) -> None:
    connection.tensors[0] = GRADIENTS
    loss, gradients = job.gradients([BATCH])
    assert loss == 1.5
    assert sorted(gradients) == ["layer.bias", "layer.weight"]
    ((command, extra, most),) = connection.asked
    assert command is Command.GRADIENTS
    assert extra[0]["wanted"] == sorted(GRADIENTS, reverse=True)
    assert "wanted" not in extra[1]
    assert most.keys() == {0}


@pytest.mark.parametrize(
    ("rank", "change"),
    [
        (0, {"0/layer.weight": torch.ones(1, 3)}),
        (0, {"0/layer.bias": torch.ones(2, dtype=torch.float64)}),
        (0, {"0/other": torch.ones(1)}),
        (1, {"0/layer.weight": torch.ones(2, 3)}),
    ],
)
def test_no_foreign_tensor_reaches_the_module(
    job: TrainingJob, connection: Connection, rank: int, change: dict[str, Tensor]
) -> None:
    connection.tensors[0] = dict(STATE)
    connection.tensors[rank].update(change)
    module = job._model.module
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(WorkerFailedError, match=f"rank {rank} on node"):
        job.copy_into_module()
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_a_missing_tensor_is_not_the_old_one(job: TrainingJob, connection: Connection) -> None:
    connection.tensors[0] = {name: tensor for name, tensor in STATE.items() if name != "0/layer.bias"}
    with pytest.raises(WorkerFailedError, match=r"left out .*layer\.bias"):
        job.state()


def test_the_state_is_copied_into_the_module(job: TrainingJob, connection: Connection) -> None:
    connection.tensors[0] = {name: tensor.clone().requires_grad_() for name, tensor in STATE.items()}
    assert not any(tensor.requires_grad for tensor in job.state().values())
    job.copy_into_module()
    assert torch.equal(job._model.module.state_dict()["layer.weight"], torch.ones(2, 3))


def test_the_average_is_of_the_trained_weights_alone(job: TrainingJob, connection: Connection) -> None:
    """The second question is for everything else; what a worker sends beyond the average is refused."""
    averages = {"0/layer.weight": torch.full((2, 3), 5.0), "0/layer.bias": torch.full((2,), 6.0)}
    weights = {**STATE}

    def answer(command: Command, meta: Any, tensors: Any = None, extra: Any = None, most_bytes: Any = None) -> Any:
        connection.tensors[0] = averages if meta.get("averages") else weights
        return Connection.command(connection, command, meta, tensors, extra, most_bytes)

    connection.command = answer  # type: ignore[method-assign]
    found = job.averages()
    assert found["layer.weight"].unique().tolist() == [5.0]
    assert found["layer.bias"].unique().tolist() == [6.0]
    assert torch.equal(found["shift"], STATE["0/shift"])
    averages["0/shift"] = torch.zeros(2)
    with pytest.raises(WorkerFailedError, match="0/shift"):
        job.averages()


def test_a_loss_that_two_ranks_see_differently_is_none(job: TrainingJob, connection: Connection) -> None:
    assert job.evaluate(BATCH) == (1.5, 4.0)
    connection.meta[1]["loss"] = 1.4
    with pytest.raises(WorkerFailedError, match="rank 1"):
        job.evaluate(BATCH)


def test_a_parameter_that_changed_its_dtype_is_named(job: TrainingJob, connection: Connection) -> None:
    job._model.module.double()
    with pytest.raises(CaptureError, match=r"'layer\.weight' is torch\.float64 .* was float32"):
        job.push()
    assert not connection.asked, "nothing was sent"
