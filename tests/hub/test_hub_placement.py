"""Where ranks go: the documented rule, capacity, memory, and the same answer every time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hub_kit import spec
from hypothesis import given
from hypothesis import strategies as st

from distensor.core.control import DeviceKind, JobSpec
from distensor.core.errors import PlacementError
from distensor.core.ids import DeviceId, NodeId, Rank
from distensor.core.parallel import Axis, ParallelConfig, RankLayout
from distensor.hub.placement import DeviceOffer, NodeOffer, passed_over, place, site_of


def node(name: str, *devices: tuple[DeviceKind, int] | DeviceOffer) -> NodeOffer:
    offers = tuple(
        device
        if isinstance(device, DeviceOffer)
        else DeviceOffer(device_id=DeviceId(f"{device[0]}:{index}"), kind=device[0], slots=device[1])
        for index, device in enumerate(devices)
    )
    return NodeOffer(node_id=NodeId(f"n_{name}"), name=name, devices=offers)


def cpus(name: str, slots: int) -> NodeOffer:
    return node(name, (DeviceKind.CPU, slots))


def where(job: JobSpec, *offers: NodeOffer) -> list[str]:
    names = {offer.node_id: offer.name for offer in offers}
    return [names[one.node_id] for one in place(job, offers)]


def job(**sizes: int) -> JobSpec:
    return replace(spec(csr="csr"), parallel=ParallelConfig(**sizes))


def test_each_replica_of_the_main_job_has_a_node_of_its_own() -> None:
    main = job(data_parallel=2, pipeline_parallel=2)
    assert where(main, cpus("a", 2), cpus("b", 2)) == ["a", "a", "b", "b"]


def test_replicas_spread_even_where_one_node_could_take_all() -> None:
    main = job(data_parallel=2, pipeline_parallel=2)
    assert where(main, cpus("a", 4), cpus("b", 4)) == ["a", "a", "b", "b"]


def test_a_replica_that_fits_nowhere_whole_is_cut_by_stage() -> None:
    wide = job(tensor_parallel=2, pipeline_parallel=2)
    assert where(wide, cpus("a", 2), cpus("b", 3)) == ["b", "b", "a", "a"]


def test_a_stage_that_fits_nowhere_whole_is_cut_by_tensor_coordinate() -> None:
    assert where(job(tensor_parallel=3), cpus("a", 1), cpus("b", 2)) == ["b", "b", "a"]


def test_parts_stay_near_the_part_before() -> None:
    assert where(job(pipeline_parallel=5), cpus("a", 3), cpus("b", 4)) == ["b", "b", "b", "b", "a"]


def test_accelerators_come_before_the_cpu() -> None:
    mixed = node("a", (DeviceKind.CPU, 4), (DeviceKind.CUDA, 1))
    assert [one.device_id for one in place(job(pipeline_parallel=2), [mixed])] == ["cuda:1", "cpu:0"]


def test_only_the_kinds_that_were_asked_for_count() -> None:
    wanted = replace(job(), device_kinds=(DeviceKind.CUDA,))
    with pytest.raises(PlacementError, match="0 free slots of kind cuda"):
        place(wanted, [cpus("a", 4)])


def test_too_few_slots_names_both_numbers_and_the_nodes() -> None:
    with pytest.raises(PlacementError) as caught:
        place(job(data_parallel=2, pipeline_parallel=3), [cpus("atlas-1", 2), cpus("atlas-2", 1)])
    text = str(caught.value)
    assert "needs 6 workers (dp 2 x tp 1 x pp 3 x cp 1)" in text
    assert "3 free slots on 2 connected nodes (atlas-1 2, atlas-2 1)" in text
    assert "not connected" not in text


def test_known_nodes_that_are_away_are_counted() -> None:
    with pytest.raises(PlacementError, match=r"0 connected nodes \(2 more known and not connected right now\)"):
        place(job(), [], away=2)


def test_no_node_at_all_is_an_error_too() -> None:
    with pytest.raises(PlacementError, match="0 free slots on 0 connected nodes"):
        place(job(), [])


def test_a_thousand_nodes_are_not_all_named() -> None:
    with pytest.raises(PlacementError, match="and 992 more") as caught:
        place(job(), [cpus(f"node-{index}", 0) for index in range(1000)])
    assert len(str(caught.value)) < 500


def gpu(index: int, free: int) -> DeviceOffer:
    return DeviceOffer(device_id=DeviceId(f"cuda:{index}"), kind=DeviceKind.CUDA, slots=2, free_bytes=free)


def test_a_rank_goes_where_its_memory_is() -> None:
    two = replace(job(pipeline_parallel=2), bytes_per_rank=(50, 90))
    assert [one.device_id for one in place(two, [node("a", gpu(0, 60), gpu(1, 100))])] == ["cuda:0", "cuda:1"]


def test_a_device_is_not_filled_beyond_its_memory() -> None:
    two = replace(job(data_parallel=2), bytes_per_rank=(60, 60))
    with pytest.raises(PlacementError, match="rank 1 needs 60 bytes, the largest free device has 40"):
        place(two, [node("a", gpu(0, 100))])


SIZES = st.integers(min_value=1, max_value=3)


@given(st.lists(st.integers(min_value=0, max_value=9), max_size=6), SIZES, SIZES, SIZES, SIZES, st.booleans())
def test_a_tensor_group_is_split_only_where_no_node_has_room(slots, dp, pp, tp, cp, last) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Whatever the order of the axes: tensor-parallel ranks talk most."""
    order = "dp-pp-cp-tp" if last else "tp-cp-pp-dp"
    parallel = ParallelConfig(
        data_parallel=dp, pipeline_parallel=pp, tensor_parallel=tp, context_parallel=cp, order=order
    )
    if parallel.world_size > sum(slots):
        return
    offers = [cpus(f"n{index}", count) for index, count in enumerate(slots)]
    nodes = {one.rank: one.node_id for one in place(replace(spec(csr="csr"), parallel=parallel), offers)}
    groups = RankLayout(parallel).groups(Axis.TP)
    whole = sum(len({nodes[rank] for rank in group}) == 1 for group in groups)
    assert whole >= min(len(groups), sum(count // tp for count in slots))


@given(st.lists(st.integers(min_value=0, max_value=6), max_size=6), SIZES, SIZES, SIZES, st.randoms())
def test_every_rank_has_one_free_slot_or_all_is_refused(slots, dp, pp, tp, random) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    offers = [cpus(f"n{index}", count) for index, count in enumerate(slots)]
    wanted = job(data_parallel=dp, pipeline_parallel=pp, tensor_parallel=tp)
    if dp * pp * tp > sum(slots):
        with pytest.raises(PlacementError):
            place(wanted, offers)
        return
    places = place(wanted, offers)
    assert [one.rank for one in places] == [Rank(rank) for rank in range(dp * pp * tp)]
    for offer in offers:
        assert sum(one.node_id == offer.node_id for one in places) <= offer.slots
    random.shuffle(offers)
    assert place(wanted, offers) == places, "the order in which nodes are listed must not matter"


# Speed, sites, and reasons


def fast(name: str, slots: int, flops: float | None, kind: DeviceKind = DeviceKind.CPU, site: str = "") -> NodeOffer:
    device = DeviceOffer(device_id=DeviceId(f"{kind}:0"), kind=kind, slots=slots, flops=flops)
    return NodeOffer(node_id=NodeId(f"n_{name}"), name=name, devices=(device,), site=site)


def test_a_node_that_is_twice_as_fast_comes_before_one_with_more_room() -> None:
    assert where(job(), fast("big", 8, 1e11), fast("swift", 1, 4e11)) == ["swift"]
    assert where(job(), fast("big", 8, 1.1e11), fast("same", 1, 1.3e11)) == ["big"]


def test_a_device_that_nobody_has_measured_counts_as_usual_for_its_kind() -> None:
    assert where(job(), fast("cpu", 8, None), fast("gpu", 1, None, DeviceKind.CUDA)) == ["gpu"]
    assert where(job(), fast("cpu", 8, 1e11), fast("gpu", 1, None, DeviceKind.CUDA)) == ["gpu"]


def test_a_faster_device_of_a_node_is_taken_first() -> None:
    slow, quick = gpu(0, 100), replace(gpu(1, 100), flops=2e13)
    assert [one.device_id for one in place(job(), [node("a", replace(slow, flops=1e13), quick)])] == ["cuda:1"]


def test_a_pipeline_stays_at_its_site_even_where_others_are_faster() -> None:
    home, next_door = fast("home", 2, 1e12, site="10.0.0.0/24"), fast("next", 1, 1e11, site="10.0.0.0/24")
    away = fast("away", 1, 9e11, site="198.51.100.7")
    assert where(job(pipeline_parallel=3), away, next_door, home) == ["home", "home", "next"]


def test_a_tensor_group_is_split_within_a_site_and_never_over_several() -> None:
    here = [cpus("a", 1), cpus("b", 1)]
    far = [replace(cpus("c", 1), site="198.51.100.7"), replace(cpus("d", 1), site="203.0.113.9")]
    wanted = job(tensor_parallel=2)
    assert where(wanted, far[0], *here) == ["a", "b"]
    with pytest.raises(PlacementError) as caught:
        place(wanted, far)
    assert "tensor-parallel group of ranks 0, 1 fits on no node and no site (free slots: c 1, d 1)" in str(caught.value)
    assert "DISTENSOR_SPLIT_TENSOR=1" in str(caught.value)
    assert where(replace(wanted, split_tensor=True), *far) == ["c", "d"]


def test_a_group_that_fits_at_no_site_leaves_nothing_behind() -> None:
    """The trial at the first site is taken back: its slot is free for the second one."""
    sites = [
        replace(cpus(name, slots), site=site) for name, slots, site in (("a", 1, "x"), ("b", 1, "y"), ("c", 1, "y"))
    ]
    two = job(data_parallel=1, tensor_parallel=2)
    assert where(two, *sites) == ["b", "c"]


def test_every_rank_says_why_it_is_where_it_is() -> None:
    places = place(job(pipeline_parallel=5), [cpus("a", 3), cpus("b", 4)])
    assert places[0].why.startswith("stage together: the fastest node with room")
    assert {one.why for one in places[1:4]} == {"stage together: on the node of the part before"}
    assert "at the site of the part before" in places[4].why
    assert "whole replica together" in place(job(), [cpus("a", 3)])[0].why


def test_every_node_that_was_passed_over_says_why() -> None:
    paused = replace(node("paused"), accepting=False)
    offers = [cpus("full", 0), paused, node("small", gpu(0, 10)), cpus("spare", 1), node("best", gpu(0, 900))]
    wanted = replace(job(), bytes_per_rank=(50,))
    assert {one.name: one.why.partition(":")[0] for one in passed_over(wanted, offers, place(wanted, offers))} == {
        "full": "no free slot",
        "paused": "it takes no new work now",
        "small": "too little memory",
        "spare": "not needed",
    }
    cuda = replace(wanted, device_kinds=(DeviceKind.CUDA,))
    assert passed_over(cuda, [cpus("spare", 1)], [])[0].why == "no free slot of kind cuda"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("", "127.0.0.1", True),
        ("192.168.1.5", "192.168.1.77", True),
        ("192.168.1.5", "192.168.2.5", False),
        ("203.0.113.5", "203.0.113.5", True),
        ("8.8.8.8", "8.8.8.9", False),
        ("2001:db8:0:1::5", "2001:db8:0:1::9", True),
        ("2001:db8:0:1::5", "2001:db8:0:2::5", False),
        ("", "192.168.1.5", False),
    ],
)
def test_a_site_is_a_network_as_the_hub_sees_it(one: str, other: str, same: bool) -> None:
    assert (site_of(one) == site_of(other)) is same


@given(st.text())
def test_any_host_has_a_site(host: str) -> None:
    assert isinstance(site_of(host), str)
