"""The sections of the local protocol as Prometheus text (exposition format 0.0.4). Pure; one table says what there is.

A section or key that is absent gives no sample: 'not available' is the absence of a value, never a made-up one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from distensor_server.nodestate import NodeState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Data: TypeAlias = Mapping[str, Any]
Sample: TypeAlias = tuple[dict[str, Any], Any]
Samples: TypeAlias = Iterator[Sample]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """One metric: its samples are read from the sections."""

    name: str
    kind: str
    text: str
    samples: Callable[[Data], Samples]


def exposition(sections: Data) -> str:
    """The whole page."""
    return "".join(_family(family, sections) for family in FAMILIES)


def _family(family: Family, sections: Data) -> str:
    # By their labels: one sample that is there twice makes Prometheus refuse the whole page.
    found = {_labels(labels): value for labels, value in family.samples(sections) if isinstance(value, int | float)}
    if not found:
        return ""
    lines = "".join(f"{family.name}{labels} {_number(value)}\n" for labels, value in found.items())
    return f"# HELP {family.name} {family.text}\n# TYPE {family.name} {family.kind}\n{lines}"


def _labels(labels: Mapping[str, Any]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: Any) -> str:
    """Text of strangers: what the format gives a meaning is escaped, other control characters become spaces."""
    text = str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return "".join(char if char.isprintable() else " " for char in text)


def _number(value: int | float) -> str:
    return repr(int(value) if isinstance(value, bool) else value)


# Where the values stand


def _dict(sections: Data, name: str) -> Data:
    value = sections.get(name)
    return value if isinstance(value, Mapping) else {}


def _list(sections: Data, name: str) -> Sequence[Data]:
    value = sections.get(name)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, Sequence) else []


def _one(section: str, key: str, factor: float | None = None) -> Callable[[Data], Samples]:
    """The value of one key, times `factor`."""

    def samples(sections: Data) -> Samples:
        value = _dict(sections, section).get(key)
        yield {}, value * factor if factor is not None and isinstance(value, int | float) else value

    return samples


def _info(sections: Data) -> Samples:
    node = _dict(sections, "node")
    yield {"version": node.get("version"), "node": node.get("name"), "node_id": node.get("id") or ""}, 1


def _state(sections: Data) -> Samples:
    present = _dict(sections, "node").get("state")
    for state in NodeState:
        yield {"state": state.value}, int(state.value == present)


def _gates(sections: Data) -> Samples:
    for gate in _list(_dict(sections, "node"), "why"):
        yield {"gate": gate.get("gate"), "device": gate.get("device") or ""}, int(bool(gate.get("open")))


def _faults(sections: Data) -> Samples:
    for fault in _list(sections, "faults"):
        yield {"part": fault.get("part"), "subject": fault.get("subject") or "", "code": fault.get("code")}, 1


def _connected(sections: Data) -> Samples:
    yield {}, int(_dict(sections, "hub").get("state") == "connected")


def _devices(key: str) -> Callable[[Data], Samples]:
    def samples(sections: Data) -> Samples:
        for device in _list(sections, "devices"):
            labels = {"device": device.get("id"), "kind": device.get("kind"), "name": device.get("name")}
            yield labels, device.get(key)

    return samples


def _duties(sections: Data) -> Samples:
    for device, duty in _dict(_dict(sections, "usage"), "duty").items():
        yield {"device": device}, duty


def _workers_by_state(sections: Data) -> Samples:
    states = [worker.get("state") for worker in _list(sections, "workers")]
    for state in ("starting", "ready", "running", "draining", "backoff", "broken"):
        yield {"state": state}, states.count(state)


def _workers(key: str) -> Callable[[Data], Samples]:
    """Of the workers that have a process: the others are history, and a page of history never ends."""

    def samples(sections: Data) -> Samples:
        for worker in _list(sections, "workers"):
            if worker.get("pid") is not None:
                yield {name: worker.get(name) for name in ("job", "epoch", "rank", "device")}, worker.get(key)

    return samples


def _replicas(key: str) -> Callable[[Data], Samples]:
    def samples(sections: Data) -> Samples:
        for labels, found in _workers("replicas")(sections):
            if isinstance(found, Mapping):
                yield {**labels, "how": found.get("how")}, found.get(key)

    return samples


def _jobs(key: str) -> Callable[[Data], Samples]:
    def samples(sections: Data) -> Samples:
        for job in _list(sections, "jobs"):
            if job.get("state") != "ended":
                yield {"job": job.get("id"), "name": job.get("name"), "epoch": job.get("epoch")}, job.get(key)

    return samples


def _links(key: str) -> Callable[[Data], Samples]:
    def samples(sections: Data) -> Samples:
        for job in _list(sections, "jobs"):
            for link in _list(job, "links") if job.get("state") != "ended" else ():
                labels = {"job": job.get("id"), "epoch": job.get("epoch"), "rank": link.get("from")}
                yield {**labels, "peer": link.get("to")}, link.get(key)

    return samples


def _gauge(name: str, text: str, samples: Callable[[Data], Samples]) -> Family:
    return Family(name=f"distensor_{name}", kind="gauge", text=text, samples=samples)


def _counter(name: str, text: str, samples: Callable[[Data], Samples]) -> Family:
    return Family(name=f"distensor_{name}_total", kind="counter", text=text, samples=samples)


FAMILIES: Sequence[Family] = (
    _gauge("info", "Always 1; the labels say which node and version.", _info),
    _gauge("start_time_seconds", "Unix time at which the supervisor started.", _one("node", "started_at")),
    _gauge("state", "1 for the present state of the node, 0 for the others.", _state),
    _gauge("state_since_seconds", "Unix time at which the present state began.", _one("node", "state_since")),
    _gauge("gate_open", "1 where this condition of work is met.", _gates),
    _gauge("fault", "1 for each fault of now.", _faults),
    _gauge("hub_connected", "1 while the hub answers heartbeats.", _connected),
    _gauge("hub_rtt_seconds", "Round trip of the last heartbeat.", _one("hub", "rtt_ms", 0.001)),
    _gauge("device_usable", "1 where workers can run on this device.", _devices("usable")),
    _gauge("device_slots", "Workers that this device takes.", _devices("slots")),
    _gauge("device_utilization_ratio", "Share of time in use, 0 to 1.", _devices("utilization")),
    _gauge("device_memory_used_bytes", "Memory in use.", _devices("memory_used")),
    _gauge("device_memory_bytes", "Memory of the device.", _devices("memory_total")),
    _gauge("device_temperature_celsius", "Temperature of the device.", _devices("temperature_c")),
    _gauge("device_power_watts", "Power drawn by the device.", _devices("power_w")),
    _gauge("device_power_limit_watts", "Power limit of the device.", _devices("power_limit_w")),
    _counter("device_energy_joules", "Energy since the driver was loaded.", _devices("energy_j")),
    _gauge("device_clock_megahertz", "Clock of the device.", _devices("clock_mhz")),
    _gauge("device_duty_ratio", "Share of time that workers of a throttled device may work.", _duties),
    _gauge("traffic_day_bytes", "Traffic of all workers today, both directions.", _one("usage", "bytes_day")),
    _gauge("traffic_month_bytes", "Traffic of all workers this month, both directions.", _one("usage", "bytes_month")),
    _gauge("workers", "Workers in each state.", _workers_by_state),
    _counter("worker_restarts", "Restarts of a worker that runs now.", _workers("restarts")),
    _gauge("worker_failures", "Failures in a row of a worker that runs now.", _workers("failures")),
    _gauge("worker_memory_bytes", "Resident memory of a worker.", _workers("rss")),
    _gauge("worker_step", "Last step of a worker.", _workers("step")),
    _gauge("worker_compute_seconds", "Time of the last step in computing.", _workers("compute_s")),
    _gauge("worker_sync_seconds", "Time of the last step in averaging.", _workers("sync_s")),
    _gauge("worker_wait_seconds", "Time of the last step in waiting for others.", _workers("wait_s")),
    _gauge("worker_replica_sent_bytes", "Sent to other replicas in the last step.", _replicas("up")),
    _gauge("worker_replica_received_bytes", "Received from other replicas in the last step.", _replicas("down")),
    _gauge("worker_replica_ring_bytes", "What a ring all-reduce of the gradients sends.", _replicas("ring")),
    _gauge("job_step", "Last step of a job.", _jobs("step")),
    _gauge("job_loss", "Loss of the last step.", _jobs("loss")),
    _gauge("job_tokens_per_second", "Speed of the whole job.", _jobs("tokens_per_second")),
    _counter("job_units", "Units of work that this node claimed in a job.", _jobs("units")),
    _counter("link_sent_bytes", "Bytes sent to a peer.", _links("sent")),
    _counter("link_received_bytes", "Bytes received from a peer.", _links("received")),
    _gauge("earned_micro_credits", "Credits confirmed by the hub, in millionths.", _one("earnings", "confirmed_micro")),
    _gauge("earned_today_micro_credits", "Confirmed today, in millionths.", _one("earnings", "today_micro")),
    _gauge("confirmed_units", "Units confirmed by the hub.", _one("earnings", "confirmed_units")),
    _gauge("pending_units", "Units claimed and not yet confirmed.", _one("earnings", "pending_units")),
    _gauge("confirmed_at_seconds", "Unix time of the hub's last word on earnings.", _one("earnings", "confirmed_at")),
)
