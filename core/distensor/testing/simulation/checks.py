"""The promises, looked at with every event: what the parties did and heard, against what the hub's books say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from distensor.comm.messages import ClaimsAnswer, HubToNode, TopologyGrant, Welcome
from distensor.core.control import Assignment, JobState, Mesh, NodeInfo, Unit, UnitKey, WorkerReady
from distensor.core.ids import DRIVER_RANK, DeviceId, Epoch, Generation, JobId, NodeId, Rank
from distensor.core.statement import UnitState
from distensor.hub.ledger.accounts import MICRO_PER_MICRO_BATCH
from distensor.hub.metering import PlaceOfWork, Posting, UnitRecord
from distensor.hub.records import JobRecord, NodeRecord, RankRecord
from distensor.hub.repository import Books
from distensor.testing.simulation.disk import Written
from distensor.testing.simulation.trace import Promise, Trace, ViolationError

SLACK = 0.001
LONGEST_TICK = 1.0
Place = tuple[JobId, Epoch, Rank]


class Checks:
    """`slots`: how many workers a device takes, by the name of its machine.

    Attributes:
        violation: the first one, once there is one.
        counts: how often each kind of thing happened.
    """

    def __init__(self, trace: Trace, time: Callable[[], float]) -> None:
        self._trace = trace
        self._time = time
        self.violation: ViolationError | None = None
        self.counts: Counter[str] = Counter()
        self.machines: dict[NodeId, str] = {}
        self.jobs: dict[JobId, JobRecord] = {}
        self.places: dict[Place, tuple[NodeId, DeviceId]] = {}
        self.owners: dict[JobId, str] = {}
        self.units: dict[UnitKey, UnitRecord] = {}
        self.postings: dict[UnitKey, Posting] = {}
        self.generation = Generation(0)
        self._unheard: list[list[Written]] = []
        self._nodes: dict[NodeId, NodeRecord] = {}
        self._submissions: dict[tuple[str, str], JobId] = {}
        self._claimed: dict[UnitKey, set[tuple[NodeId, int]]] = {}
        self._received: dict[UnitKey, set[int]] = {}
        self._ports: dict[Place, set[int]] = {}
        self.acked_claims: set[UnitKey] = set()
        self.acked_receipts: set[UnitKey] = set()
        self._acked_nodes: dict[str, NodeId] = {}
        self._watched: dict[JobId, Epoch] = {}

    def broken(self, promise: Promise, text: str) -> None:
        """Keep the first one; the world stops with it."""
        if self.violation is None:
            self._trace.note("check", f"{promise.name}: {text}")
            self.violation = ViolationError(promise, text, step=self._trace.steps, seconds=self._time())

    def expect(self, holds: bool, promise: Promise, text: str) -> None:
        if not holds:
            self.broken(promise, text)

    # What the books are changed to

    def committed(self, written: list[Written]) -> None:
        """One transaction is on the disk. Nobody has been told so yet, and a torn disk may still lose it."""
        self._unheard.append(written)

    def crashed(self, *, kept: bool) -> None:
        """The hub is gone; whether what it had committed last, and told nobody, is on the disk."""
        if kept:
            self.answered()
        self._unheard.clear()

    def answered(self) -> None:
        """From now on others hear of what was committed."""
        unheard, self._unheard = self._unheard, []
        for one in (one for written in unheard for one in written):
            check: Callable[..., None] | None = getattr(self, f"_on_{one.what}", None)
            if check is not None:
                check(*one.values)

    def _on_begin_generation(self, generation: Generation) -> None:
        text = f"generation {generation} follows {self.generation}"
        self.expect(generation > self.generation, Promise.GENERATION, text)
        self.generation = generation

    def _on_save_node(self, node: NodeRecord) -> None:
        self._nodes[node.node_id] = node
        others = [other.node_id for other in self._nodes.values() if other.info.name == node.info.name]
        self.expect(len(others) == 1, Promise.GHOST, f"machine {node.info.name} is the nodes {', '.join(others)}")

    def _on_save_info(self, node_id: NodeId, info: NodeInfo) -> None:
        self._on_save_node(replace(self._nodes[node_id], info=info))

    def _on_insert_job(self, job: JobRecord) -> None:
        known = self._submissions.setdefault((job.owner, job.submission), job.job_id)
        text = f"submission {job.submission} of {job.owner} is job {known}, and now {job.job_id}"
        self.expect(known == job.job_id, Promise.SURVIVES, text)
        self.owners[job.job_id] = job.owner
        self._new_ranks(job)

    def _on_begin_epoch(self, job: JobRecord) -> None:
        before = self.jobs[job.job_id].epoch
        self.expect(job.epoch == before + 1, Promise.EPOCH, f"job {job.job_id}: epoch {job.epoch} follows {before}")
        self._new_ranks(job)

    def _new_ranks(self, job: JobRecord) -> None:
        self.counts["epochs"] += 1
        self.jobs[job.job_id] = job
        for rank in job.ranks:
            self._on_save_rank(job.job_id, job.epoch, rank)
        used = Counter((rank.node_id, rank.device_id) for other in self.live_jobs() for rank in other.ranks)
        for (node_id, device_id), ranks in used.items():
            slots = sum(d.slots for d in self._nodes[node_id].info.devices if d.device_id == device_id)
            text = f"{ranks} ranks on {slots} slots of device {device_id} of {self._nodes[node_id].info.name}"
            self.expect(ranks <= slots, Promise.SLOTS, text)

    def live_jobs(self) -> list[JobRecord]:
        return [job for job in self.jobs.values() if not job.state.ended]

    def _on_update_job(self, job: JobRecord) -> None:
        before = self.jobs[job.job_id]
        ended = before.state.ended and (job.state, job.reason) != (before.state, before.reason)
        text = f"job {job.job_id} was {before.state.value} and is {job.state.value}"
        self.expect(not ended, Promise.SURVIVES, text)
        self.jobs[job.job_id] = job

    def _on_save_rank(self, job_id: JobId, epoch: Epoch, rank: RankRecord) -> None:
        place, where = (job_id, epoch, rank.rank), (rank.node_id, rank.device_id)
        known = self.places.setdefault(place, where)
        self.expect(known == where, Promise.OWNER, f"rank {place} was {known}'s and is {where}'s")
        present = self.jobs[job_id].epoch
        self.expect(epoch == present, Promise.EPOCH, f"rank {place} is written in epoch {present}")
        said = rank.port is None or rank.port in self._ports.get(place, ())
        self.expect(said, Promise.EPOCH, f"rank {place} has port {rank.port}, which its worker never said of it")

    def _on_save_units(self, units: list[UnitRecord]) -> None:
        for unit in units:
            self._on_unit(unit)

    def _on_unit(self, unit: UnitRecord) -> None:
        claims = self._claimed.get(unit.key, set())
        claim = unit.claimed is None or (unit.node_id, unit.claimed) in claims
        self.expect(claim, Promise.OWNER, f"{unit.key} counts as claimed by {unit.node_id}, which never did")
        receipt = unit.received is None or unit.received in self._received.get(unit.key, ())
        self.expect(receipt, Promise.OWNER, f"{unit.key} counts as received; its own trainer never said so")
        before = self.units.get(unit.key)
        gone = before is not None and (
            before.claimed not in (None, unit.claimed) or before.received not in (None, unit.received)
        )
        self.expect(not gone, Promise.SURVIVES, f"{unit.key} was {before} and is {unit}")
        self.units[unit.key] = unit

    def _on_post(self, postings: list[Posting]) -> None:
        for posting in postings:
            self._on_posting(posting)

    def _on_posting(self, posting: Posting) -> None:
        self.counts["credited"] += 1
        key, unit = posting.key, self.units.get(posting.key)
        self.expect(key not in self.postings, Promise.LEDGER, f"{key} is credited twice")
        self.postings[key] = posting
        agreed = unit is not None and unit.claimed is not None and unit.claimed == unit.received
        self.expect(agreed, Promise.LEDGER, f"{key} is credited without claim and receipt of one size: {unit}")
        if unit is None or unit.claimed is None:
            return
        right = type(posting.amount) is int and posting.amount == unit.claimed * MICRO_PER_MICRO_BATCH
        self.expect(right, Promise.LEDGER, f"{key} is worth {posting.amount!r} for {unit.claimed} micro-batches")
        who = (self.owners[key.job_id], unit.node_id)
        mine = (posting.owner, posting.node_id) == who
        self.expect(mine, Promise.LEDGER, f"{key} goes from {posting.owner} to {posting.node_id}, not {who}")

    # What nodes say and hear

    def node_said_ready(self, ready: WorkerReady) -> None:
        self._ports.setdefault((ready.job_id, ready.epoch, ready.rank), set()).add(ready.port)

    def node_claims(self, machine: str, unit: Unit) -> None:
        node_id = self._acked_nodes.get(machine)
        if node_id is not None:
            self._claimed.setdefault(unit.key, set()).add((node_id, unit.micro_batches))

    def node_heard(self, machine: str, message: HubToNode, claims: tuple[Unit, ...]) -> None:
        """`claims`: those of the batch that the message answers, if it answers one."""
        match message:
            case Welcome():
                self._welcomed(machine, message)
            case Assignment():
                self._assigned(machine, message)
            case TopologyGrant():
                self._granted(machine, message)
            case ClaimsAnswer():
                self._claims_answered(machine, claims)
            case _:
                pass

    def _welcomed(self, machine: str, welcome: Welcome) -> None:
        node_id = self._acked_nodes.setdefault(machine, welcome.node_id)
        text = f"machine {machine} was welcomed as {node_id} and now as {welcome.node_id}"
        self.expect(node_id == welcome.node_id, Promise.GHOST, text)
        self.expect(node_id in self._nodes, Promise.SURVIVES, f"node {node_id} was welcomed and is not in the books")
        self.machines[welcome.node_id] = machine

    def _assigned(self, machine: str, message: Assignment) -> None:
        self.counts["assignments"] += 1
        place = (message.job_id, message.epoch, message.rank)
        self.expect(place in self.places, Promise.SURVIVES, f"assigned {place} is not in the books")
        node_id, device_id = self.places.get(place, (NodeId(""), DeviceId("")))
        mine = self._acked_nodes.get(machine) == node_id and message.device_id == device_id
        self.expect(mine, Promise.OWNER, f"{machine} is assigned {place}, which is {node_id}'s")

    def _granted(self, machine: str, message: TopologyGrant) -> None:
        job_id, epoch = message.topology.job_id, message.topology.epoch
        for certificate in message.certificates:
            node_id, _ = self.places.get((job_id, epoch, certificate.rank), (NodeId(""), DeviceId("")))
            mine = self._acked_nodes.get(machine) == node_id
            text = f"{machine} gets the certificate of rank {certificate.rank} of {job_id}, epoch {epoch}"
            self.expect(mine, Promise.OWNER, text)
            self._check_certificate(certificate.certificate_pem, (job_id, epoch, certificate.rank))

    def _check_certificate(self, text: str, place: Place) -> None:
        self.expect(text.startswith(certificate_of(*place)), Promise.OWNER, f"{text!r} is the certificate of {place}")

    def _claims_answered(self, machine: str, claims: tuple[Unit, ...]) -> None:
        for unit in claims:
            self.acked_claims.add(unit.key)
            place = self.places.get((unit.key.job_id, unit.key.epoch, unit.key.rank))
            mine = place is not None and place[0] == self._acked_nodes.get(machine)
            kept = unit.key in self.units and self.units[unit.key].claimed is not None
            text = f"the claim of {unit.key} by {machine} was acknowledged and is not in the books"
            self.expect(kept or not mine, Promise.SURVIVES, text)

    # What trainers say and hear

    def trainer_received(self, owner: str, unit: Unit) -> None:
        if self.owners.get(unit.key.job_id) == owner:
            self._received.setdefault(unit.key, set()).add(unit.micro_batches)

    def submitted(self, owner: str, submission: str, job_id: JobId) -> None:
        kept = self._submissions.get((owner, submission)) == job_id
        text = f"submission {submission} of {owner} was answered with {job_id}, which is not in the books"
        self.expect(kept, Promise.SURVIVES, text)

    def reconfigured(self, job_id: JobId, epoch: Epoch) -> None:
        self.expect(self.jobs[job_id].epoch >= epoch, Promise.SURVIVES, f"epoch {epoch} of {job_id} was acknowledged")

    def ended(self, job_id: JobId) -> None:
        self.expect(self.jobs[job_id].state.ended, Promise.SURVIVES, f"the end of {job_id} was acknowledged")

    def received(self, units: list[Unit]) -> None:
        for unit in units:
            self.acked_receipts.add(unit.key)
            kept = unit.key in self.units and self.units[unit.key].received is not None
            self.expect(kept, Promise.SURVIVES, f"the receipt of {unit.key} was acknowledged and is not in the books")

    def updated(self, job_id: JobId, epoch: Epoch, state: JobState, driver: str) -> None:
        """A watcher was told."""
        job = self.jobs[job_id]
        text = f"the watcher of {job_id} hears of epoch {epoch}, {state.value}; the books say {job.epoch}"
        self.expect(epoch <= job.epoch, Promise.SURVIVES, text)
        before = self._watched.get(job_id, epoch)
        self.expect(epoch >= before, Promise.EPOCH, f"the watcher of {job_id} hears of epoch {epoch} after {before}")
        self._watched[job_id] = epoch
        if driver:
            self._check_certificate(driver, (job_id, epoch, DRIVER_RANK))

    # What a hub finds when it starts

    def restarted(self, books: Books) -> None:
        """Everything that was committed is there again, and so is what was acknowledged."""
        snapshot = books.snapshot()
        jobs = {job.job_id: job for job in snapshot.jobs}
        for job_id, job in self.jobs.items():
            found = jobs.get(job_id)
            same = found is not None and (found.epoch, found.state, found.reason) == (job.epoch, job.state, job.reason)
            self.expect(same, Promise.SURVIVES, f"job {job_id} was {_brief(job)} and comes back as {_brief(found)}")
        for node_id, node in self._nodes.items():
            kept = any(other == node for other in snapshot.nodes)
            self.expect(kept, Promise.SURVIVES, f"node {node_id} does not come back as it was")
        submissions = {key: job_id for key, (job_id, _) in snapshot.submissions.items()}
        self.expect(submissions == self._submissions, Promise.SURVIVES, "submissions do not come back as they were")
        self._audit(books)

    def _audit(self, books: Books) -> None:
        units = books.find_units(self.units)
        for key, unit in self.units.items():
            found = units.get(key)
            self.expect(found == unit, Promise.SURVIVES, f"{unit} comes back as {found}")
        for place, (node_id, _) in self.places.items():
            work = PlaceOfWork(owner=self.owners[place[0]], node_id=node_id)
            self.expect(books.find_place(*place) == work, Promise.SURVIVES, f"the place of {place} is lost")
        for node_id in self._nodes:
            earned = sum(one.amount for one in self.postings.values() if one.node_id == node_id)
            has = books.earnings(node_id).confirmed_micro
            self.expect(has == earned, Promise.LEDGER, f"{node_id} has {has}, its postings are {earned}")
        total = sum(books.account_balances().values())
        self.expect(total == 0, Promise.LEDGER, f"all accounts together: {total}")

    # What time tells

    def mesh(self, mesh: Mesh, heard: dict[str, float | None], silence: float, *, writing: bool) -> None:
        """`heard`: seconds since a heartbeat of each machine reached the hub on a stream that is open there; None
        where there is none. `writing`: effects wait for a commit, so that streams may end later."""
        names = Counter(node.info.name for node in mesh.nodes)
        twice = [name for name, count in names.items() if count > 1]
        self.expect(not twice, Promise.GHOST, f"the mesh lists {twice} twice")
        for node in mesh.nodes:
            name = node.info.name
            if name not in heard:
                continue
            age = heard[name]
            late = age is None or age > silence + SLACK
            self.expect(not (node.connected and late), Promise.LEASE, f"{name} is connected, heard {age} s ago")
            early = age is not None and age < silence - SLACK
            self.expect(node.connected or not early, Promise.LEASE, f"{name} is not connected, heard {age} s ago")
            kept = writing or age is None or age < 2 * silence + LONGEST_TICK
            self.expect(kept, Promise.LEASE, f"{name} has a stream, heard {age} s ago")

    def settled_units(self) -> None:
        """Where both sides were answered, the unit is settled."""
        for key in self.acked_claims & self.acked_receipts:
            unit = self.units.get(key)
            settled = unit is not None and unit.state in (UnitState.CREDITED, UnitState.MISMATCHED)
            self.expect(settled, Promise.LIVE, f"{key} was claimed and received, and is {unit}")
            equal = unit is not None and unit.claimed == unit.received
            self.expect((key in self.postings) == equal, Promise.LEDGER, f"{key} is {unit}, credited or not")


def certificate_of(job_id: JobId, epoch: Epoch, rank: Rank) -> str:
    """What the simulated authority signs, up to when."""
    return f"certificate of {job_id}/{epoch}/{rank} "


def _brief(job: JobRecord | None) -> str:
    return "nothing" if job is None else f"epoch {job.epoch}, {job.state.value} ({job.reason})"
