"""Nodes, configurations, wishes and placements as JSON columns."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from distensor.core.control import DeviceInfo, DeviceKind, JobSpec, NodeInfo
from distensor.core.ids import DeviceId, NodeId
from distensor.core.job_report import PassedNode
from distensor.core.parallel import ParallelConfig
from distensor.core.reading import Reading, Unavailable
from distensor.hub.records import Placement


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


def wish_to_json(spec: JobSpec | None) -> str | None:
    return None if spec is None else json.dumps(asdict(spec), separators=(",", ":"))


def wish_from_json(text: str | None) -> JobSpec | None:
    if text is None:
        return None
    fields = json.loads(text)
    fields |= {
        "parallel": ParallelConfig(**fields["parallel"]),
        "aggregators": tuple(fields["aggregators"]),
        "bytes_per_rank": tuple(fields["bytes_per_rank"]),
        "device_kinds": tuple(map(DeviceKind, fields["device_kinds"])),
    }
    return JobSpec(**fields)


def placement_to_json(placement: Placement) -> str:
    """Empty for a job of which nothing is known; rules that many ranks share are written once."""
    if not placement.whys and not placement.passed:
        return ""
    rules = sorted(set(placement.whys))
    number = {rule: index for index, rule in enumerate(rules)}
    passed = [[one.node, one.why] for one in placement.passed]
    fields = {"rules": rules, "whys": [number[why] for why in placement.whys], "passed": passed}
    return json.dumps(fields, separators=(",", ":"))


def placement_from_json(text: str) -> Placement:
    if not text:
        return Placement()
    fields = json.loads(text)
    return Placement(
        whys=tuple(fields["rules"][index] for index in fields["whys"]),
        passed=tuple(PassedNode(node=node, why=why) for node, why in fields["passed"]),
    )
