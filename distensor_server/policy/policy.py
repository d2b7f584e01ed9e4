"""What the owner set, as a value: for the node, and for each device that has its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from distensor.core.errors import ConfigError
from distensor_server.policy.table import BY_NAME, PER_DEVICE, find_key
from distensor_server.policy.windows import Windows, parse_windows

DEVICES = "devices"
GIB = float(1 << 30)


def _default(name: str) -> Any:
    return field(default=BY_NAME[name].default)


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePolicy:
    """What holds for one device. Units are in the names; 0 is no limit. `schedule` is the device's own only."""

    schedule: str = _default("schedule")
    yield_gpu: bool = _default("yield_gpu")
    yield_gpu_mib: float = _default("yield_gpu_mib")
    temperature_max_c: float = _default("temperature_max_c")
    power_max_w: float = _default("power_max_w")
    duty_min_percent: float = _default("duty_min_percent")
    vram_reserve_gib: float = _default("vram_reserve_gib")

    @property
    def windows(self) -> Windows:
        return parse_windows(self.schedule)


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What holds for the node. Units are in the names; 0 is no limit."""

    schedule: str = _default("schedule")
    schedule_zone: str = _default("schedule_zone")
    only_when_idle: bool = _default("only_when_idle")
    idle_minutes: float = _default("idle_minutes")
    run_on_battery: bool = _default("run_on_battery")
    battery_min_percent: float = _default("battery_min_percent")
    run_on_metered: bool = _default("run_on_metered")
    ram_reserve_gib: float = _default("ram_reserve_gib")
    disk_reserve_gib: float = _default("disk_reserve_gib")
    bytes_day_gb: float = _default("bytes_day_gb")
    bytes_month_gb: float = _default("bytes_month_gb")
    upload_max_mb_s: float = _default("upload_max_mb_s")
    download_max_mb_s: float = _default("download_max_mb_s")
    dwell_seconds: float = _default("dwell_seconds")
    strict: tuple[str, ...] = _default("strict")
    device: DevicePolicy = DevicePolicy()
    """For devices without settings of their own."""
    devices: Mapping[str, DevicePolicy] = field(default_factory=dict)

    @property
    def windows(self) -> Windows:
        return parse_windows(self.schedule)

    def of_device(self, device_id: str) -> DevicePolicy:
        return self.devices.get(device_id, self.device)


_NODE_FIELDS = {field.name for field in fields(Policy)} - {"device", DEVICES}
_DEVICE_FIELDS = {field.name for field in fields(DevicePolicy)}
POLICY_KEYS = frozenset(_NODE_FIELDS | _DEVICE_FIELDS)
"""The settings of the table that are kept here; the others are the supervisor's own."""


def check_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one TOML file, each checked; [devices."ID"] becomes a mapping of mappings.

    Raises:
        ConfigError: an unknown key, a value of the wrong kind or range; the message begins with the path.
    """
    checked = {name: find_key(name).check(value) for name, value in values.items() if name != DEVICES}
    if DEVICES in values:
        checked[DEVICES] = _check_devices(values[DEVICES])
    return checked


def _check_devices(tables: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ConfigError(f'{DEVICES}: expected tables such as [{DEVICES}."GPU-7..."]')
    return {
        device: {name: _check_one(device, name, value) for name, value in t.items()} for device, t in tables.items()
    }


def _check_one(device: str, name: str, value: Any) -> Any:
    path = f'{DEVICES}."{device}".{name}'
    key = find_key(name, path)
    if not key.per_device:
        known = ", ".join(key.name for key in PER_DEVICE)
        raise ConfigError(f"{path}: this holds for the whole node, not for one device; of a device are {known}")
    return key.check(value, path)


def merge(layers: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Checked settings, the later layer wins; devices are merged key by key."""
    merged: dict[str, Any] = {}
    devices: dict[str, dict[str, Any]] = {}
    for layer in layers:
        merged.update({name: value for name, value in layer.items() if name != DEVICES})
        for device, table in layer.get(DEVICES, {}).items():
            devices.setdefault(device, {}).update(table)
    return {**merged, DEVICES: devices} if devices else merged


def make_policy(values: Mapping[str, Any]) -> Policy:
    """From checked settings; those that are not of a policy are left out."""
    node = {name: value for name, value in values.items() if name in _NODE_FIELDS}
    shared = {name: value for name, value in values.items() if name in _DEVICE_FIELDS - {"schedule"}}
    devices = {
        device: DevicePolicy(**{**shared, **{name: value for name, value in table.items() if name in _DEVICE_FIELDS}})
        for device, table in values.get(DEVICES, {}).items()
    }
    return Policy(**node, device=DevicePolicy(**shared), devices=devices)
