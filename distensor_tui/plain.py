"""The provider verbs' answers as plain text: no colours, no boxes, one fact a line."""

from __future__ import annotations

from collections.abc import Callable
from datetime import tzinfo

from distensor_tui import format as fmt
from distensor_tui.absence import Absence
from distensor_tui.devicefacts import facts
from distensor_tui.income import STANDINGS, Income, Ledger, Sum
from distensor_tui.model import Device, Fault, Gate, Hub, HubState, Job, Snapshot, Worker


def absent(why: Absence) -> str:
    return "\n".join([f"{why.title}.", why.detail, *(f"  {fix}" for fix in why.fix)])


def status(snapshot: Snapshot, now: float, zone: tzinfo | None = None) -> str:
    """Am I earning, how much, is the machine all right, what comes next."""
    rows = [_node(snapshot, now), _hub(snapshot.hub, zone)]
    rows += [_job(job) for job in snapshot.live_jobs] or ["job        none"]
    rows += [_worker(worker) for worker in snapshot.workers or ()]
    rows += [_device(device) for device in snapshot.devices or ()]
    rows += _earnings(snapshot)
    rows += [row for fault in snapshot.faults or () for row in _fault(fault)]
    rows += [
        f"closed     {_gate(gate, zone)}" for gate in (snapshot.node.why if snapshot.node else ()) if not gate.open
    ]
    rows += [f"not read   {problem}" for problem in snapshot.problems]
    return "\n".join(rows)


def why(snapshot: Snapshot, now: float, zone: tzinfo | None = None) -> str:
    gates = snapshot.node.why if snapshot.node else ()
    head = _node(snapshot, now)
    return "\n".join([head, *(f"{'open' if g.open else 'CLOSED':<10} {_gate(g, zone)}" for g in gates)])


def devices(snapshot: Snapshot, now: float, zone: tzinfo | None = None) -> str:
    return "\n".join(_device(device) for device in snapshot.devices or ()) or "no devices"


def jobs(snapshot: Snapshot, now: float, zone: tzinfo | None = None) -> str:
    rows = [_job(job) for job in snapshot.jobs or ()] + [_worker(worker) for worker in snapshot.workers or ()]
    return "\n".join(rows) or "no jobs"


def earnings(snapshot: Snapshot, now: float, zone: tzinfo | None = None) -> str:
    rows = [*_earnings(snapshot), *(_income(snapshot.account, zone) if snapshot.account else ())]
    return "\n".join(rows) or "earnings   the hub has not said yet"


def _income(income: Income, zone: tzinfo | None) -> list[str]:
    """Spans, energy and the comparison; the hub's own sums stand above."""
    spans = (("today", income.today), ("7 days", income.week), ("30 days", income.month), ("in all", income.total))
    rows = [f"{name:<10} {_span(one, income.currency)}" for name, one in spans]
    if income.projection_micro is not None:
        days = fmt.plural(income.projection_days, "whole day")
        rows.append(f"projection {fmt.credits(income.projection_micro)} credits in 30 days like the last {days}")
    rows += _money(income)
    rows += [f"no energy  {device}: {reason}" for device, reason in income.no_power.items()]
    return [*rows, f"ledger     {ledger(income.ledger, zone)}"]


def _money(income: Income) -> list[str]:
    """Where the credits are in the hub's ledger; all of it but the fees sums to what was credited."""
    money = income.money
    if money is None:
        return ["paid       not known yet: the hub has not said where the credits are"]
    parts = [
        ("pending", money.pending),
        ("held", money.held),
        ("payable", money.payable),
        ("on their way", money.clearing),
        ("paid", money.paid),
        ("taken back", money.void),
    ]
    words = ", ".join(f"{name} {fmt.credits(micro)}" for name, micro in parts if micro or name in _ALWAYS)
    return [f"credits    {words}; {income.payout_note}", f"fees       {fmt.credits(money.fees)} credits, the hub's"]


_ALWAYS = ("pending", "payable", "paid")


def _span(one: Sum, currency: str) -> str:
    parts = [f"{fmt.credits(one.micro)} credits, {fmt.plural(one.units, 'unit')}"]
    if one.millijoules is not None:
        fixed = " (your figure)" if one.fixed_millijoules else ""
        parts.append(f"energy {fmt.energy(one.millijoules)}{fixed}")
    if one.cost_micro is not None:
        parts.append(f"cost {fmt.spent(one.cost_micro, currency)}")
    if one.net_micro is not None:
        parts.append(f"net {fmt.money(one.net_micro, currency)}")
    return ", ".join(parts)


def ledger(found: Ledger, zone: tzinfo | None) -> str:
    """'equal, compared 14:02' and how many units stand where."""
    parts = [found.state]
    if found.at is not None:
        parts.append(f"compared {fmt.hour(found.at, zone)}")
    parts += [f"{found.count(w).units:,} {w.replace('_', ' ')}" for w in STANDINGS if found.count(w).units]
    waiting = found.count("unconfirmed")
    if waiting.since is not None:
        parts.append(f"unconfirmed since {fmt.hour(waiting.since, zone)}")
    return ", ".join(parts) + (f" ({found.reason})" if found.reason else "")


def _node(snapshot: Snapshot, now: float) -> str:
    node = snapshot.node
    if node is None:
        return "state      unknown"
    since = f" for {fmt.span(now - node.state_since)}" if node.state_since is not None else ""
    return f"state      {node.state}{since} ({node.name or node.id})"


def _hub(hub: Hub | None, zone: tzinfo | None) -> str:
    if hub is None:
        return "hub        unknown"
    if hub.state is HubState.CONNECTED:
        rtt = "" if hub.rtt_ms is None else f", {hub.rtt_ms:.1f} ms"
        return f"hub        connected to {hub.address}{rtt}"
    if hub.state is HubState.NO_KEY:
        return "hub        not asked: this machine has no key yet (distensor auth login)"
    since = f" since {fmt.hour(hub.since, zone)}" if hub.since is not None else ""
    error = f": {hub.error.message}" if hub.error else ""
    return f"hub        {hub.state} {hub.address}{since}{error}"


def _job(job: Job) -> str:
    step = "-" if job.step is None else f"{job.step:,}" + (f"/{job.total_steps:,}" if job.total_steps else "")
    p = job.parallel
    return (
        f"job        {job.name or job.id}  {job.state}  step {step}  loss {fmt.loss(job.loss)}  "
        f"{fmt.amount(job.tokens_per_second)} tok/s  dp={p.dp} tp={p.tp} pp={p.pp} cp={p.cp}"
    )


def _worker(worker: Worker) -> str:
    stages = ",".join(map(str, worker.stages)) or "-"
    tail = f"  last exit: {worker.last_exit} ({fmt.plural(worker.restarts, 'restart')})" if worker.last_exit else ""
    state = worker.state
    if worker.finished:
        state, tail = "finished", ""
    step = "-" if worker.step is None else f"{worker.step:,}"
    return f"worker     rank {worker.rank}  stage {stages}  {worker.device}  {state}  step {step}{tail}"


def _device(device: Device) -> str:
    if not device.usable:
        return f"device     {device.id}  {device.name}  not used: {device.reason or 'no reason given'}"
    parts = [
        f"device     {device.id}",
        device.name,
        fmt.percent(device.utilization),
        f"memory {fmt.memory_pair(device.memory_used, device.memory_total)}",
    ]
    if device.temperature_c is not None:
        parts.append(f"{device.temperature_c:.0f} C")
    if device.power_w is not None:
        parts.append(f"{device.power_w:.0f} W")
    if device.throttle:
        parts.append(f"slowed by {', '.join(device.throttle)}")
    return "  ".join(parts)


def device_facts(device: Device, now: float) -> str:
    """All that is known of one device, a fact a line."""
    return "\n".join(f"{name:<14} {value}" for name, value in facts(device, now))


def _earnings(snapshot: Snapshot) -> list[str]:
    found = snapshot.earnings
    if found is None:
        return []
    return [
        f"today      {fmt.credits(found.today_micro)} credits",
        f"confirmed  {fmt.credits(found.confirmed_micro)} credits, {fmt.plural(found.confirmed_units, 'unit')}",
        f"pending    {fmt.plural(found.pending_units, 'unit')}",
    ]


def _fault(fault: Fault) -> list[str]:
    rows = [f"broken     {fault.code}: {fault.cause}", f"           {fault.fix}"]
    return [*rows, f"           {fault.log}"] if fault.log else rows


def _gate(gate: Gate, zone: tzinfo | None) -> str:
    limit = f" (limit {gate.limit})" if gate.limit else ""
    change = f", changes {fmt.hour(gate.next_change_at, zone)}" if gate.next_change_at is not None else ""
    where = f" of {gate.device}" if gate.device else ""
    return f"{gate.name.replace('_', ' ')}{where}: {gate.reading}{limit}{change}"


Show = Callable[[Snapshot, float], str]
