"""What a trainer that was started again gets from the ranks of its job, without processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_mesh import thread_session
from torch import Tensor, nn

from distensor.core import Epoch, JobId, ParallelConfig
from distensor.core.control import Unit
from distensor.core.errors import ConfigError, StateLostError, UnsupportedOptionError, WorkerFailedError
from distensor.nn import DistributedModel
from distensor.training import Trainer
from distensor.training.checkpointing import Feed, FeedStart
from distensor.training.notes import NoteSender, Standpoint
from distensor.training.replies import Reply
from distensor.training.taking_over import _settled, read_handed_over
from distensor.transport.driver import Command

DP2 = ParallelConfig(data_parallel=2)
SUMS = {"loss": 3.0, "weight": 2.0, "norm": 1.0}
NOTE = {"position": {"epoch": 0}, "run": {"lr": 0.1}, "paid": 1}


class Ranks:
    """Ranks of a job that answer what a test says, and remember what they were told."""

    job_id = JobId("j")

    def __init__(self, *metas: Mapping[str, Any]) -> None:
        self.metas = [dict(meta) for meta in metas]
        self.ranks = range(len(metas))
        self.topology = SimpleNamespace(parallel=ParallelConfig(data_parallel=len(metas)))
        self.told: list[tuple[Command, tuple[int, ...]]] = []

    def command(
        self, command: Command, meta: Any, tensors: Any = None, extra: Any = None, most_bytes: Any = None,
        only: Collection[int] | None = None,
    ) -> list[Reply]:  # fmt: skip
        ranks = tuple(self.ranks if only is None else sorted(only))
        self.told.append((command, ranks))
        if command in (Command.RESOLVE, Command.SHARE):
            for rank in ranks:
                self.metas[rank].update(step=5, note=self.metas[rank].get("later", NOTE))
        record = torch.tensor([[4.0, 0.5, 2.0, 1.0], [5.0, 0.4, 2.0, 1.0], [6.0, 0.3, 2.0, 1.0]])
        common = {"load": {"stages": 1}, "programs": "p", "digest": "d", "unpaid": []}
        return [
            Reply(rank=r, who=f"rank {r}", meta={**common, **self.metas[r]}, tensors={"record": record}) for r in ranks
        ]


def settled(ranks: Ranks) -> Any:
    return _settled(ranks)  # type: ignore[arg-type]


def test_all_have_committed_the_same_step() -> None:
    unpaid = [[4, [1, 2, 0]], [5, [1, 2, 2]]]
    ranks = Ranks(
        {"step": 5, "sums": SUMS, "note": NOTE, "unpaid": unpaid}, {"step": 5, "sums": SUMS, "unpaid": [[6, [1, 1]]]}
    )
    taken = settled(ranks)
    assert (taken.step, taken.run, [earlier.step for earlier in taken.earlier]) == (5, {"lr": 0.1}, [4, 5])
    assert [(unit.key.step, unit.key.rank, unit.key.epoch) for unit in taken.unpaid] == [
        (4, 0, 1),
        (5, 0, 1),
        (5, 1, 1),
    ]
    assert [command for command, _ in ranks.told] == [Command.TAKE_OVER]


def test_one_had_decided_so_the_others_commit_and_the_note_is_that_of_the_step() -> None:
    old = {"position": {"epoch": 0}, "run": {"lr": 9.0}, "paid": 0}
    ranks = Ranks({"step": 4, "prepared": 5, "note": old, "later": NOTE}, {"step": 5, "sums": SUMS})
    taken = settled(ranks)
    assert ranks.told == [(Command.TAKE_OVER, (0, 1)), (Command.RESOLVE, (0,)), (Command.TAKE_OVER, (0, 1))]
    assert (taken.step, taken.run) == (5, {"lr": 0.1})


def test_nobody_had_decided_so_the_step_is_begun_anew() -> None:
    ranks = Ranks({"step": 4, "prepared": 5, "note": NOTE}, {"step": 4, "prepared": 5})
    assert settled(ranks).step == 4
    assert len(ranks.told) == 1


def test_a_worker_that_was_started_again_gets_the_state_of_another() -> None:
    ranks = Ranks({"step": 5, "sums": SUMS, "note": NOTE}, {"step": None})
    assert settled(ranks).step == 5
    assert (Command.SHARE, (0, 1)) in ranks.told


def test_states_that_have_to_be_equal_are_compared_and_those_of_replicas_with_residuals_are_not() -> None:
    ranks = ({"step": 5, "sums": SUMS, "note": NOTE, "digest": "a"}, {"step": None, "digest": "b"})
    with pytest.raises(WorkerFailedError, match="state"):
        settled(Ranks(*ranks))
    sparse = {"load": {"optimizer": {"sparse": {"rule": "distro"}}}}
    assert settled(Ranks(*({**rank, **sparse} for rank in ranks))).step == 5


def test_a_joiner_that_lacked_weights_gets_all_of_them() -> None:
    ranks = Ranks({"step": 5, "sums": SUMS, "note": NOTE}, {"step": 5, "sums": SUMS, "missing": 3})
    assert settled(ranks).step == 5
    assert (Command.SHARE, (0, 1)) in ranks.told


def test_without_a_note_the_data_cannot_go_on() -> None:
    with pytest.raises(StateLostError, match="none of them knows where its trainer stood"):
        settled(Ranks({"step": 5}, {"step": 5}))
    assert settled(Ranks({"step": 0}, {"step": 0})).step == 0, "nothing was trained yet"
    with pytest.raises(StateLostError, match="nobody holds the weights"):
        settled(Ranks({"step": None}, {"step": None}))


@pytest.mark.parametrize(
    "meta",
    [{"note": {"position": 3}}, {"unpaid": [[1]]}, {"unpaid": [[1, [2]]]}, {"unpaid": [[1, [2, -1]]]}, {"load": []}],
    ids=str,
)
def test_what_nobody_left_there_is_refused(meta: dict[str, Any]) -> None:
    words = {"note": None, "unpaid": [], "load": {}, **meta}
    with pytest.raises(WorkerFailedError, match="rank 1"):
        read_handed_over(Reply(rank=1, who="rank 1", meta=words, tensors={"record": torch.ones(1, 4)}))


def test_states_are_sent_where_they_changed_and_all_in_a_new_epoch() -> None:
    sender = NoteSender()

    def sent(epoch: int, **states: Tensor) -> list[str]:
        point = Standpoint(position=None, states=states, run={})
        words, tensors = sender.note(point, Epoch(epoch), [2, 2], 0)
        assert words["units"] == [epoch, 2, 2]
        assert words["parts"] == sorted(states)
        return sorted(tensors)

    one, two = torch.ones(2), torch.zeros(2)
    assert sent(1, a=one, b=two) == ["note/a", "note/b"]
    assert sent(1, a=one.clone(), b=two + 1) == ["note/b"]
    assert sent(2, a=one, b=two + 1) == ["note/a", "note/b"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()  # type: ignore[no-any-return]


def test_what_the_ranks_keep_leads_another_process_to_the_next_batch() -> None:
    """Three steps of a real trainer over real ranks: what they keep says where to go on, and who is to be paid."""
    data = [torch.randn(4, 3, generator=torch.Generator().manual_seed(n)) for n in range(5)]
    with thread_session(2) as session:
        session.leaves_workers = True
        with Trainer(DistributedModel(Net()), parallel=DP2, session=session, progress=False, lr=0.1) as trainer:
            losses = trainer.fit(data, max_steps=3).losses
            connection = session.connections[-1]
            taken = settled(connection)
        assert (taken.step, [earlier.loss for earlier in taken.earlier]) == (3, pytest.approx(losses))
        feed = Feed(data, FeedStart(position=taken.position, states=taken.states))
        (batch,) = next(feed.windows(epochs=1, accumulate=1, max_steps=None))
        assert torch.equal(batch, data[3])
        assert feed.steps == 3
        assert taken.run["first_lr"] == 0.1
        assert sum(unit.micro_batches for unit in of_step(taken.unpaid, 3)) == 2


def of_step(units: Collection[Unit], step: int) -> list[Unit]:
    return [unit for unit in units if unit.key.step == step]


def test_what_cannot_be_taken_over_is_refused_before_the_hub_is_asked() -> None:
    model = DistributedModel(Net())
    with pytest.raises(UnsupportedOptionError, match="zero3"):
        Trainer(model, parallel=DP2, sync="zero3", progress=False).resume("j-1")
    with thread_session(2) as session, Trainer(model, parallel=DP2, session=session, progress=False) as trainer:
        trainer.step(torch.ones(4, 3))
        with pytest.raises(ConfigError, match="has a job already"):
            trainer.resume("j-1")
