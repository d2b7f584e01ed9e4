"""From readings and policy to open and closed gates. A pure function, with a memory that is given and returned."""

from __future__ import annotations

from dataclasses import replace

from distensor_server.gates.model import (
    DeviceReadings,
    Duty,
    Finding,
    GateRef,
    Latch,
    Memory,
    Moment,
    Readings,
    Verdicts,
    Want,
)
from distensor_server.gates.rules import DEVICE_RULES, NODE_RULES, DeviceCase, NodeCase
from distensor_server.gates.throttle import next_duty
from distensor_server.picture import Gate
from distensor_server.policy.policy import Policy


def evaluate(readings: Readings, policy: Policy, memory: Memory, moment: Moment) -> tuple[Verdicts, Memory]:
    """Every gate, and what to remember.

    A gate closes as soon as its reading asks for it. It opens again when its reading was good for the whole dwell, so
    that it never closes twice within one. A reading that cannot be had leaves a gate open, unless the owner made it
    strict. A gate without a limit never closes.
    """
    findings: dict[GateRef, Finding] = {}
    for name, rule in NODE_RULES:
        latch = memory.latches.get((name, None), Latch())
        findings[name, None] = rule(NodeCase(readings=readings, policy=policy, moment=moment, latch=latch))
    duties: dict[str, Duty] = {}
    for device in readings.devices:
        before = memory.duties.get(device.device_id, Duty())
        duty = next_duty(before, device, policy.of_device(device.device_id), moment.monotonic)
        duties[device.device_id] = duty
        findings |= _of_device(device, policy, memory, moment, duty)
    latches = {
        ref: next_latch(memory.latches.get(ref, Latch()), _wanted(ref, finding, policy), finding, policy, moment)
        for ref, finding in findings.items()
    }
    gates = tuple(_gate(ref, finding, latches[ref], policy, moment) for ref, finding in findings.items())
    factors = {device: duty.factor for device, duty in duties.items()}
    return Verdicts(gates=gates, duties=factors), Memory(latches=latches, duties=duties)


def _of_device(
    device: DeviceReadings, policy: Policy, memory: Memory, moment: Moment, duty: Duty
) -> dict[GateRef, Finding]:
    found: dict[GateRef, Finding] = {}
    for name, rule in DEVICE_RULES:
        ref = (name, device.device_id)
        case = DeviceCase(
            device=device,
            policy=policy.of_device(device.device_id),
            dwell=policy.dwell_seconds,
            moment=moment,
            latch=memory.latches.get(ref, Latch()),
            duty=duty,
        )
        if (finding := rule(case)) is not None:
            found[ref] = finding
    return found


def _wanted(ref: GateRef, finding: Finding, policy: Policy) -> Want:
    if finding.want is not Want.UNKNOWN:
        return finding.want
    return Want.CLOSED if ref[0] in policy.strict else Want.OPEN


_LONG_AGO = float("-inf")
"""No dwell is longer: the gate opens with the first good reading."""


def next_latch(latch: Latch, want: Want, finding: Finding, policy: Policy, moment: Moment) -> Latch:
    """Close at once; open after the dwell."""
    now = moment.monotonic
    if want is Want.CLOSED:
        if latch.open:
            return Latch(open=False, since=moment.wall, changed=now, mark=finding.mark)
        return replace(latch, clear_since=None)
    if want is Want.READING:
        return replace(latch, open=False, since=latch.since or moment.wall, clear_since=_LONG_AGO)
    if latch.open:
        return latch
    if want is Want.HOLD:
        return replace(latch, clear_since=None)
    clear_since = now if latch.clear_since is None else latch.clear_since
    dwell = policy.dwell_seconds if finding.dwells and finding.limit else 0.0
    if now - clear_since >= dwell:
        return Latch(open=True, since=moment.wall, changed=now)
    return replace(latch, clear_since=clear_since)


def _gate(ref: GateRef, finding: Finding, latch: Latch, policy: Policy, moment: Moment) -> Gate:
    known = finding.want is not Want.UNKNOWN
    state = "closed" if not latch.open else "open" if known else "unknown"
    reading = finding.reading
    at = finding.next_change_at
    if not latch.open and latch.clear_since not in (None, _LONG_AGO):
        assert latch.clear_since is not None
        left = latch.clear_since + policy.dwell_seconds - moment.monotonic
        at = float(round(moment.wall + left))
        reading = f"{reading}, good again"
    return Gate(
        gate=ref[0],
        device=ref[1],
        open=latch.open,
        state=state,
        reading=reading,
        limit=finding.limit,
        since=latch.since,
        next_change_at=at,
    )
