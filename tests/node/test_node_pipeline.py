"""The schedule executor over real planes in one process: gradients against the module, hostile peers refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from node_kit import Chain, batch_of, executor, on_all, pieces_of, planes_of, run_pipeline, runners_of

from distensor.core.actions import peak_in_flight
from distensor.core.errors import FrameError, PeerLostError, ProgramRejectedError
from distensor.core.schedules import Action, Phase, Schedule, actions_of_rank, rank_of_stage
from distensor.node.seeds import dropout_seed
from distensor.transport import Channel, DataPlane, Tag
from distensor.transport.tensors import encode

FORWARD = Action(phase=Phase.FORWARD, stage=0, micro_batch=0)
BACKWARD = Action(phase=Phase.BACKWARD, stage=0, micro_batch=0)


@pytest.fixture(scope="module")
def planes() -> Iterator[dict[int, DataPlane]]:
    with planes_of(2) as opened:
        yield opened


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches"),
    [
        (schedule, stages, micro_batches)
        for schedule in Schedule
        for stages, micro_batches in [(2, 1), (2, 3), (4, 2), (4, 3)]
        if schedule not in (Schedule.INTERLEAVED, Schedule.ZBV) or stages > 2
    ],
)
def test_gradients_are_the_modules(
    planes: dict[int, DataPlane], schedule: Schedule, stages: int, micro_batches: int
) -> None:
    module = Chain()
    pieces = pieces_of(module, stages)
    runners = [runners_of(pieces, rank, 2, schedule) for rank in range(2)]
    batches = [batch_of(2 + micro, ignored=micro) for micro in range(micro_batches)]
    sequence = 100 * stages + 10 * micro_batches + list(Schedule).index(schedule)
    totals = run_pipeline(planes, runners, schedule, batches, sequence=sequence)
    weights = [int((batch["labels"] != -100).sum()) for batch in batches]
    losses = [module(**batch) for batch in batches]
    expected = sum(weight * loss for weight, loss in zip(weights, losses, strict=True))
    assert isinstance(expected, torch.Tensor)
    expected.backward()  # type: ignore[no-untyped-call]
    last = rank_of_stage(schedule, stages - 1, ranks=2)
    assert totals[last].weight == sum(weights)
    assert totals[last].loss_times_weight == pytest.approx(expected.item(), rel=1e-6)
    assert (totals[1 - last].weight, totals[1 - last].loss_times_weight) == (0, 0), "only the last stage has a loss"
    for rank, found_there in enumerate(totals):
        actions = actions_of_rank(schedule, rank=rank, ranks=2, stages=stages, micro_batches=micro_batches)
        assert found_there.in_flight == peak_in_flight(actions), "what the schedule says"
    found: dict[str, torch.Tensor] = {}
    for held in runners:
        for runner in held.values():
            for name, parameter in runner.parameters.items():
                assert parameter.grad is not None
                found[name] = found.get(name, torch.zeros_like(parameter)) + parameter.grad
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-5, atol=1e-6)


def test_a_micro_batch_without_an_element_gives_no_gradient_and_no_loss(planes: dict[int, DataPlane]) -> None:
    pieces = pieces_of(Chain(), 2)
    runners = [runners_of(pieces, rank, 2) for rank in range(2)]
    totals = run_pipeline(planes, runners, Schedule.ONE_F_ONE_B, [batch_of(2, ignored=5)], sequence=7)
    assert (totals[1].weight, totals[1].loss_times_weight) == (0, 0)
    for held in runners:
        for runner in held.values():
            assert all(p.grad is None or not p.grad.any() for p in runner.parameters.values())


def test_a_batch_without_an_input_is_named(planes: dict[int, DataPlane]) -> None:
    pieces = pieces_of(Chain(), 2)
    ours = executor(planes[0], 0, 2, 2, runners_of(pieces, 0, 2))
    with pytest.raises(ProgramRejectedError, match=r"stage 0 needs \['input_ids'\].*labels"):
        ours.run(8, [FORWARD], [{"labels": batch_of(2)["labels"]}], training=True)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        ([], "sent 0 tensors"),
        ([torch.zeros(2, 5, 6)] * 3, "sent 3 tensors"),
        ([torch.zeros(2, 5, 7), torch.zeros(2, 5, 6)], r"rank 1.*\(2, 5, 7\)"),
        ([torch.zeros(2, 5, 6, dtype=torch.float64), torch.zeros(2, 5, 6)], "float64"),
        ([torch.zeros(2, 5, 1), torch.zeros(2, 5, 6)], r"\(2, 5, 1\)"),
    ],
)
def test_a_gradient_that_is_none_names_its_sender(
    planes: dict[int, DataPlane], sent: list[torch.Tensor], says: str
) -> None:
    pieces = pieces_of(Chain(), 2)
    outputs = len(pieces.programs[0].outputs)
    if len(sent) == 2:
        sent = sent[:outputs]
    ours = executor(planes[0], 0, 2, 2, runners_of(pieces, 0, 2))
    sequence = next(SEQUENCES)
    header, buffers = encode(sent)
    planes[1].send(0, Tag(channel=Channel.GRADIENT, step=sequence), header, buffers)
    with pytest.raises(FrameError, match=says):
        ours.run(sequence, [FORWARD, BACKWARD], [batch_of(2)], training=True)


SEQUENCES = iter(range(1000, 2000))


def test_activations_that_are_none_name_their_sender(planes: dict[int, DataPlane]) -> None:
    pieces = pieces_of(Chain(), 2)
    ours = executor(planes[1], 1, 2, 2, runners_of(pieces, 1, 2))
    forward = Action(phase=Phase.FORWARD, stage=1, micro_batch=0)
    few, wrong = next(SEQUENCES), next(SEQUENCES)
    header, buffers = encode([])
    planes[0].send(1, Tag(channel=Channel.ACTIVATION, step=few, slot=1), header, buffers)
    with pytest.raises(FrameError, match="rank 0 sent 0 tensors"):
        ours.run(few, [forward], [batch_of(2)], training=True)
    shapes = [torch.zeros(9, 9)] * len(pieces.programs[0].outputs)
    header, buffers = encode(shapes)
    planes[0].send(1, Tag(channel=Channel.ACTIVATION, step=wrong, slot=1), header, buffers)
    with pytest.raises(ProgramRejectedError, match=r"9, 9"):
        ours.run(wrong, [forward], [batch_of(2)], training=True)


def test_a_lost_neighbour_ends_the_wait() -> None:
    with planes_of(2) as planes:
        pieces = pieces_of(Chain(), 2)
        ours = executor(planes[0], 0, 2, 2, runners_of(pieces, 0, 2))

        def lose() -> None:
            planes[1].close()

        with pytest.raises(PeerLostError, match="rank 1"):
            on_all([lambda: ours.run(1, [FORWARD, BACKWARD], [batch_of(2)], training=True), lose])


def test_seeds_differ_by_place_and_repeat() -> None:
    places = [
        (seed, step, replica, micro) for seed in (0, 1) for step in (1, 2) for replica in (0, 1) for micro in (0, 1)
    ]
    seeds = [dropout_seed(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert seeds == [dropout_seed(*place) for place in places]
    assert all(0 <= seed < 1 << 63 for seed in seeds)
