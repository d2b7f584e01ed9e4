"""What has to be done at the beginning of an epoch, so that all ranks hold the same committed step."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from distensor.core import ParallelConfig, RankLayout
from distensor.core.errors import PlacementError, StateLostError, WorkerFailedError, WorkerLostError
from distensor.core.regrouping import Regrouping
from distensor.testing.clock import FakeClock
from distensor.training.joining import read_join
from distensor.training.members import NO_HOPE, Membership, Share, Status, read_status, settlement
from distensor.training.next_epoch import MembersMissingError
from distensor.training.replies import Reply
from distensor.transport.driver import Command

SUMS = {"loss": 3.0, "weight": 2.0, "norm": 1.0}
DP3 = RankLayout(ParallelConfig(data_parallel=3))
DP2_PP2 = RankLayout(ParallelConfig(data_parallel=2, pipeline_parallel=2))


def status(rank: int, step: int | None, prepared: int | None = None, sums: Mapping[str, Any] | None = None) -> Status:
    return Status(rank=rank, step=step, prepared=prepared, sums=sums)


def apart(rank: int, step: int | None, exchanges: int) -> Status:
    return Status(rank=rank, step=step, prepared=None, sums=None, exchanges=exchanges)


def test_nobody_had_decided_so_the_step_is_begun_anew() -> None:
    found = settlement([status(0, 4, prepared=5), status(1, 4), status(2, 4, prepared=5)], DP3, 5)
    assert (found.resolved, found.shares) == ((), {})


def test_one_had_decided_so_all_can() -> None:
    found = settlement([status(0, 4, prepared=5), status(1, 5, sums=SUMS), status(2, 4, prepared=5)], DP3, 5)
    assert found.resolved == (0, 1, 2)
    assert found.sums == SUMS
    assert found.shares == {}


def test_one_that_was_not_in_the_step_gets_the_state_of_those_that_were() -> None:
    found = settlement([status(0, 5, sums=SUMS), status(1, 4, prepared=5), status(2, None)], DP3, 5)
    assert found.resolved == (0, 1)
    assert list(found.shares.values()) == [Share(sources=(0, 1), joiners=(2,))]


def test_between_two_steps_nothing_is_resolved() -> None:
    found = settlement([status(0, 5, sums=SUMS), status(1, 5, sums=SUMS), status(2, None)], DP3, None)
    assert found.resolved == ()
    assert list(found.shares.values()) == [Share(sources=(0, 1), joiners=(2,))]


def test_each_place_gets_its_own_state() -> None:
    found = settlement([status(0, 7), status(1, 7), status(2, None), status(3, None)], DP2_PP2, None)
    assert sorted(found.shares.values(), key=lambda share: share.sources) == [
        Share(sources=(0,), joiners=(2,)),
        Share(sources=(1,), joiners=(3,)),
    ]


def test_a_place_that_nobody_holds_is_named() -> None:
    with pytest.raises(StateLostError, match="pipeline rank 1"):
        settlement([status(0, 7), status(1, None), status(2, 7), status(3, None)], DP2_PP2, 8)


def test_replicas_that_all_lack_an_exchange_hold_the_same() -> None:
    """Stage 0 has applied what it exchanged in step 5; no replica of stage 1 got through its own exchange."""
    found = settlement([apart(0, 5, 1), apart(1, 4, 0), apart(2, 5, 1), apart(3, 4, 0)], DP2_PP2, 5, apart=True)
    assert found.resolved == (0, 2)
    assert found.shares == {}


def test_a_replica_that_lacks_an_exchange_gets_what_came_of_it_and_a_new_one_too() -> None:
    found = settlement([apart(0, 8, 2), apart(1, 7, 1), apart(2, None, 0)], DP3, 8, apart=True)
    assert found.resolved == (0,)
    assert list(found.shares.values()) == [Share(sources=(0,), joiners=(1, 2))]


def test_a_replica_that_lacks_a_step_of_its_own_does_without_it() -> None:
    found = settlement([apart(0, 7, 1), apart(1, 6, 1), apart(2, 7, 1)], DP3, 7, apart=True)
    assert found.resolved == (0, 2)
    assert found.shares == {}
    with pytest.raises(StateLostError, match="pipeline rank 1"):
        settlement([apart(0, 7, 1), apart(1, None, 0), apart(2, 7, 1), apart(3, None, 0)], DP2_PP2, 8, apart=True)


@pytest.mark.parametrize("meta", [{"step": -1}, {"step": "5"}, {"step": True}, {"step": 1, "sums": []}], ids=str)
def test_a_status_that_is_none_is_refused(meta: dict[str, Any]) -> None:
    with pytest.raises(WorkerFailedError, match="rank 1 on node 'bolt'"):
        read_status(Reply(rank=1, who="rank 1 on node 'bolt'", meta=meta, tensors={}))


class Hasty(FakeClock):
    """Whoever sleeps is woken at once, later."""

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)


class Mesh:
    """The members of a job: which ranks of each epoch never come, which are lost, and what was asked for."""

    exit_reason_seconds = 0.0

    def __init__(self, parallel: ParallelConfig) -> None:
        self.lost: set[int] = set()
        self.absent: list[set[int]] = []
        self.full = 0
        self.asked_for: list[Regrouping] = []
        self.commands: list[Command] = []
        self.idle: list[frozenset[int]] = []
        self.left = [1, 0]
        self.offers: list[Any] = []
        self.holding = dict.fromkeys(range(parallel.world_size), 3)
        self._enter(parallel)
        self._next = parallel

    def _enter(self, parallel: ParallelConfig) -> None:
        self.topology: Any = SimpleNamespace(parallel=parallel)

    @property
    def ranks(self) -> range:
        return range(self.topology.parallel.world_size)

    @property
    def asked(self) -> bool:
        return self._next is not self.topology.parallel

    @property
    def asked_parallel(self) -> ParallelConfig:
        return self._next

    def gone(self) -> set[int]:
        return self.lost

    def leave(self) -> None: ...

    def ask_for(self, regrouping: Regrouping, bytes_per_rank: tuple[int, ...] = ()) -> None:
        if self.full and regrouping.new:
            self.full -= 1
            raise PlacementError("no free slot")
        self.asked_for.append(regrouping)
        self._next = regrouping.parallel
        before, self.holding = self.holding, {}
        for rank, was in enumerate(regrouping.continues):
            if was is not None and was in before:
                self.holding[rank] = before[was]

    def is_next_ready(self) -> bool:
        return True

    def enter_next(self, timeout: float) -> None:
        if self.absent and (absent := self.absent.pop(0)):
            raise MembersMissingError(frozenset(absent), "not ready")
        self._enter(self._next)
        self.lost = set()

    def explained(self, error: WorkerLostError) -> WorkerLostError:
        return WorkerLostError(f"{error}: killed by SIGKILL")

    def command(
        self, command: Command, meta: Any, tensors: Any = None, extra: Any = None, most_bytes: Any = None,
        only: Collection[int] | None = None,
    ) -> list[Reply]:  # fmt: skip
        self.commands.append(command)
        ranks = self.ranks if only is None else sorted(only)
        if command is Command.SHARE:
            self.holding.update(dict.fromkeys(ranks, 3))
        metas: dict[int, dict[str, Any]] = {rank: {"step": self.holding.get(rank)} for rank in ranks}
        if command is Command.JOIN:
            for rank in ranks:
                self._join(metas[rank], extra[rank])
        return [Reply(rank=rank, who=f"rank {rank}", meta=metas[rank], tensors={}) for rank in ranks]

    def _join(self, answer: dict[str, Any], order: Mapping[str, Any]) -> None:
        self.offers += order.get("offers", [])
        if "sources" in order:
            left = self.left.pop(0)
            wanted = {str(order["sources"][0]): ["0/w"]} if left else {}
            answer.update(left=left, number=1, wanted=wanted)


def members(mesh: Mesh, clock: FakeClock, *, replicas: int = 3, restorable: bool = False) -> Membership:
    return Membership(
        mesh, replicas=replicas, clock=clock, bytes_per_rank=lambda _: (), apart=False, cut=False,
        restorable=lambda: restorable, on_change=lambda _: None, on_idle=mesh.idle.append,
    )  # fmt: skip


LOSS = WorkerLostError("lost rank 1")


def test_the_rest_goes_on() -> None:
    mesh = Mesh(ParallelConfig(data_parallel=3))
    mesh.lost = {1}
    assert members(mesh, FakeClock()).recover(LOSS, 4) == []
    assert mesh.asked_for[-1].continues == (0, 2)
    assert mesh.commands == [Command.STATUS]


def test_one_that_is_lost_meanwhile_is_left_out_too() -> None:
    mesh = Mesh(ParallelConfig(data_parallel=3))
    mesh.lost, mesh.absent = {1}, [{0}]
    members(mesh, FakeClock()).recover(LOSS, 4)
    assert [asked.continues for asked in mesh.asked_for] == [(0, 2), (1,)]
    assert mesh.topology.parallel.data_parallel == 1


def test_where_nobody_holds_it_and_nothing_brings_it_back_the_reason_is_told() -> None:
    mesh = Mesh(ParallelConfig(pipeline_parallel=2))
    mesh.lost = {1}
    with pytest.raises(WorkerLostError, match="SIGKILL") as told:
        members(mesh, FakeClock(), replicas=1).recover(LOSS, 4)
    assert NO_HOPE in str(told.value)
    assert not isinstance(told.value, StateLostError), "the job does not go on"
    assert mesh.asked_for == [], "nobody is started for nothing"


def test_with_a_checkpoint_a_new_worker_is_waited_for() -> None:
    mesh = Mesh(ParallelConfig(pipeline_parallel=2))
    mesh.lost, mesh.full = {1}, 2
    with pytest.raises(StateLostError, match="pipeline rank 1"):
        members(mesh, Hasty(), replicas=1, restorable=True).recover(LOSS, 4)
    assert mesh.asked_for[-1].continues == (0, None)
    assert mesh.topology.parallel.pipeline_parallel == 2, "the members are there; their state has to be brought back"


def test_a_missing_replica_is_asked_for_and_let_in() -> None:
    mesh, clock = Mesh(ParallelConfig(data_parallel=2)), FakeClock()
    membership = members(mesh, clock)
    membership.tend()
    assert membership._growth is not None
    membership._growth.thread.join()
    membership.tend()
    assert mesh.topology.parallel.data_parallel == 3
    assert mesh.asked_for[-1].continues == (0, 1, None)
    assert mesh.commands == [Command.STATUS, Command.SHARE]
    assert mesh.idle == [frozenset({2})], "it takes part, and trains nothing yet"
    membership.tend()
    assert mesh.offers == [{"joiner": 2, "number": 1, "wanted": ["0/w"]}]
    assert mesh.idle == [frozenset({2})]
    membership.tend()
    assert mesh.idle == [frozenset({2}), frozenset()]
    assert mesh.commands[2:] == [Command.JOIN] * 3


def test_who_had_not_got_all_goes_on_where_it_was_in_the_next_epoch() -> None:
    halfway = Status(rank=1, step=4, prepared=5, sums=None, missing=3)
    found = settlement([status(0, 5, sums=SUMS), halfway, status(2, 5, sums=SUMS)], DP3, 5)
    assert found.resolved == (0, 1, 2), "it knows the sums of the step as all do"
    assert found.shares == {}
    with pytest.raises(StateLostError):
        settlement([status(0, None), halfway], RankLayout(ParallelConfig(data_parallel=2)), None)


@pytest.mark.parametrize(
    "meta",
    [
        {"left": -1, "number": 0, "wanted": {}}, {"left": 1, "number": "1", "wanted": {}}, {"left": 1, "number": 1},
        {"left": 1, "number": 1, "wanted": {"7": ["a"]}}, {"left": 1, "number": 1, "wanted": {"0": [3]}},
    ],
    ids=str,
)  # fmt: skip
def test_an_answer_of_one_that_joins_is_checked(meta: dict[str, Any]) -> None:
    with pytest.raises(WorkerFailedError, match="rank 1"):
        read_join(Reply(rank=1, who="rank 1", meta=meta, tensors={}), (0, 2))


def test_where_there_is_no_place_it_is_asked_less_and_less_often() -> None:
    mesh, clock = Mesh(ParallelConfig(data_parallel=2)), FakeClock()
    mesh.full = 1000
    membership = members(mesh, clock)
    tries = 0
    for _ in range(600):
        before = mesh.full
        membership.tend()
        if membership._growth is not None:
            membership._growth.thread.join()
        tries += before - mesh.full
        clock.advance(1.0)
    assert 5 <= tries <= 25
    assert mesh.topology.parallel.data_parallel == 2


def test_a_replica_that_does_not_come_up_is_given_up_and_the_others_go_on() -> None:
    mesh, clock = Mesh(ParallelConfig(data_parallel=2)), FakeClock()
    membership = members(mesh, clock)
    mesh.absent = [{2}]
    membership.tend()
    assert membership._growth is not None
    membership._growth.thread.join()
    membership.tend()
    assert mesh.topology.parallel.data_parallel == 2
    assert [asked.continues for asked in mesh.asked_for] == [(0, 1, None), (0, 1)]


def test_a_loss_while_a_replica_was_coming_up() -> None:
    """The numbers are those of the epoch that was being prepared."""
    mesh, clock = Mesh(ParallelConfig(data_parallel=2)), FakeClock()
    membership = members(mesh, clock)
    membership.tend()
    mesh.lost = {0}
    membership.recover(LOSS, 4)
    assert [asked.continues for asked in mesh.asked_for] == [(0, 1, None), (1,)]
