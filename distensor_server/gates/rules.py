"""One rule for each gate: the reading beside the limit. Pure; hysteresis is here, the dwell in `evaluate`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from distensor.core.reading import Reading, Unavailable
from distensor_server.gates.model import BEING_READ, DeviceReadings, Duty, Finding, Latch, Moment, Readings, Want
from distensor_server.policy.policy import GIB, DevicePolicy, Policy
from distensor_server.policy.windows import Windows, is_open, next_change, next_midnight, next_month

GB = 1e9
COOLER = 5.0
"""Degrees below the limit at which a hot device counts as cool again."""
LESS_POWER = 0.95
CHARGED = 5.0
"""Percent above the least charge at which a battery counts as charged again."""
ROOMIER = 1.1
"""How much more than the reserve has to be free again."""
LESS_FOREIGN = 0.8
DRAIN_SECONDS = 12.0
"""Traffic that still flows while workers leave: a cap is closed so much earlier."""
FORGET_MARK_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCase:
    """What a rule of the node may look at."""

    readings: Readings
    policy: Policy
    moment: Moment
    latch: Latch


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceCase:
    """What a rule of a device may look at."""

    device: DeviceReadings
    policy: DevicePolicy
    dwell: float
    moment: Moment
    latch: Latch
    duty: Duty


NodeRule: TypeAlias = Callable[[NodeCase], Finding]
DeviceRule: TypeAlias = Callable[[DeviceCase], Finding | None]
"""None: this device has no such gate."""


def _schedule(case: NodeCase) -> Finding:
    return _in_windows(case.policy.windows, case.policy.schedule, case.moment)


def _in_windows(windows: Windows, text: str, moment: Moment) -> Finding:
    if not windows:
        return Finding(want=Want.OPEN, reading="at any time", dwells=False)
    inside = is_open(windows, moment.wall, moment.zone)
    return Finding(
        want=Want.OPEN if inside else Want.CLOSED,
        reading="inside a window" if inside else "outside the windows",
        limit=text,
        next_change_at=next_change(windows, moment.wall, moment.zone),
        dwells=False,
    )


def _idle(case: NodeCase) -> Finding:
    idle, wanted = case.readings.idle_seconds, case.policy.idle_minutes * 60
    limit = f"idle for {case.policy.idle_minutes:g} min" if case.policy.only_when_idle else ""
    if isinstance(idle, Unavailable):
        return _unread(idle, limit)
    if math.isinf(idle):
        return Finding(want=Want.OPEN, reading="nobody is logged in", limit=limit)
    reading = "in use" if idle < 60 else f"idle for {idle / 60:.0f} min"
    if not case.policy.only_when_idle or idle >= wanted:
        return Finding(want=Want.OPEN, reading=reading, limit=limit)
    opens = case.moment.wall + wanted - idle
    return Finding(want=Want.CLOSED, reading=reading, limit=limit, next_change_at=math.ceil(opens / 60) * 60.0)


def _battery(case: NodeCase) -> Finding:
    power, least = case.readings.power, case.policy.battery_min_percent
    charged = f"at least {least:g} % charge" if least else ""
    limit = charged if case.policy.run_on_battery else "on mains"
    if isinstance(power, Unavailable):
        return _unread(power, limit)
    if not power.on_battery:
        return Finding(want=Want.OPEN, reading="on mains", limit=limit)
    charge = "" if power.percent is None else f", {power.percent:.0f} %"
    return Finding(want=_on_battery(power.percent, case.policy), reading=f"on battery{charge}", limit=limit)


def _on_battery(percent: float | None, policy: Policy) -> Want:
    if not policy.run_on_battery:
        return Want.CLOSED
    least = policy.battery_min_percent
    if not least:
        return Want.OPEN
    if percent is None:
        return Want.UNKNOWN
    return Want.CLOSED if percent < least else Want.OPEN if percent >= min(100.0, least + CHARGED) else Want.HOLD


def _metered(case: NodeCase) -> Finding:
    metered, allowed = case.readings.metered, case.policy.run_on_metered
    limit = "" if allowed else "not metered"
    if isinstance(metered, Unavailable):
        return _unread(metered, limit)
    want = Want.CLOSED if metered and not allowed else Want.OPEN
    return Finding(want=want, reading="a metered network" if metered else "not metered", limit=limit)


def _ram(case: NodeCase) -> Finding:
    free, reserve = case.readings.ram_free, case.policy.ram_reserve_gib * GIB
    return _room(free, reserve, case.readings.ram_own, case.latch, case.moment)


def _disk(case: NodeCase) -> Finding:
    return _room(case.readings.disk_free, case.policy.disk_reserve_gib * GIB, 0, case.latch, case.moment)


def _room(free: Reading[int], reserve: float, own: int, latch: Latch, moment: Moment) -> Finding:
    """What ended workers gave back does not count as room, for a while: with it the next ones would fill it again."""
    limit = f"{reserve / GIB:.3g} GiB stay free" if reserve else ""
    if isinstance(free, Unavailable):
        return _unread(free, limit)
    recent = not latch.open and moment.monotonic - latch.changed < FORGET_MARK_SECONDS
    enough = reserve * ROOMIER + (latch.mark if recent else 0.0)
    # Without a reserve nobody compares, and every other second a new figure would be news.
    reading = f"{free / GIB:.1f} GiB free" if reserve else f"about {free / GIB:.0f} GiB free"
    if not reserve or free >= enough:
        return Finding(want=Want.OPEN, reading=reading, limit=limit)
    want = Want.CLOSED if free < reserve else Want.HOLD
    return Finding(want=want, reading=reading, limit=limit, mark=float(own))


def _bytes_day(case: NodeCase) -> Finding:
    end = next_midnight(case.moment.wall, case.moment.zone)
    return _cap(case, case.readings.day_bytes, case.policy.bytes_day_gb, "today", end)


def _bytes_month(case: NodeCase) -> Finding:
    end = next_month(case.moment.wall, case.moment.zone)
    return _cap(case, case.readings.month_bytes, case.policy.bytes_month_gb, "this month", end)


def _cap(case: NodeCase, used: int, cap_gb: float, when: str, end: float) -> Finding:
    """Closed while there is still room for what flows until workers have left."""
    reading = f"{used / GB:.2f} GB {when}"
    if not cap_gb:
        return Finding(want=Want.OPEN, reading=reading, dwells=False)
    coming = (case.readings.sent_rate + case.readings.received_rate) * DRAIN_SECONDS
    cap = cap_gb * GB
    limit = f"{cap_gb:g} GB"
    if used + coming >= cap:
        return Finding(want=Want.CLOSED, reading=reading, limit=limit, next_change_at=end, dwells=False)
    want = Want.OPEN if used < 0.9 * cap else Want.HOLD
    at = None if case.latch.open else end
    return Finding(want=want, reading=reading, limit=limit, next_change_at=at, dwells=False)


def _device_schedule(case: DeviceCase) -> Finding | None:
    return _in_windows(case.policy.windows, case.policy.schedule, case.moment) if case.policy.schedule else None


def _foreign(case: DeviceCase) -> Finding | None:
    if not case.device.accelerator:
        return None
    foreign, most = case.device.foreign_bytes, case.policy.yield_gpu_mib * (1 << 20)
    limit = f"other programs hold at most {case.policy.yield_gpu_mib:g} MiB" if case.policy.yield_gpu else ""
    if isinstance(foreign, Unavailable):
        return _unread(foreign, limit)
    reading = f"other programs hold {foreign / (1 << 20):.0f} MiB" if foreign else "no other program on it"
    if not case.policy.yield_gpu or foreign <= most * LESS_FOREIGN:
        return Finding(want=Want.OPEN, reading=reading, limit=limit)
    return Finding(want=Want.CLOSED if foreign > most else Want.HOLD, reading=reading, limit=limit)


def _temperature(case: DeviceCase) -> Finding | None:
    most = case.policy.temperature_max_c
    return _heat(case, case.device.temperature_c, most, most - COOLER, "C")


def _power(case: DeviceCase) -> Finding | None:
    most = case.policy.power_max_w
    return _heat(case, case.device.power_w, most, most * LESS_POWER, "W")


def _heat(case: DeviceCase, value: Reading[float], most: float, cool: float, unit: str) -> Finding | None:
    """Closed only where slowing down does not help: nothing of ours runs, or it runs as slow as it may."""
    if not most and not case.device.accelerator:
        return None
    limit = f"{most:g} {unit}" if most else ""
    if isinstance(value, Unavailable):
        return _unread(value, limit)
    slowed = f", slowed to {case.duty.factor:.0%}" if case.duty.factor < 1 else ""
    reading = f"{value:.0f} {unit}{slowed}"
    if not most or value <= cool:
        return Finding(want=Want.OPEN, reading=reading, limit=limit)
    helpless = not case.device.busy or (
        case.duty.factor <= case.policy.duty_min_percent / 100
        and case.moment.monotonic - case.duty.changed >= case.dwell
    )
    return Finding(want=Want.CLOSED if value > most and helpless else Want.HOLD, reading=reading, limit=limit)


def _vram(case: DeviceCase) -> Finding | None:
    if not case.device.accelerator:
        return None
    reserve = case.policy.vram_reserve_gib * GIB
    return _room(case.device.memory_free, reserve, case.device.memory_own, case.latch, case.moment)


def _unread(reading: Unavailable, limit: str) -> Finding:
    if not limit:
        return Finding(want=Want.OPEN, reading=reading.reason)
    if reading == BEING_READ:
        return Finding(want=Want.READING, reading=reading.reason, limit=limit)
    return Finding(want=Want.UNKNOWN, reading=f"cannot be read: {reading.reason}", limit=limit)


NODE_RULES: tuple[tuple[str, NodeRule], ...] = (
    ("schedule", _schedule),
    ("idle", _idle),
    ("battery", _battery),
    ("metered", _metered),
    ("ram", _ram),
    ("disk", _disk),
    ("bytes_day", _bytes_day),
    ("bytes_month", _bytes_month),
)
DEVICE_RULES: tuple[tuple[str, DeviceRule], ...] = (
    ("schedule", _device_schedule),
    ("foreign_gpu", _foreign),
    ("temperature", _temperature),
    ("power", _power),
    ("vram", _vram),
)
