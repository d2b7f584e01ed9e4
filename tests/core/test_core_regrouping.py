"""Who goes on as whom when members of a job are lost, or come."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distensor.core import ParallelConfig, RankLayout
from distensor.core.regrouping import place_of, with_replaced, with_replicas, without_lost


def test_a_whole_replica_that_is_lost_is_left_out() -> None:
    found = without_lost(ParallelConfig(data_parallel=3, pipeline_parallel=2), {0, 1, 4, 5})
    assert found is not None
    assert found.parallel.data_parallel == 2
    assert found.continues == (0, 1, 4, 5)
    assert found.new == ()


def test_the_rest_of_a_broken_replica_goes() -> None:
    found = without_lost(ParallelConfig(data_parallel=2, pipeline_parallel=2), {0, 1, 3})
    assert found is not None
    assert found.continues == (0, 1)


def test_a_replica_is_put_together_from_two_broken_ones() -> None:
    """Rank 1 of the first and rank 2, the first stage of the second: what they hold is equal to what is missing."""
    found = without_lost(ParallelConfig(data_parallel=2, pipeline_parallel=2), {1, 2})
    assert found is not None
    assert found.parallel.data_parallel == 1
    assert found.continues == (2, 1)


def test_nobody_is_left_for_a_place() -> None:
    assert without_lost(ParallelConfig(data_parallel=2, pipeline_parallel=2), {0, 2}) is None
    assert without_lost(ParallelConfig(pipeline_parallel=2), {1}) is None
    assert with_replaced(ParallelConfig(pipeline_parallel=2), {1}).new == (0,)


SIZES = st.integers(1, 3)
ORDERS = st.sampled_from(["tp-cp-pp-dp", "dp-tp-pp-cp", "pp-dp-cp-tp"])


@given(data=st.data(), dp=SIZES, tp=SIZES, pp=SIZES, cp=SIZES, order=ORDERS)
def test_every_rank_keeps_its_place_and_nobody_is_two(
    data: st.DataObject, dp: int, tp: int, pp: int, cp: int, order: str
) -> None:
    parallel = ParallelConfig(
        data_parallel=dp, tensor_parallel=tp, pipeline_parallel=pp, context_parallel=cp, order=order
    )
    alive = data.draw(st.sets(st.sampled_from(range(parallel.world_size))))
    for found in (without_lost(parallel, alive), with_replaced(parallel, alive), with_replicas(parallel, dp + 1)):
        if found is None:
            continue
        before, after = RankLayout(parallel), RankLayout(found.parallel)
        kept = [rank for rank in found.continues if rank is not None]
        assert len(set(kept)) == len(kept)
        assert len(found.continues) == found.parallel.world_size
        for rank, was in enumerate(found.continues):
            if was is not None:
                assert place_of(after.coordinates(rank)) == place_of(before.coordinates(was))


@given(data=st.data(), dp=SIZES, pp=SIZES)
def test_as_many_replicas_as_there_can_be(data: st.DataObject, dp: int, pp: int) -> None:
    parallel = ParallelConfig(data_parallel=dp, pipeline_parallel=pp)
    alive = data.draw(st.sets(st.sampled_from(range(parallel.world_size))))
    layout = RankLayout(parallel)
    most = min(sum(layout.coordinates(rank).pp == stage for rank in alive) for stage in range(pp))
    found = without_lost(parallel, alive)
    assert (0 if found is None else found.parallel.data_parallel) == most
    if found is not None:
        assert set(found.continues) <= alive


def test_further_replicas_are_of_new_workers() -> None:
    found = with_replicas(ParallelConfig(data_parallel=2, order="dp"), 3)
    assert found.continues == (0, 1, None)
    assert found.new == (2,)


@pytest.mark.parametrize("order", ["dp-pp", "pp-dp"])
def test_the_order_of_the_axes_is_kept(order: str) -> None:
    parallel = ParallelConfig(data_parallel=2, pipeline_parallel=2, order=order)
    found = with_replicas(parallel, 3)
    layout = RankLayout(found.parallel)
    assert found.parallel.order == order
    assert {layout.coordinates(rank).dp for rank in found.new} == {2}
