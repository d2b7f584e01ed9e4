"""A worker answers before it carries out what it has decided; what goes wrong then is the next answer."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from node_kit import planes_of
from test_node_engine import ASSIGNMENT, REPORT

from distensor.core import DRIVER_RANK, SYSTEM_CLOCK
from distensor.core.errors import DistensorError
from distensor.node.engine import ShardEngine
from distensor.node.ipc import Emitter, Mailbox
from distensor.node.runtime import WorkerRuntime
from distensor.transport import Channel, DataPlane, Timeouts
from distensor.transport.driver import receive_named


class Engine:
    """Decides a step, and does something when it is to be carried out."""

    def __init__(self, settle: Callable[[], None]) -> None:
        self.settle = settle

    def require_load(self) -> None: ...

    def step(self, *_: Any) -> Any:
        return REPORT


STEP = {"command": "step", "step": 4, "lr": 0.1, "micro_batches": 1, "total_steps": 4}


@pytest.fixture
def planes() -> Iterator[dict[int, DataPlane]]:
    with planes_of(1, driver=True) as opened:
        yield opened


def obey(planes: dict[int, DataPlane], settle: Callable[[], None], out: io.StringIO) -> None:
    runtime = WorkerRuntime(
        assignment=ASSIGNMENT, mailbox=Mailbox(), emitter=Emitter(out), clock=SYSTEM_CLOCK, timeouts=Timeouts()
    )
    engine = cast("ShardEngine", Engine(settle))
    assert runtime._obey_one(planes[0], engine, 7, STEP, {"0/x": torch.ones(1)})


def answer(planes: dict[int, DataPlane], sequence: int) -> dict[str, Any]:
    meta, _ = receive_named(planes[DRIVER_RANK], 0, Channel.REPLY, sequence, 10.0)
    return meta


def test_the_answer_is_out_before_the_update_and_the_claim_after_it(planes: dict[int, DataPlane]) -> None:
    out, seen = io.StringIO(), []

    def settle() -> None:
        seen.append((answer(planes, 7)["committed"], "claim" in out.getvalue()))

    obey(planes, settle, out)
    assert seen == [(True, False)]
    claim, progress = [json.loads(line) for line in out.getvalue().splitlines()][-2:]
    assert (claim["step"], claim["micro_batches"], progress["step"]) == (4, 1, 4)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError("no room"), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate"), "out_of_memory"),
        (DistensorError("a bug"), "error"),
    ],
)
def test_an_update_that_fails_ends_the_worker_and_is_the_next_answer(
    planes: dict[int, DataPlane], error: Exception, code: str
) -> None:
    out = io.StringIO()

    def settle() -> None:
        raise error

    with pytest.raises(type(error)):
        obey(planes, settle, out)
    assert answer(planes, 7)["committed"]
    said = answer(planes, 8)
    assert said["code"] == code
    assert str(error) in said["message"]
    assert "claim" not in out.getvalue()
