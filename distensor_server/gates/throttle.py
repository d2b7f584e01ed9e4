"""How much a device is slowed down before its gate closes. Pure."""

from __future__ import annotations

from enum import StrEnum

from distensor.core.reading import Reading, Unavailable
from distensor_server.gates.model import DeviceReadings, Duty
from distensor_server.gates.rules import COOLER, LESS_POWER
from distensor_server.policy.policy import DevicePolicy

STEP_SECONDS = 10.0
"""A cooler needs some seconds to show the effect of a change; so long nothing is changed again."""
SLOWER, MUCH_SLOWER, FASTER = 0.85, 0.6, 1.1
FAR_ABOVE = 1.05


class Heat(StrEnum):
    """A reading beside its limit."""

    COOL = "cool"
    WARM = "warm"
    HOT = "hot"
    VERY_HOT = "very hot"


def next_duty(duty: Duty, device: DeviceReadings, policy: DevicePolicy, now: float) -> Duty:
    """The duty from now on: down in large steps, up in small ones, between the floor and 1."""
    floor = policy.duty_min_percent / 100
    factor = max(floor, duty.factor * _step(_worst(device, policy)))
    factor = min(1.0, factor)
    too_soon = now - duty.changed < STEP_SECONDS and duty.factor >= floor
    if factor == duty.factor or too_soon:
        return duty
    return Duty(factor=factor, changed=now)


def _worst(device: DeviceReadings, policy: DevicePolicy) -> Heat:
    hottest = _heat(device.temperature_c, policy.temperature_max_c, policy.temperature_max_c - COOLER)
    most_power = _heat(device.power_w, policy.power_max_w, policy.power_max_w * LESS_POWER)
    order = list(Heat)
    return max(hottest, most_power, key=order.index)


def _heat(value: Reading[float], most: float, cool: float) -> Heat:
    """Without a limit, nothing is hot; what cannot be read changes nothing."""
    if not most:
        return Heat.COOL
    if isinstance(value, Unavailable):
        return Heat.WARM
    if value > most:
        return Heat.VERY_HOT if value > most * FAR_ABOVE else Heat.HOT
    return Heat.COOL if value <= cool else Heat.WARM


def _step(heat: Heat) -> float:
    return {Heat.COOL: FASTER, Heat.WARM: 1.0, Heat.HOT: SLOWER, Heat.VERY_HOT: MUCH_SLOWER}[heat]
