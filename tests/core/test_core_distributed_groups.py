"""The process-group helpers: what must raise on every rank, gradients, groups made and destroyed, pipelines."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from group_pool import GroupPool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import distensor.core.distributed as helpers
from distensor.core.distributed.agreement import set_timeout
from distensor.core.errors import ConfigError, GroupMismatchError, TransportTimeoutError, UserError


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def words_of(function: Callable[[], Any]) -> str:
    """What a rank raises; afterwards the group still works."""
    try:
        found = f"no error, {function()!r}"
    except UserError as error:
        found = f"{type(error).__name__}: {error}"
    assert helpers.broadcast("still in step", world()) == "still in step"
    return found


# Recorded as silent garbage, aborted processes and hangs: (what rank 0 passes, what the others pass).
BROADCASTS: dict[str, tuple[Any, Any]] = {
    "dtype float32 and int32": (torch.ones(2), torch.zeros(2, dtype=torch.int32)),
    "dtype float32 and float64": (torch.ones(2), torch.zeros(2, dtype=torch.float64)),
    "ndim": (torch.zeros(2, 3), torch.zeros(4)),
    "str and tensor": ("text", torch.zeros(16)),
    "None and tensor": (None, torch.zeros(2)),
}


def mismatched_broadcast(rank: int, case: str) -> str:
    return words_of(lambda: helpers.broadcast(BROADCASTS[case][min(rank, 1)], world()))


@pytest.mark.parametrize("case", BROADCASTS)
def test_a_broadcast_of_different_things_raises_on_every_rank(four: GroupPool, case: str) -> None:
    found = four.run(mismatched_broadcast, case)
    assert len(set(found)) == 1
    assert found[0].startswith("GroupMismatchError: broadcast: kinds, dtypes or numbers of dims differ")
    assert "(the source), rank 1:" in found[0]


def none_elsewhere(rank: int, item: Any) -> Any:
    return helpers.broadcast(item if rank == 0 else None, world())


def test_none_on_the_other_ranks_takes_part(four: GroupPool) -> None:
    for got in four.run(none_elsewhere, torch.tensor([[1.5, 2.5]], dtype=torch.bfloat16)):
        assert got.dtype == torch.bfloat16
        assert got.tolist() == [[1.5, 2.5]]
    plain = {"a": [1, 2.5, None, True], "b": (b"\x00\xff", "text"), "dict": {"tuple": ()}}
    assert four.run(none_elsewhere, plain) == [plain] * 4


def not_plain_on_rank_2(rank: int) -> str:
    return words_of(lambda: helpers.broadcast({1, 2} if rank == 2 else "text", world()))


def test_an_object_that_is_not_plain_data_is_refused_on_every_rank(four: GroupPool) -> None:
    found = four.run(not_plain_on_rank_2)
    assert "an object of type set cannot be sent" in found[2]
    assert found[2].startswith("ConfigError")
    for rank in (0, 1, 3):
        assert found[rank].startswith("GroupMismatchError: broadcast: it failed on some ranks")
        assert "rank 2: an object of type set" in found[rank]


# What rank r gathers, along dim 0.
GATHERS: dict[str, tuple[Callable[[int], Tensor], str]] = {
    "lengths": (lambda rank: torch.zeros(2 + rank, 2), "rank 0: 2, rank 1: 3, rank 2: 4, rank 3: 5"),
    "dtypes": (lambda rank: torch.zeros(2, dtype=torch.int32 if rank else None), "rank 0: torch.float32"),
    "other dims": (lambda rank: torch.zeros(2, 2 + rank), r"rank 0: \[2\], rank 1: \[3\]"),
    "no such dim": (lambda rank: torch.zeros(2 if rank else ()), "rank 0: seq_dim=0: the tensor has 0 dims"),
}


def mismatched_gather(rank: int, case: str, name: str) -> str:
    return words_of(lambda: getattr(helpers, name)(GATHERS[case][0](rank), 0, world()))


@pytest.mark.parametrize("name", ["cat_outputs_cp", "cat_outputs_cp_with_grad"])
@pytest.mark.parametrize("case", GATHERS)
def test_gathering_different_shapes_raises_on_every_rank(four: GroupPool, case: str, name: str) -> None:
    for words in four.run(mismatched_gather, case, name)[1:]:
        with pytest.raises(GroupMismatchError, match=GATHERS[case][1]):
            raise GroupMismatchError(words)


def gradients_on_some_ranks(rank: int) -> str:
    x = torch.zeros(2, requires_grad=rank != 2)
    return words_of(lambda: helpers.cat_outputs_cp_with_grad(x, 0, world(), gradient="sum"))


def test_a_summed_gradient_is_wanted_by_all_ranks_or_by_none(four: GroupPool) -> None:
    """Otherwise the backward pass of some would wait for the others."""
    found = four.run(gradients_on_some_ranks)
    assert all("rank 1: True, rank 2: False" in words for words in found)


def different_calls(rank: int) -> str:
    x = torch.zeros(2)
    call = helpers.cat_outputs_cp if rank == 1 else helpers.cat_outputs_cp_with_grad
    return words_of(lambda: call(x, 0, world()))


def test_different_helpers_at_once_are_noticed(four: GroupPool) -> None:
    assert all("different functions were called" in words for words in four.run(different_calls))


def late(rank: int) -> str:
    """Rank 3 stays away from a call and is named; the group is given up afterwards."""
    group = dist.new_group([1, 2, 3])
    if rank == 0:
        return ""
    set_timeout(group, timedelta(seconds=1.5))
    if rank < 3:
        with pytest.raises(TransportTimeoutError) as caught:
            helpers.cat_outputs_cp(torch.zeros(1), 0, group)
        return str(caught.value)
    return ""


def test_a_rank_that_stays_away_is_named(four: GroupPool) -> None:
    found = four.run(late)
    assert found[1] == found[2] == "cat_outputs_cp: rank 3 of the group [1, 2, 3] did not take part within 1.5 s"


LENGTHS = [1, 0, 3, 2]


def unequal_parts(rank: int, gradient: str) -> tuple[Any, ...]:
    whole = torch.arange(12.0).reshape(6, 2).t()
    part = helpers.split_inputs_cp(whole, 1, world(), lengths=LENGTHS).requires_grad_()
    joined = helpers.cat_outputs_cp_with_grad(part, -1, world(), gradient=gradient, lengths=LENGTHS)
    (joined * (rank + 1)).sum().backward()
    plain = helpers.cat_outputs_cp(part, 1, world(), lengths=LENGTHS)
    assert part.grad is not None
    assert not plain.requires_grad
    return torch.equal(joined, whole), torch.equal(plain, whole), set(part.grad.flatten().tolist())


@pytest.mark.parametrize(
    ("gradient", "expected"), [("own_slice", [{1.0}, set(), {3.0}, {4.0}]), ("sum", [{10.0}, set(), {10.0}, {10.0}])]
)
def test_both_gradients_and_unequal_parts(four: GroupPool, gradient: str, expected: list[Any]) -> None:
    assert four.run(unequal_parts, gradient) == [(True, True, grads) for grads in expected]


def wrong_lengths(_: int) -> str:
    return words_of(lambda: helpers.cat_outputs_cp(torch.zeros(2), 0, world(), lengths=LENGTHS))


def test_parts_must_be_as_long_as_declared(four: GroupPool) -> None:
    assert all("not as long as lengths=[1, 0, 3, 2] says" in words for words in four.run(wrong_lengths))


def object_lists(rank: int) -> Any:
    mine = helpers.split_inputs_cp_object_list(list("abcdefgh"), world())
    return mine, helpers.cat_outputs_cp_object_list([(rank, mine)], world())


def test_lists_of_objects(four: GroupPool) -> None:
    pairs = [["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"]]
    assert four.run(object_lists) == [(mine, list(enumerate(pairs))) for mine in pairs]


def lives(rank: int) -> dict[str, Any]:
    """Twice the same mesh: nothing stays of the first, WORLD stays, and destroying is idempotent."""
    known = len(dist.distributed_c10d._world.pg_map)
    found: dict[str, Any] = {}
    for _ in range(2):
        helpers.initialize_model_parallel(tp_size=2, pp_size=2)
        found["twice"] = words_of(lambda: helpers.initialize_model_parallel(tp_size=2))
        found["empty"] = [size for size in map(dist.get_world_size, dist.distributed_c10d._world.pg_map) if size < 1]
        found["ends"] = (helpers.is_pipeline_first_stage(), helpers.is_pipeline_last_stage())
        found["world of one"] = dist.get_process_group_ranks(helpers.get_cp_group())
        helpers.destroy_model_parallel(destroy_process_groups=True)
        helpers.destroy_model_parallel(destroy_process_groups=True)
    found["left"] = len(dist.distributed_c10d._world.pg_map) - known
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return found | {"sum over WORLD": total.item()}


def test_destroy_destroys_what_was_made_and_nothing_else(four: GroupPool) -> None:
    for rank, found in enumerate(four.run(lives)):
        assert "initialized already (dp 1 x tp 2 x pp 2 x cp 1)" in found.pop("twice")
        assert found == {
            "empty": [],
            "ends": (rank < 2, rank >= 2),
            "world of one": [rank],
            "left": 0,
            "sum over WORLD": 6.0,
        }


def embedding_groups(_: int, **sizes: int) -> list[int] | None:
    helpers.initialize_model_parallel(**sizes)
    group = helpers.get_embedding_group()
    ranks = None if group is None else dist.get_process_group_ranks(group)
    helpers.destroy_model_parallel()
    return ranks


def embedding_of_one_stage(rank: int) -> list[int] | None:
    return embedding_groups(rank, tp_size=4)


def embedding_of_four_stages(rank: int) -> list[int] | None:
    return embedding_groups(rank, pp_size=4)


def test_no_empty_group_for_first_and_last_stage(four: GroupPool) -> None:
    """TOP-05."""
    assert four.run(embedding_of_one_stage) == [[0], [1], [2], [3]]
    assert four.run(embedding_of_four_stages) == [[0, 3], None, None, [0, 3]]


def different_meshes(rank: int) -> str:
    return words_of(lambda: helpers.initialize_model_parallel(tp_size=2 if rank else 4))


def test_all_ranks_must_want_the_same_mesh(four: GroupPool) -> None:
    assert all("tp_size differs; every rank" in words for words in four.run(different_meshes))


def not_in_the_group(rank: int) -> str:
    group = dist.new_group([0, 1, 2])
    if rank < 3:
        return helpers.broadcast("here", group)
    with pytest.raises(ConfigError, match=r"this rank \(3\) belongs to") as caught:
        helpers.broadcast("here", group)
    return str(caught.value)


def test_a_rank_outside_the_group_is_told_so(four: GroupPool) -> None:
    assert four.run(not_in_the_group)[:3] == ["here"] * 3


def sharded_models(rank: int) -> Any:
    """Replicas along 'replicate', shards along 'shard': each rank broadcasts and averages what it holds itself."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    models = []
    for value in (10.0 + rank, 1.0):
        model = nn.Linear(3, 5, bias=False)
        whole = torch.full((5, 3), value)
        local = DTensor.from_local(whole[:3] if rank % 2 == 0 else whole[3:], mesh["shard"], [Shard(0)])
        model.weight = nn.Parameter(local)
        models.append(model)
    source, average = models
    helpers.broadcast_dtensor_model_states(source, mesh)
    helpers.DTensorFastEmaModelUpdater().update_average(source, average, beta=0.5)
    return [helpers.get_local_tensor_if_dtensor(model.weight).detach() for model in models]


def test_dtensors_are_broadcast_and_averaged_shard_by_shard(four: GroupPool) -> None:
    for rank, (source, average) in enumerate(four.run(sharded_models)):
        assert source.shape == ((3, 3) if rank % 2 == 0 else (2, 3))
        assert source.unique().tolist() == [10.0 + rank % 2]
        assert average.unique().tolist() == [(1 + 10.0 + rank % 2) / 2]


def models_that_differ(rank: int) -> str:
    mesh = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("replicate",))
    model = nn.Linear(2, 3 if rank == 1 else 2)
    return words_of(lambda: helpers.broadcast_dtensor_model_states(model, mesh))


def test_models_that_differ_are_not_broadcast(four: GroupPool) -> None:
    assert all("the models differ; every rank" in words for words in four.run(models_that_differ))


WIDTH, MICRO_ROWS = 4, (3, 1, 2, 2, 1, 3)


def stage_module(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def micro_inputs() -> list[Tensor]:
    torch.manual_seed(99)
    return [torch.randn(rows, WIDTH) for rows in MICRO_ROWS]


def micro_loss(output: Tensor, micro: int) -> Tensor:
    return output.square().sum() * (micro + 1)


def pipeline_step(rank: int, schedule: str, chunks: int) -> tuple[list[float], list[Tensor]]:
    helpers.dist_init(pp_size=4)
    scheduler = helpers.pp_scheduler()
    stages = [stage_module(chunk * 4 + rank) for chunk in range(chunks)]
    losses = scheduler.step(
        stages,
        micro_inputs() if rank == 0 else None,
        micro_batches=len(MICRO_ROWS),
        loss=micro_loss if rank == 3 else None,
        schedule=schedule,
    )
    helpers.destroy_model_parallel()
    return [float(loss) for loss in losses], [p.grad for stage in stages for p in stage.parameters()]  # type: ignore[misc]


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])
def test_a_pipeline_step_equals_one_process(four: GroupPool, schedule: str, chunks: int) -> None:
    whole = nn.Sequential(*[stage_module(stage) for stage in range(4 * chunks)])
    expected = [micro_loss(whole(x), micro) for micro, x in enumerate(micro_inputs())]
    torch.stack(expected).sum().backward()
    answers = four.run(pipeline_step, schedule, chunks)
    assert [losses for losses, _ in answers[:3]] == [[]] * 3
    assert answers[3][0] == pytest.approx([loss.item() for loss in expected], rel=1e-6)
    for rank, (_, grads) in enumerate(answers):
        own = [p for chunk in range(chunks) for p in whole[chunk * 4 + rank].parameters()]
        for parameter, grad in zip(own, grads, strict=True):
            torch.testing.assert_close(grad, parameter.grad, rtol=1e-6, atol=1e-7)


def frozen_first_stage(rank: int) -> list[Any]:
    helpers.initialize_model_parallel(pp_size=4)
    helpers.init_pp_scheduler()
    stage = stage_module(rank).requires_grad_(rank == 2)
    helpers.pp_scheduler().step(
        [stage],
        micro_inputs() if rank == 0 else None,
        micro_batches=len(MICRO_ROWS),
        loss=micro_loss if rank == 3 else None,
    )
    helpers.destroy_model_parallel()
    return [None if p.grad is None else True for p in stage.parameters()]


def test_stages_without_gradients_take_part(four: GroupPool) -> None:
    assert four.run(frozen_first_stage) == [[None, None], [None, None], [True, True], [None, None]]


def transfers(rank: int) -> Any:
    helpers.initialize_model_parallel(pp_size=4)
    helpers.init_pp_scheduler()
    scheduler = helpers.pp_scheduler()
    words = words_of(helpers.init_pp_scheduler)
    for _ in range(2):
        scheduler.queue_irecv_prev(torch.Size([2]), torch.float32)
    sending = [scheduler.isend_next(torch.full((2,), 10.0 * rank + number)) for number in range(2)]
    got = [scheduler.queue_irecv_prev_data().tolist() for _ in range(2)]
    for work in sending:
        work.wait()
    empty = words_of(scheduler.queue_irecv_prev_data)
    helpers.destroy_model_parallel()
    return got, "already initialized" in words, "nothing was queued" in empty, words_of(helpers.pp_scheduler)


def test_transfers_between_neighbours(four: GroupPool) -> None:
    for rank, (got, twice, empty, after) in enumerate(four.run(transfers)):
        before = 10.0 * ((rank - 1) % 4)
        assert got == [[before, before], [before + 1, before + 1]]
        assert twice
        assert empty
        assert "scheduler is not initialized" in after


def misplaced(rank: int) -> str:
    helpers.initialize_model_parallel(pp_size=4)
    helpers.init_pp_scheduler()
    inputs = micro_inputs() if rank in (0, 2) else None
    loss = micro_loss if rank == 3 else None
    words = words_of(lambda: helpers.pp_scheduler().step([nn.Tanh()], inputs, micro_batches=6, loss=loss))
    helpers.destroy_model_parallel()
    return words


def test_inputs_at_the_wrong_rank_are_refused_everywhere(four: GroupPool) -> None:
    found = four.run(misplaced)
    assert found[2].startswith("ConfigError: inputs: expected 6 tensors")
    assert all("rank 2: inputs: expected 6 tensors" in found[rank] for rank in (0, 1, 3))
