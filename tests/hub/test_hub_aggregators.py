"""Where a job's aggregators go, and what becomes of them in the next epoch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hub_kit import spec
from machine_kit import NAMES, A, B, Hub, ready, sent, updates

from distensor.comm.messages import Register, TopologyGrant
from distensor.core import ParallelConfig
from distensor.core.control import Assignment, DeviceKind, JobState, Reconfiguration
from distensor.core.errors import PlacementError
from distensor.core.ids import DeviceId, Epoch, NodeId, Rank
from distensor.hub.placement import DeviceOffer, NodeOffer, place


def node(name: str, kind: DeviceKind, slots: int) -> NodeOffer:
    device = DeviceOffer(device_id=DeviceId(kind.value), kind=kind, slots=slots)
    return NodeOffer(node_id=NodeId(f"n_{name}"), name=name, devices=(device,))


WORKERS = node("atlas", DeviceKind.CPU, 3), node("bolt", DeviceKind.CPU, 2)
CASA, LAB = node("casa", DeviceKind.AGGREGATOR, 1), node("lab", DeviceKind.AGGREGATOR, 4)


def where(*aggregators: str, offers: tuple[NodeOffer, ...] = (*WORKERS, CASA, LAB), world: int = 2) -> list[str]:
    job = replace(spec(csr="csr"), parallel=ParallelConfig(data_parallel=world), aggregators=aggregators)
    names = {offer.node_id: offer.name for offer in offers}
    places = place(job, offers)
    assert [one.rank for one in places] == list(range(world + len(aggregators)))
    return [names[one.node_id] for one in places[world:]]


def test_they_go_where_they_are_named_or_where_there_is_room() -> None:
    assert where("") == ["casa"]  # the first by name
    assert where("lab", "") == ["lab", "casa"]
    assert where("", "") == ["casa", "lab"]  # not twice on the same one
    assert where("bolt") == ["bolt"]  # in a worker of that node
    assert where("atlas", "bolt") == ["atlas", "bolt"]


@pytest.mark.parametrize(
    ("aggregators", "world"), [(("",) * 3, 2), (("nobody",), 2), (("bolt",), 5), (("casa", "casa"), 2)]
)
def test_a_job_without_room_for_its_aggregators_is_refused(aggregators: tuple[str, ...], world: int) -> None:
    with pytest.raises(PlacementError, match="needs an aggregator"):
        where(*aggregators, world=world)


def test_no_rank_of_a_mesh_goes_to_an_aggregator() -> None:
    with pytest.raises(PlacementError, match="the mesh has 0 free slots"):
        where(offers=(CASA, LAB))


def test_the_topology_has_them_after_the_ranks_and_the_next_epoch_does_without_one_that_is_gone() -> None:
    hub = Hub()
    first = hub.connect(A)
    service, _ = hub.join(B)
    info = hub.machine.node(B).info  # type: ignore[union-attr]
    hub.machine.leave(service, hub.now)
    device = replace(info.devices[0], device_id=DeviceId("aggregator"), kind=DeviceKind.AGGREGATOR)
    hub.machine.join(service, B, Register(info=replace(info, devices=(device,))), hub.now)
    hub.beat(service)
    wanted = replace(spec(csr="driver"), parallel=ParallelConfig(data_parallel=2), aggregators=("",))
    job_id, _, effects = hub.machine.submit("main", wanted, hub.now)
    assert [(s, one.rank) for s, one in sent(effects, Assignment)] == [(first, 0), (first, 1), (service, 2)]  # type: ignore[attr-defined]
    for rank in (0, 1):
        effects = hub.machine.worker_ready(first, ready(job_id, rank))
        assert updates(effects)[-1].state is JobState.PLACED
    effects = hub.machine.worker_ready(service, ready(job_id, 2))
    assert updates(effects)[-1].state is JobState.RUNNING
    ((_, grant), *_) = sent(effects, TopologyGrant)
    members = grant.topology.members  # type: ignore[attr-defined]
    assert [(member.rank, member.node_name) for member in members] == [(0, NAMES[A]), (1, NAMES[A]), (2, NAMES[B])]
    assert hub.machine.mesh(hub.now).available_workers == 0
    hub.machine.leave(service, hub.now)
    change = Reconfiguration(
        job_id=job_id, request="r", epoch=Epoch(1), parallel=wanted.parallel, continues=(Rank(0), Rank(1)),
        csr_pem="driver", aggregators=("",),
    )  # fmt: skip
    _, effects = hub.machine.reconfigure("main", change, hub.now)
    assert [one.rank for _, one in sent(effects, Assignment)] == [0, 1]  # type: ignore[attr-defined]
