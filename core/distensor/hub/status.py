"""`distensor hub status`: whether a hub serves, and what it has."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass, replace

from distensor.comm import HubClient
from distensor.comm.tokens import Role
from distensor.core.errors import ControlError
from distensor.core.ids import Generation
from distensor.hub.place import Place
from distensor.hub.repository import Store
from distensor.hub.state_directory import StateDirectory
from distensor.hub.stores.address import Database, DatabaseAddress
from distensor.hub.stores.opening import lease_age_of, open_store

ANSWER_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HubStatus:
    """What the books say, and what the hub that serves on them says."""

    address: str
    fingerprint: str
    books: str
    known_nodes: int
    jobs: dict[str, int]
    """By state: those that have not ended, and the newest of those that have."""
    lease_seconds: float | None
    """How long ago the hub in the database said that it serves; None in a file, or where none ever did."""
    trouble: str
    """Why no hub answers; empty where one does."""
    generation: Generation | None = None
    connected_nodes: int = 0
    workers: int = 0
    free_workers: int = 0

    def values(self) -> dict[str, object]:
        """For JSON."""
        return {"v": 1, "serves": not self.trouble, **asdict(self)}

    def __str__(self) -> str:
        lines = [f"hub      {self.address}, authority {self.fingerprint[:16]}"]
        if self.trouble:
            lines.append(f"serves   no: {self.trouble}")
            lines.append(f"nodes    {self.known_nodes} known")
        else:
            lines.append(f"serves   yes, start {self.generation}")
            lines.append(f"nodes    {self.connected_nodes} of {self.known_nodes} connected")
            lines.append(f"workers  {self.free_workers} of {self.workers} free")
        lines.append("jobs     " + (", ".join(f"{count} {state}" for state, count in self.jobs.items()) or "none"))
        lease = "" if self.lease_seconds is None else f", lease renewed {self.lease_seconds:.1f} s ago"
        lines.append(f"books    {self.books}{lease}")
        return "\n".join(lines)


def status_of_hub(directory: StateDirectory, place: Place, database: Database) -> HubStatus:
    """Ask the books and the hub.

    Raises:
        StoreError: the books cannot be read.
    """
    with closing(open_store(database)) as store:
        status = _of_books(store, place, database)
    if isinstance(database, DatabaseAddress):
        status = replace(status, lease_seconds=lease_age_of(database))
    try:
        with HubClient(place.token(Role.TRAINER, directory.trainer_secret()), timeout=ANSWER_SECONDS) as client:
            mesh = client.query_mesh()
    except ControlError as error:
        return replace(status, trouble=str(error))
    return replace(
        status,
        trouble="",
        generation=mesh.generation,
        connected_nodes=sum(node.connected for node in mesh.nodes),
        workers=sum(device.slots for device in mesh.devices if device.unusable is None),
        free_workers=mesh.available_workers,
    )


def _of_books(store: Store, place: Place, database: Database) -> HubStatus:
    with store.reading() as books:
        snapshot = books.snapshot()
    return HubStatus(
        address=str(place.address),
        fingerprint=place.fingerprint,
        books=str(database),
        known_nodes=len(snapshot.nodes),
        jobs=dict(sorted(Counter(job.state.value for job in snapshot.jobs).items())),
        lease_seconds=None,
        trouble="not asked yet",
    )
