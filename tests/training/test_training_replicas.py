"""What a trainer makes of the answers of replicas: bytes of the busiest, names of those to be told of."""

from __future__ import annotations

from typing import Any

import pytest
from test_training_replies import GOOD

from distensor.core import ParallelConfig, RankLayout
from distensor.training.replicas import ReplicaWatch
from distensor.training.replies import Reply, read_step
from distensor.training.results import ReplicaTraffic, StepResult

RESULT = StepResult(
    step=7, loss=1.0, tokens=8, grad_norm=1.0, lr=0.1, bytes_sent=0, bytes_received=0, seconds=1.0,
    compute_seconds=1.0, sync_seconds=0.0, wait_seconds=0.0,
)  # fmt: skip


def complete(watch: ReplicaWatch, sent: dict[tuple[int, int], int], ranks: int = 4, **noticed: Any) -> StepResult:
    """`sent` by (from, to); `noticed` is what rank 0 says."""
    replies = []
    for rank in range(ranks):
        links = [{"peer": to, "sent": count, "received": 0} for (who, to), count in sent.items() if who == rank]
        told = {"dropped": [], "clipped": [], "copies": [], **noticed} if rank == 0 else None
        meta = {**GOOD, "links": links, "noticed": told}
        replies.append(Reply(rank=rank, who=f"rank {rank} on node 'n{rank}'", meta=meta, tensors={}))
    return watch.complete(RESULT, replies, [read_step(reply, range(ranks)) for reply in replies])


def test_bytes_of_the_rank_that_sends_most_to_other_replicas() -> None:
    """Two replicas of two pipeline ranks: 0 and 1, 2 and 3. What goes on inside of a replica is no sync."""
    layout = RankLayout(ParallelConfig(data_parallel=2, pipeline_parallel=2))
    assert [layout.coordinates(rank).dp for rank in range(4)] == [0, 0, 1, 1]
    watch = ReplicaWatch(layout, (10, 100, 10, 100))
    first = {(0, 2): 50, (2, 0): 60, (1, 3): 500, (3, 1): 400, (0, 1): 9999, (1, -1): 8888}
    assert complete(watch, first).replicas == ReplicaTraffic(up=500, down=400, dense=400, ring=400)
    second = {link: 2 * count for link, count in first.items()} | {(1, 3): 550, (3, 1): 1400}
    found = complete(watch, second).replicas
    assert found == ReplicaTraffic(up=1000, down=50, dense=400, ring=400)
    assert found.reduction == 0.4
    anew = complete(watch, {(1, 3): 30}).replicas  # a new connection counts from zero
    assert anew is not None
    assert (anew.up, anew.down) == (30, 0)


def test_without_other_replicas_there_is_no_such_traffic() -> None:
    watch = ReplicaWatch(RankLayout(ParallelConfig(pipeline_parallel=4)), (1, 1, 1, 1))
    assert complete(watch, {(0, 1): 5, (1, 0): 5}).replicas is None


def test_what_was_noticed_is_named_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    watch = ReplicaWatch(RankLayout(ParallelConfig(data_parallel=4)), (1, 1, 1, 1))
    for _ in range(2):
        result = complete(watch, {}, dropped=[3], clipped=[1], copies=[[0, 2]])
        assert (result.dropped, result.clipped, result.copies) == ((3,), (1,), ((0, 2),))
    said = [record.getMessage() for record in caplog.records]
    # What is left out is left out anew each time.
    assert [line.partition(":")[0] for line in said] == [
        "step 7 is without replica 3 (rank 3 on node 'n3')",
        "step 7",
        "step 7",
        "step 7 is without replica 3 (rank 3 on node 'n3')",
    ]
    assert "replica 1 (rank 1 on node 'n1') is much larger" in said[1]
    assert "replicas 0 (rank 0 on node 'n0') and 2 (rank 2 on node 'n2') sent the same entries" in said[2]
