"""From the sections of a snapshot or delta to the model. Tolerant: what is wrong is named and left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from distensor_tui.fields import Fields, clean
from distensor_tui.income import read_income
from distensor_tui.model import (
    Auth,
    AuthState,
    Device,
    DeviceBenchmark,
    DeviceProcess,
    Earnings,
    Event,
    Fault,
    Gate,
    Hub,
    HubState,
    Job,
    Member,
    Node,
    NodeState,
    Parallel,
    PeerLink,
    Problem,
    Replicas,
    Severity,
    Snapshot,
    Usage,
    Worker,
)
from distensor_tui.settings import read_limits

EVENTS_KEPT = 200


def apply(snapshot: Snapshot, data: Mapping[str, Any], *, full: bool) -> Snapshot:
    """The snapshot after an update. Sections that did not come stay as they were, unless it is full."""
    base = Snapshot() if full else snapshot
    problems: list[str] = []
    changes: dict[str, Any] = {}
    failed = {name: why for name, why in base.failed.items() if name not in data}
    for name, read in _SECTIONS.items():
        if name not in data:
            continue
        if why := _failure(data[name]):
            failed[name] = why
        absent: Any = {} if name == "unavailable" else None
        changes[name] = absent if data[name] is None or why else read(data[name], problems)
    if failed != base.failed:
        changes["failed"] = failed
    if not changes and not full:
        return base
    kept = tuple(p for p in base.problems if p.split(".")[0].split("[")[0].split(":")[0] not in changes)
    return replace(base, **changes, problems=(kept + tuple(problems))[:20])


def _failure(raw: Any) -> str:
    """Why a section could not be built: the supervisor sends nothing but that in its place."""
    if isinstance(raw, Mapping) and raw.keys() == {"error"} and isinstance(raw["error"], str):
        return clean(raw["error"]) or "no reason given"
    return ""


def _node(raw: Any, problems: list[str]) -> Node:
    f = Fields(raw, "node", problems)
    return Node(
        id=f.text("id"),
        name=f.text("name"),
        version=f.text("version"),
        state=_state(f.text("state"), problems),
        state_since=f.number("state_since"),
        started_at=f.number("started_at"),
        why=tuple(_gate(gate) for gate in f.objects("why")),
    )


def _state(word: str, problems: list[str]) -> NodeState:
    try:
        return NodeState(word)
    except ValueError:
        problems.append(f"node.state: {word!r} is not a state that this version knows")
        return NodeState.UNKNOWN


def _gate(f: Fields) -> Gate:
    return Gate(
        name=f.text("gate"),
        open=f.flag("open"),
        reading=f.text("reading"),
        limit=f.text("limit"),
        next_change_at=f.number("next_change_at"),
        device=f.maybe_text("device"),
        since=f.number("since"),
    )


def _hub(raw: Any, problems: list[str]) -> Hub:
    f = Fields(raw, "hub", problems)
    word = f.text("state")
    known = word in HubState.__members__.values()
    return Hub(
        state=HubState(word) if known else HubState.UNKNOWN,
        address=f.text("address"),
        rtt_ms=f.number("rtt_ms"),
        since=f.number("since"),
        next_retry_at=f.number("next_retry_at"),
        error=_problem(f.object("error")) if f.has("error") else None,
    )


def _problem(f: Fields) -> Problem:
    return Problem(code=f.text("code"), message=f.text("message"), fix=f.text("fix"))


def _devices(raw: Any, problems: list[str]) -> tuple[Device, ...]:
    return tuple(_device(f) for f in _items(raw, "devices", problems))


def _device(f: Fields) -> Device:
    return Device(
        id=f.text("id", "?"),
        kind=f.text("kind"),
        name=f.text("name"),
        usable=f.flag("usable"),
        reason=f.maybe_text("reason"),
        slots=f.count("slots"),
        utilization=f.number("utilization"),
        memory_used=f.whole("memory_used"),
        memory_total=f.whole("memory_total"),
        temperature_c=f.number("temperature_c"),
        power_w=f.number("power_w"),
        power_limit_w=f.number("power_limit_w"),
        workers=f.texts("workers"),
        unavailable=f.text_map("unavailable"),
        fault=f.flag("fault"),
        parent=f.text("parent"),
        profile=f.text("profile"),
        unified_memory=f.flag("unified_memory"),
        facts={name: f.shown(name) for name in ("uuid", "driver", "runtime", "bus", "cores") if f.has(name)},
        temperature_limit_c=f.number("temperature_limit_c"),
        energy_j=f.number("energy_j"),
        fan=f.number("fan"),
        clock_mhz=f.number("clock_mhz"),
        clock_limit_mhz=f.number("clock_limit_mhz"),
        memory_clock_mhz=f.number("memory_clock_mhz"),
        throttle=f.texts("throttle") if f.has("throttle") else None,
        processes=tuple(_device_process(p) for p in f.objects("processes")) if f.has("processes") else None,
        benchmark=_device_benchmark(f.object("benchmark")) if f.has("benchmark") else None,
    )


_RATES = tuple(f"{name}_{share}" for name in ("matmul_f32", "matmul_bf16", "memory") for share in ("p10", "p50"))


def _device_benchmark(f: Fields) -> DeviceBenchmark:
    names = (*_RATES, "disk_write", "disk_read")
    missing = {name: f.object(name).text("unavailable") for name in names if f.is_object(name)}
    rates = {name: f.number(name) for name in names if name not in missing}
    return DeviceBenchmark(
        at=f.number("at") or 0.0,
        stale=f.flag("stale"),
        rates={name: rate for name, rate in rates.items() if rate is not None},
        missing=missing,
    )


def _device_process(f: Fields) -> DeviceProcess:
    return DeviceProcess(
        pid=f.count("pid"),
        name=f.text("name"),
        type=f.text("type"),
        memory=f.whole("memory"),
        utilization=f.number("utilization"),
        owner=f.text("owner", "unknown"),
    )


def _workers(raw: Any, problems: list[str]) -> tuple[Worker, ...]:
    return tuple(_worker(f) for f in _items(raw, "workers", problems))


def _worker(f: Fields) -> Worker:
    return Worker(
        id=f.text("id"),
        job=f.text("job"),
        job_name=f.text("job_name"),
        epoch=f.count("epoch"),
        rank=f.count("rank"),
        stages=f.wholes("stages"),
        device=f.text("device"),
        state=f.text("state"),
        pid=f.whole("pid"),
        step=f.whole("step"),
        loss=f.number("loss"),
        tokens_per_second=f.number("tokens_per_second"),
        compute_s=f.seconds("compute_s"),
        sync_s=f.seconds("sync_s"),
        wait_s=f.seconds("wait_s"),
        restarts=f.count("restarts"),
        last_exit=f.maybe_text("last_exit"),
        rss=f.whole("rss"),
        since=f.number("since"),
        replicas=_replicas(f.object("replicas")) if f.is_object("replicas") else None,
    )


def _replicas(f: Fields) -> Replicas:
    return Replicas(how=f.text("how"), up=f.count("up"), down=f.count("down"), ring=f.count("ring"))


def _jobs(raw: Any, problems: list[str]) -> tuple[Job, ...]:
    return tuple(_job(f) for f in _items(raw, "jobs", problems))


def _job(f: Fields) -> Job:
    return Job(
        id=f.text("id"),
        name=f.text("name"),
        state=f.text("state"),
        epoch=f.count("epoch"),
        step=f.whole("step"),
        total_steps=f.whole("total_steps"),
        loss=f.number("loss"),
        tokens_per_second=f.number("tokens_per_second"),
        parallel=_parallel(f.object("parallel")),
        members=tuple(_member(m) for m in f.objects("members")),
        links=tuple(_link(link) for link in f.objects("links")),
        units=f.count("units"),
    )


def _parallel(f: Fields) -> Parallel:
    sizes = {axis: max(1, f.count(axis, 1)) for axis in ("dp", "tp", "pp", "cp")}
    return Parallel(order=f.text("order"), **sizes)


def _member(f: Fields) -> Member:
    return Member(
        rank=f.count("rank"),
        node=f.text("node"),
        dp=f.count("dp"),
        tp=f.count("tp"),
        pp=f.count("pp"),
        cp=f.count("cp"),
        mine=f.flag("mine"),
    )


def _link(f: Fields) -> PeerLink:
    return PeerLink(
        rank=f.count("from"),
        peer=f.count("to"),
        sent=f.count("sent"),
        received=f.count("received"),
        sent_rate=f.number("sent_rate"),
        received_rate=f.number("received_rate"),
        rtt_ms=f.number("rtt_ms"),
        rtt_age_s=f.number("rtt_age_s"),
        path=f.text("path"),
        line_rate=f.number("line_rate"),
    )


def _earnings(raw: Any, problems: list[str]) -> Earnings:
    f = Fields(raw, "earnings", problems)
    return Earnings(
        confirmed_micro=f.count("confirmed_micro"),
        confirmed_units=f.count("confirmed_units"),
        pending_units=f.count("pending_units"),
        today_micro=f.count("today_micro"),
        confirmed_at=f.number("confirmed_at"),
        price_note=f.text("price_note"),
    )


def _auth(raw: Any, problems: list[str]) -> Auth:
    f = Fields(raw, "auth", problems)
    word = f.text("state")
    return Auth(
        state=AuthState(word) if word in AuthState.__members__.values() else AuthState.UNKNOWN,
        source=f.maybe_text("source"),
        where=f.maybe_text("where"),
        key=f.maybe_text("key"),
        hub=f.maybe_text("hub"),
        problem=f.maybe_text("problem"),
        fix=f.maybe_text("fix"),
    )


def _events(raw: Any, problems: list[str]) -> tuple[Event, ...]:
    return tuple(_event(f) for f in _items(raw, "events", problems)[-EVENTS_KEPT:])


def _event(f: Fields) -> Event:
    word = f.text("severity", "info")
    return Event(
        at=f.seconds("at"),
        severity=Severity(word) if word in Severity.__members__.values() else Severity.INFO,
        source=f.text("source"),
        text=f.text("text"),
    )


def _faults(raw: Any, problems: list[str]) -> tuple[Fault, ...]:
    return tuple(_fault(f) for f in _items(raw, "faults", problems))


def _fault(f: Fields) -> Fault:
    return Fault(
        part=f.text("part"),
        subject=f.maybe_text("subject"),
        code=f.text("code", "unknown"),
        cause=f.text("cause", "no reason given"),
        fix=f.text("fix"),
        log=f.text("log"),
        since=f.number("since"),
        retry_at=f.number("retry_at"),
    )


def _usage(raw: Any, problems: list[str]) -> Usage:
    f = Fields(raw, "usage", problems)
    return Usage(duty=f.number_map("duty"), bytes_day=f.count("bytes_day"), bytes_month=f.count("bytes_month"))


def _unavailable(raw: Any, problems: list[str]) -> dict[str, str]:
    return Fields({"all": raw}, "unavailable", problems).text_map("all")


def _items(raw: Any, name: str, problems: list[str]) -> list[Fields]:
    if not isinstance(raw, list):
        problems.append(f"{name}: a list was expected, got {type(raw).__name__}")
        return []
    return [Fields(item, f"{name}[{i}]", problems) for i, item in enumerate(raw)]


_SECTIONS: dict[str, Callable[[Any, list[str]], Any]] = {
    "node": _node,
    "hub": _hub,
    "devices": _devices,
    "workers": _workers,
    "jobs": _jobs,
    "earnings": _earnings,
    "events": _events,
    "income": read_income,
    "auth": _auth,
    "limits": read_limits,
    "usage": _usage,
    "faults": _faults,
    "unavailable": _unavailable,
}
