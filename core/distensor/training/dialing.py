"""How a trainer reaches the workers of an epoch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from distensor.core import DRIVER_RANK, Clock, Epoch, JobId, Rank
from distensor.core.control import JobUpdate
from distensor.transport import (
    Credentials,
    DataPlane,
    FrameLimits,
    LocalMeeting,
    PeerId,
    Timeouts,
    places_at,
    relay_at,
)
from distensor.transport.driver import PART_BYTES

LATER_CONNECT_SECONDS = 10.0
"""How long the ranks of a later epoch may take to meet; whoever does not come is lost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dialing:
    """How the workers are reached."""

    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: FrameLimits = field(default_factory=FrameLimits)

    def later(self) -> Dialing:
        """In an epoch after the first, where the others wait already."""
        return replace(self, timeouts=replace(self.timeouts, connect=LATER_CONNECT_SECONDS))


DEFAULT_DIALING = Dialing()


def frame_limits(largest_tensor: int) -> FrameLimits:
    """A message holds one part, or one tensor where that is larger."""
    body = max(4 * PART_BYTES, 2 * largest_tensor)
    return FrameLimits(body=body, queued=body)


def dial(update: JobUpdate, job_id: JobId, epoch: Epoch, key_pem: bytes, dialing: Dialing, clock: Clock) -> DataPlane:
    """To all ranks of the mesh; with aggregators a trainer has nothing to do."""
    topology, certificate = update.topology, update.certificate
    assert topology is not None
    assert certificate is not None
    world = topology.parallel.world_size
    return DataPlane.open(
        me=PeerId(job_id=job_id, epoch=epoch, rank=Rank(DRIVER_RANK)),
        credentials=Credentials(
            key_pem=key_pem,
            certificate_pem=certificate.certificate_pem,
            authority_pem=certificate.authority_pem,
        ),
        listener=None,
        peers={m.rank: places_at((m.host, *m.hosts), m.port) for m in topology.members[:world]},
        timeouts=dialing.timeouts,
        limits=dialing.limits,
        clock=clock,
        local=LocalMeeting(),
        relay=relay_at(topology.relay),
    )
