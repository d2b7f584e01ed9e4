"""Nodes and configurations as JSON columns."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from distensor.core.control import DeviceInfo, DeviceKind, NodeInfo
from distensor.core.ids import DeviceId, NodeId
from distensor.core.parallel import ParallelConfig
from distensor.core.reading import Reading, Unavailable


def info_to_json(info: NodeInfo) -> str:
    return json.dumps(asdict(info), separators=(",", ":"))


def info_from_json(text: str) -> NodeInfo:
    fields = json.loads(text)
    return NodeInfo(
        name=fields["name"],
        host=fields["host"],
        version=fields["version"],
        devices=tuple(_device(device) for device in fields["devices"]),
        node_id=NodeId(fields["node_id"]),
        hosts=tuple(fields.get("hosts", ())),
        seen_host=fields.get("seen_host", ""),
    )


def _device(fields: dict[str, Any]) -> DeviceInfo:
    return DeviceInfo(
        device_id=DeviceId(fields["device_id"]),
        kind=DeviceKind(fields["kind"]),
        name=fields["name"],
        slots=fields["slots"],
        memory_bytes=_reading(fields["memory_bytes"]),
        free_bytes=_reading(fields["free_bytes"]),
        unusable=fields["unusable"],
    )


def _reading(value: Any) -> Reading[int]:
    return Unavailable(reason=value["reason"]) if isinstance(value, dict) else int(value)


def parallel_to_json(config: ParallelConfig) -> str:
    return json.dumps(asdict(config), separators=(",", ":"))


def parallel_from_json(text: str) -> ParallelConfig:
    return ParallelConfig(**json.loads(text))
