"""Tied gradients: the same bits on every holder, and nothing of a peer taken on trust."""

from __future__ import annotations

import pytest
import torch
from node_kit import Chain, on_all, pieces_of, planes_of, runners_of
from torch import Tensor

from distensor.core.errors import FrameError
from distensor.node.tied import sum_tied_gradients
from distensor.program import StageRunner
from distensor.transport import Channel, DataPlane, Tag
from distensor.transport.tensors import encode

NAME = "embed.weight"


def holders(stages: int, ranks: int) -> list[tuple[int, int, str]]:
    return [(0, 0, NAME), (stages - 1, (stages - 1) % ranks, NAME)]


def tie(plane: DataPlane, rank: int, runners: dict[int, StageRunner], places: list[tuple[int, int, str]]) -> None:
    weights = {f"{stage}/{name}": p for stage, runner in runners.items() for name, p in runner.parameters.items()}
    sum_tied_gradients(plane=plane, rank=rank, sequence=1, index=0, holders=places, weights=weights)


def gradient(runner: StageRunner) -> Tensor:
    found = runner.parameters[NAME].grad
    assert found is not None
    return found


def test_both_holders_end_with_the_same_bits() -> None:
    pieces = pieces_of(Chain(), 2)
    runners = [runners_of(pieces, rank, 2) for rank in range(2)]
    first, last = runners[0][0], runners[1][1]
    first.parameters[NAME].grad = torch.randn(11, 6)
    last.parameters[NAME].grad = torch.randn(11, 6)
    expected = first.parameters[NAME].grad + last.parameters[NAME].grad
    with planes_of(2) as planes:
        on_all(
            [lambda: tie(planes[0], 0, runners[0], holders(2, 2)), lambda: tie(planes[1], 1, runners[1], holders(2, 2))]
        )
    assert torch.equal(gradient(first), expected)
    assert torch.equal(gradient(last), expected)


def test_a_holder_without_a_gradient_adds_zero() -> None:
    pieces = pieces_of(Chain(), 2)
    runners = [runners_of(pieces, rank, 2) for rank in range(2)]
    runners[1][1].parameters[NAME].grad = torch.ones(11, 6)
    with planes_of(2) as planes:
        on_all(
            [lambda: tie(planes[0], 0, runners[0], holders(2, 2)), lambda: tie(planes[1], 1, runners[1], holders(2, 2))]
        )
    assert torch.equal(gradient(runners[0][0]), torch.ones(11, 6))


def test_copies_on_one_rank_need_no_message() -> None:
    pieces = pieces_of(Chain(), 4)
    runners = runners_of(pieces, 0, 1)
    for stage, value in ((0, 1.0), (3, 2.0)):
        runners[stage].parameters[NAME].grad = torch.full((11, 6), value)
    with planes_of(2) as planes:
        tie(planes[0], 0, runners, holders(4, 1))
        tie(planes[1], 1, {}, holders(4, 1))
        assert not planes[1].has(0, Tag(channel=Channel.TIED, step=1))
    assert torch.equal(gradient(runners[0]), torch.full((11, 6), 3.0))
    assert torch.equal(gradient(runners[3]), gradient(runners[0]))
    assert gradient(runners[3]).data_ptr() != gradient(runners[0]).data_ptr()


@pytest.mark.parametrize(
    "sent", [[], [torch.zeros(1, 6)], [torch.zeros(11, 6).double()], [torch.zeros(11, 6)] * 2], ids=len
)
def test_a_gradient_of_another_kind_is_refused(sent: list[Tensor]) -> None:
    runners = runners_of(pieces_of(Chain(), 2), 0, 2)
    with planes_of(2) as planes:
        header, buffers = encode(sent)
        planes[1].send(0, Tag(channel=Channel.TIED, step=1, slot=1), header, buffers)
        with pytest.raises(FrameError, match=r"rank 1 sent .*\(11, 6\)"):
            tie(planes[0], 0, runners, holders(2, 2))
