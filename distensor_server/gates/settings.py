"""`limits_get`, `limits_set` and `limits_unset`: the owner reads and changes settings of the running supervisor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distensor.core.errors import ConfigError, StoreError
from distensor_server.config import LIMITS_KEYS, Layer, Limits, make_limits, source_of
from distensor_server.localserver import Method, RequestError
from distensor_server.node import Node
from distensor_server.ownersfile import changed, read_owners_file, write_owners_file
from distensor_server.picture import Gate
from distensor_server.policy.policy import DEVICES
from distensor_server.policy.table import KEYS, Key, find_key

_PARAMETERS = {
    "limits_get": {"key", "device"},
    "limits_set": {"key", "value", "device", "check"},
    "limits_unset": {"key", "device", "check"},
}


class LimitsDesk:
    """`changed_by` says which gates would close with other limits, and which could not be read."""

    def __init__(self, node: Node, changed_by: Callable[[Limits], Sequence[Gate]]) -> None:
        self._node = node
        self._changed_by = changed_by

    def methods(self) -> Mapping[str, Method]:
        return {"limits_get": self._get, "limits_set": self._set, "limits_unset": self._unset}

    def section(self) -> dict[str, Any]:
        """All settings, as the dashboard shows them."""
        layers = self._node.layers
        limits = make_limits(layers)
        devices = sorted(limits.policy.devices)
        rows = [_row(key, layers, limits, None) for key in KEYS]
        own = [_row(key, layers, limits, device) for device in devices for key in KEYS if key.per_device]
        return {
            "file": str(self._node.settings.owner_file),
            "rows": [*rows, *(row for row in own if row["source"] != source_of(layers, row["key"]))],
        }

    def _get(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        _known("limits_get", params)
        if "key" not in params:
            return self.section()
        key, device = _named(params)
        layers = self._node.layers
        return {"rows": [_row(key, layers, make_limits(layers), device)]}

    def _set(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        _known("limits_set", params)
        key, device = _named(params)
        if "value" not in params:
            raise RequestError(code="bad_params", message="limits_set needs a value", fix=f"expected {key.expected}")
        given = params["value"]
        try:
            value = key.parse(given) if isinstance(given, str) else key.check(given)
        except ConfigError as error:
            raise RequestError(code="bad_value", message=str(error), fix=key.help) from error
        return self._change(key, value, device, check=bool(params.get("check")))

    def _unset(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        _known("limits_unset", params)
        key, device = _named(params)
        return self._change(key, None, device, check=bool(params.get("check")))

    def _change(self, key: Key, value: Any, device: str | None, *, check: bool) -> Mapping[str, Any]:
        """Checked as a whole before anything is written; with `check`, nothing is."""
        settings = self._node.settings
        before = _value(key, self._node.limits, device)
        try:
            owners = changed(read_owners_file(settings.owner_file), key.name, value, device)
            layers = settings.layers(owners)
            limits = make_limits(layers)
        except ConfigError as error:
            raise RequestError(code="bad_value", message=str(error), fix=key.help) from error
        changes = self._changed_by(limits)
        closes = [gate for gate in changes if not gate.open]
        if not check:
            self._keep(owners)
            self._node.set_limits(limits, layers)
            self._node.journal.add("info", "owner", self._said(key, value, device))
        row = _row(key, layers, limits, device)
        return {
            **row,
            "before": _plain(before),
            "changed": not check,
            "closes": [_shown(gate) for gate in closes],
            "unread": [_shown(gate) for gate in changes if gate.open],
            "ends_workers": self._affected(closes),
            "note": _overruled(key, value, row),
        }

    def _keep(self, owners: Mapping[str, Any]) -> None:
        try:
            write_owners_file(self._node.settings.owner_file, owners)
        except StoreError as error:
            raise RequestError(code="not_written", message=str(error), fix="free space, or allow writing") from error

    def _said(self, key: Key, value: Any, device: str | None) -> str:
        where = f" of {device}" if device else ""
        return f"limit {key.name}{where} " + ("back to its default" if value is None else f"set to {_plain(value)}")

    def _affected(self, closes: Sequence[Gate]) -> list[str]:
        """The workers that would end."""
        devices = {gate.device for gate in closes}
        return [
            worker.name
            for worker in self._node.workforce.workers
            if worker.life.wanted and (None in devices or worker.assignment.device_id in devices)
        ]


def _shown(gate: Gate) -> dict[str, Any]:
    return {"gate": gate.gate, "device": gate.device, "reading": gate.reading}


def _known(method: str, params: Mapping[str, Any]) -> None:
    if unknown := params.keys() - _PARAMETERS[method]:
        raise RequestError(code="bad_params", message=f"{method} does not take {', '.join(sorted(unknown))}")


def _named(params: Mapping[str, Any]) -> tuple[Key, str | None]:
    name, device = params.get("key"), params.get("device")
    if not isinstance(name, str) or not (device is None or (isinstance(device, str) and _is_id(device))):
        raise RequestError(code="bad_params", message="expected a key, and the id of a device or none, as text")
    try:
        key = find_key(name)
    except ConfigError as error:
        raise RequestError(code="unknown_key", message=str(error), fix="distensor limits get lists them") from error
    if device is not None and not key.per_device:
        raise RequestError(code="bad_params", message=f"{name} holds for the whole node, not for one device")
    return key, device


def _is_id(device: str) -> bool:
    return device.isprintable() and 0 < len(device) <= 100


def _row(key: Key, layers: Sequence[Layer], limits: Limits, device: str | None) -> dict[str, Any]:
    return {
        "key": key.name,
        "device": device,
        "value": _plain(_value(key, limits, device)),
        "default": _plain(key.default),
        "unit": key.unit,
        "kind": key.kind.value,
        "expected": key.expected,
        "per_device": key.per_device,
        "source": source_of(layers, key.name, device),
        "help": key.help,
    }


def _value(key: Key, limits: Limits, device: str | None) -> Any:
    if key.name in LIMITS_KEYS:
        return getattr(limits, key.name)
    policy = limits.policy
    if device is not None:
        return getattr(policy.of_device(device), key.name)
    return getattr(policy, key.name) if hasattr(policy, key.name) else getattr(policy.device, key.name)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _overruled(key: Key, value: Any, row: Mapping[str, Any]) -> str | None:
    if value is None or row["value"] == _plain(value):
        return None
    return f"it is kept, but the {row['source']} says {row['value']!r} and wins"


def describe_changes(before: Limits, after: Limits) -> str:
    """What reading the settings again changed, in words."""
    devices = sorted({*before.policy.devices, *after.policy.devices})
    told = []
    for device in (None, *devices):
        for key in KEYS if device is None else [key for key in KEYS if key.per_device]:
            old, new = _value(key, before, device), _value(key, after, device)
            if old != new:
                where = f'{DEVICES}."{device}".' if device else ""
                told.append(f"{where}{key.name} {_plain(old)!r} -> {_plain(new)!r}")
    return "; ".join(told) or "nothing changed"
