"""What the tests of the gates share: a machine in good order, and a policy without a single limit."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, tzinfo
from typing import Any
from zoneinfo import ZoneInfo

from distensor_server.gates.evaluate import evaluate
from distensor_server.gates.model import DeviceReadings, Memory, Moment, Readings, Verdicts
from distensor_server.picture import Gate
from distensor_server.policy.policy import Policy, check_values, make_policy
from distensor_server.surroundings.power import PowerSource

GIB = 1 << 30
BERLIN = ZoneInfo("Europe/Berlin")
START = 1_800_000_000.0
GPU = "GPU-7"
NO_LIMITS = make_policy({"yield_gpu": False})
FINE_GPU = DeviceReadings(
    device_id=GPU, accelerator=True, temperature_c=50.0, power_w=100.0, memory_free=20 * GIB, foreign_bytes=0
)
FINE = Readings(
    idle_seconds=7200.0,
    power=PowerSource(on_battery=False, percent=100.0),
    metered=False,
    ram_free=16 * GIB,
    disk_free=100 * GIB,
    devices=(FINE_GPU,),
)


def policy(**values: Any) -> Policy:
    """Only these limits."""
    return make_policy(check_values({"yield_gpu": False, **values}))


def at(text: str, zone: tzinfo = UTC) -> float:
    """Unix time of a local date and time."""
    return datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()


def moment(seconds: float = 0.0, *, start: float = START, zone: tzinfo = UTC) -> Moment:
    return Moment(wall=start + seconds, monotonic=100.0 + seconds, zone=zone)


def with_gpu(**readings: Any) -> Readings:
    return replace(FINE, devices=(replace(FINE_GPU, **readings),))


class Machine:
    """Looks again and again with the memory of the last time."""

    def __init__(self, limits: Policy, *, start: float = START, zone: tzinfo = UTC) -> None:
        self.limits = limits
        self.memory = Memory()
        self.seconds = 0.0
        self.start = start
        self.zone = zone
        self.verdicts = Verdicts(gates=(), duties={})

    def look(self, readings: Readings, after: float = 2.0) -> Verdicts:
        self.seconds += after
        now = moment(self.seconds, start=self.start, zone=self.zone)
        self.verdicts, self.memory = evaluate(readings, self.limits, self.memory, now)
        return self.verdicts

    def gate(self, name: str, device: str | None = None) -> Gate:
        return next(gate for gate in self.verdicts.gates if (gate.gate, gate.device) == (name, device))
