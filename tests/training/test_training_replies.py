"""A worker's answers: right ones are read, and a lie of any kind is an error that names the worker."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from distensor.core.errors import WorkerFailedError
from distensor.core.pipeline_simulation import LinkSeconds
from distensor.core.warm_up import RankFigures
from distensor.training.replies import (
    LinkBytes,
    LossReply,
    Noticed,
    Reply,
    agreed,
    check_tensors,
    layout_bytes,
    read_loss,
    read_step,
)
from distensor.training.results import RankMemory
from distensor.transport.tensors import encode

GOOD: dict[str, Any] = {
    "loss": 1.5,
    "weight": 8.0,
    "grad_norm": 0.25,
    "committed": True,
    "compute_seconds": 0.1,
    "sync_seconds": 0,
    "wait_seconds": 0.0,
    "links": [{"peer": -1, "sent": 10, "received": 3}, {"peer": 0, "sent": 0, "received": 0}],
    "memory": {"weights": 8, "optimizer": 16, "peak": 32},
}
RANKS = range(2)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def reply(meta: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None, rank: int = 1) -> Reply:
    return Reply(rank=rank, who=f"rank {rank} on node 'bolt'", meta=meta, tensors=tensors or {})


def test_a_step_is_read() -> None:
    answer = read_step(reply(GOOD), RANKS)
    assert (answer.loss, answer.weight, answer.grad_norm, answer.committed) == (1.5, 8.0, 0.25, True)
    assert answer.links == (LinkBytes(peer=-1, sent=10, received=3), LinkBytes(peer=0, sent=0))
    assert answer.memory == RankMemory(weights=8, optimizer=16, peak=32)
    known = {"peer": 0, "sent": 1, "path": "relay", "rtt_ms": 41.5, "rtt_age_s": 2, "line_rate": None}
    (link,) = read_step(reply({**GOOD, "links": [known]}), RANKS).links
    assert link == LinkBytes(peer=0, sent=1, path="relay", rtt_ms=41.5, rtt_age_s=2.0)
    for wrong in ({"path": "tunnel"}, {"path": 5}, {"rtt_ms": -1}, {"line_rate": "fast"}):
        with pytest.raises(WorkerFailedError, match=next(iter(wrong))):
            read_step(reply({**GOOD, "links": [{**known, **wrong}]}), RANKS)


def test_what_a_rank_measured_is_read() -> None:
    link = {"latency": 0.1, "occupied": 0.2}
    found = {"forward": 1.0, "backward": 2, "before": None, "after": link, "most_in_flight": 3}
    figures = read_step(reply({**GOOD, "figures": found}), RANKS).figures
    after = LinkSeconds(latency=0.1, occupied=0.2)
    assert figures == RankFigures(forward=1.0, backward=2.0, before=None, after=after, most_in_flight=3)
    assert read_step(reply(GOOD), RANKS).figures is None


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (3, "figures="), ({}, "forward="), ({"forward": 1, "backward": -1}, "backward="),
        ({"forward": 1, "backward": 1, "before": 2}, "before="),
        ({"forward": 1, "backward": 1, "before": {"latency": None}}, "latency="),
        ({"forward": 1, "backward": 1, "most_in_flight": "all"}, "most_in_flight="),
    ],
)  # fmt: skip
def test_figures_that_are_none_name_the_worker(found: Any, says: str) -> None:
    with pytest.raises(WorkerFailedError, match=rf"rank 1 on node 'bolt' answered {says}"):
        read_step(reply({**GOOD, "figures": found}), RANKS)


def test_null_is_not_a_number_and_never_an_update() -> None:
    answer = read_step(reply({**GOOD, "loss": None, "grad_norm": None, "committed": False}), RANKS)
    assert math.isnan(answer.loss)
    assert math.isnan(answer.grad_norm)
    assert not answer.committed


@pytest.mark.parametrize("change", [{"loss": None}, {"grad_norm": None}, {"weight": 0}], ids=str)
def test_an_update_without_numbers_is_a_lie(change: dict[str, Any]) -> None:
    with pytest.raises(WorkerFailedError, match=r"rank 1 on node 'bolt' says that it has applied"):
        read_step(reply({**GOOD, **change}), RANKS)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("loss", "1.5"), ("loss", float("nan")), ("loss", float("inf")), ("loss", True), ("loss", [1.5]), ("loss", 0),
        ("weight", -1.0), ("weight", float("nan")), ("weight", None), ("weight", 1e300), ("weight", 10**400),
        ("grad_norm", {}), ("committed", 1), ("committed", None), ("compute_seconds", "0"),
        ("sync_seconds", -0.1), ("wait_seconds", float("inf")),
        ("memory", None), ("memory", {"weights": 1}), ("memory", {"weights": 1, "optimizer": 1, "peak": -1}),
        ("memory", {"weights": 1, "optimizer": 1.5, "peak": 1}),
        ("links", None), ("links", {}), ("links", [3]), ("links", [{}]), ("links", [{"peer": 7, "sent": 1}]),
        ("links", [{"peer": 1, "sent": 1}]), ("links", [{"peer": -1, "sent": -1}]),
        ("links", [{"peer": -1, "sent": 1.5}]), ("links", [{"peer": [], "sent": 1}]),
        ("links", [{"peer": True, "sent": 1}]), ("links", [{"peer": -1, "sent": 1}] * 3),
    ],
)  # fmt: skip
def test_a_wrong_field_names_worker_and_field(key: str, value: Any) -> None:
    with pytest.raises(WorkerFailedError, match=rf"rank 1 on node 'bolt' answered {key}="):
        read_step(reply({**GOOD, key: value}), RANKS)


@pytest.mark.parametrize("key", sorted(GOOD))
def test_a_missing_field_is_an_error(key: str) -> None:
    with pytest.raises(WorkerFailedError, match=key):
        read_step(reply({name: value for name, value in GOOD.items() if name != key}), RANKS)


@given(st.sampled_from(sorted(GOOD)), JSON)
def test_no_answer_crashes_the_trainer(key: str, value: Any) -> None:
    try:
        answer = read_step(reply({**GOOD, key: value}), RANKS)
    except WorkerFailedError:
        return
    assert math.isfinite(answer.weight)
    assert not answer.committed or math.isfinite(answer.loss)


def test_what_was_noticed_of_replicas_is_read() -> None:
    found = {"dropped": [1], "clipped": [], "copies": [[0, 1]]}
    assert read_step(reply({**GOOD, "noticed": found}), RANKS).noticed == Noticed(dropped=(1,), copies=((0, 1),))
    assert read_step(reply(GOOD), RANKS).noticed == Noticed()


@pytest.mark.parametrize(
    "found",
    [
        3,
        {},
        {"dropped": [2], "clipped": [], "copies": []},
        {"dropped": [True], "clipped": [], "copies": []},
        {"dropped": [], "clipped": ["0"], "copies": []},
        {"dropped": [], "clipped": [], "copies": [[0]]},
        {"dropped": [], "clipped": [], "copies": [0]},
        {"dropped": [0] * 9, "clipped": [], "copies": []},
    ],
)
def test_replicas_that_are_none_name_the_worker(found: Any) -> None:
    with pytest.raises(WorkerFailedError, match=r"'bolt' answered noticed="):
        read_step(reply({**GOOD, "noticed": found}), RANKS)


def test_a_loss_is_read() -> None:
    assert read_loss(reply({"loss": 2.5, "weight": 3})) == LossReply(loss=2.5, weight=3.0)
    with pytest.raises(WorkerFailedError, match="loss"):
        read_loss(reply({"weight": 3}))


def test_ranks_agree_or_the_odd_one_is_named() -> None:
    replies = [reply({}, rank=0), reply({}, rank=1)]
    assert agreed(replies, "loss", [1.5, 1.5]) == 1.5
    assert math.isnan(agreed(replies, "loss", [math.nan, math.nan]))
    with pytest.raises(WorkerFailedError, match=r"rank 1 .* reports loss 1\.6.*rank 0 .* 1\.5"):
        agreed(replies, "loss", [1.5, 1.6])
    with pytest.raises(WorkerFailedError, match="committed"):
        agreed(replies, "committed", [True, False])


LAYOUT = {"0/a": (torch.float32, (2, 3)), "0/b": (torch.int64, ())}
TENSORS = {"0/a": torch.zeros(2, 3), "0/b": torch.tensor(1)}


def test_the_declared_tensors_are_taken() -> None:
    check_tensors(reply({}, TENSORS), LAYOUT)
    check_tensors(reply({}), {})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"0/a": torch.zeros(1, 3)}, r"'0/a' as torch.float32 \(1, 3\)"),
        ({"0/a": torch.zeros(2, 3, dtype=torch.float64)}, "float64"),
        ({"0/a": torch.zeros(())}, r"\(\)"),
        ({"9/z": torch.zeros(1)}, "sent .*9/z"),
        ({"0/a": None}, "left out .*0/a"),
    ],
)
def test_other_tensors_name_the_worker(change: dict[str, Tensor | None], says: str) -> None:
    sent = {name: tensor for name, tensor in {**TENSORS, **change}.items() if tensor is not None}
    with pytest.raises(WorkerFailedError, match=f"rank 1 on node 'bolt' .*{says}"):
        check_tensors(reply({}, sent), LAYOUT)


def test_the_most_bytes_hold_what_is_really_sent() -> None:
    _, buffers = encode(list(TENSORS.values()))
    assert sum(map(len, buffers)) <= layout_bytes(LAYOUT)
