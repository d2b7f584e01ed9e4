"""Bytes of a step to and from the other replicas."""

from __future__ import annotations

from typing import Any

from distensor.core import ParallelConfig, RankLayout
from distensor.node.replica_meter import ReplicaMeter


def links(**sent: int) -> list[dict[str, Any]]:
    """By "p<peer>"; three times as much comes."""
    return [{"peer": int(name[1:]), "sent": count, "received": 3 * count} for name, count in sent.items()]


def test_only_other_replicas_count_and_only_this_step() -> None:
    """Replicas 0-1 and 2-3; -1 is the trainer."""
    meter = ReplicaMeter(RankLayout(ParallelConfig(data_parallel=2, pipeline_parallel=2)), 1)
    meter.begin("distro", 100)
    trainer = {"peer": -1, "sent": 999, "received": 999}
    assert meter.step([*links(p0=500, p2=1, p3=10), trainer]) == {"how": "distro", "up": 11, "down": 33, "ring": 400}
    assert meter.step([*links(p0=900, p2=1, p3=15), trainer]) == {"how": "distro", "up": 5, "down": 15, "ring": 400}
    found = meter.step(links(p3=2))  # a new connection
    assert found is not None
    assert found["up"] == 0


def test_one_replica_sends_nothing_to_itself() -> None:
    meter = ReplicaMeter(RankLayout(ParallelConfig(tensor_parallel=2)), 0)
    meter.begin("allreduce", 100)
    assert meter.step(links(p1=5)) is None
