"""`distensor devices [ID] [--benchmark]`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distensor_tui import plain
from distensor_tui.answers import fail, print_json, print_text, show, with_supervisor
from distensor_tui.clock import system_monotonic, system_now
from distensor_tui.exitcodes import ExitCode
from distensor_tui.model import Device, Snapshot
from distensor_tui.once import Conversation
from distensor_tui.sections import apply
from distensor_tui.wire import Answer, Message, Update

SECTIONS = ("devices",)
MEASURED_WITHIN_S = 60.0
"""For each device: a child loads torch first, which may come from a slow disk."""
FEWEST_LETTERS = 4


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "device", nargs="?", metavar="ID", help="all that is known of one; the first letters are enough"
    )
    parser.add_argument("--benchmark", action="store_true", help="measure how fast they are, now")


def run(options: argparse.Namespace, path: Path) -> int:
    if options.device is None and not options.benchmark:
        return show(options, path, plain.devices, SECTIONS)

    def do(conversation: Conversation) -> int:
        snapshot, raw = conversation.snapshot()
        found = chosen(snapshot.devices or (), options.device)
        if not found:
            known = ", ".join(device.id for device in snapshot.devices or ()) or "none"
            return fail(options, "no_device", f"there is no device '{options.device}'", f"devices: {known}")
        if options.benchmark:
            wanted = {} if options.device is None else {"device": found[0].id}
            answer, raw = _measure(conversation, wanted, raw)
            if not answer.ok:
                return fail(options, answer.code, answer.message or answer.code, answer.fix)
        return _print(options, raw, [device.id for device in found], conversation.hello.server_version)

    return with_supervisor(options, path, do)


def chosen(devices: Sequence[Device], name: str | None) -> list[Device]:
    """All, the one with this id, or the only one whose id begins so."""
    if name is None:
        return list(devices)
    exact = [device for device in devices if device.id == name]
    begins = [device for device in devices if len(name) >= FEWEST_LETTERS and device.id.startswith(name)]
    return exact or (begins if len(begins) == 1 else [])


def _measure(conversation: Conversation, params: Mapping[str, object], raw: Any) -> tuple[Answer, Any]:
    """Ask, then wait until every device that was asked for has a newer benchmark than before."""
    before = _moments(raw)
    answer = conversation.ask("benchmark", params)
    waiting = set(answer.result.get("devices", ())) if answer.ok else set()
    deadline = system_monotonic() + MEASURED_WITHIN_S * len(waiting)
    while waiting:
        message: Message = conversation.read(deadline)
        if isinstance(message, Update) and "devices" in message.data:
            raw = {**raw, "devices": message.data["devices"]}
            now = _moments(raw)
            waiting = {device for device in waiting if now.get(device) == before.get(device)}
    return answer, raw


def _moments(raw: Any) -> dict[str, Any]:
    rows = raw.get("devices") if isinstance(raw, dict) else None
    found = [row for row in rows or () if isinstance(row, dict)]
    return {str(row.get("id")): (row.get("benchmark") or {}).get("at") for row in found}


def _print(options: argparse.Namespace, raw: Any, ids: Sequence[str], version: str) -> int:
    rows = [row for row in raw.get("devices") or () if isinstance(row, dict) and row.get("id") in ids]
    if options.json:
        print_json({"server_version": version, "devices": rows})
    else:
        devices = apply(Snapshot(), {"devices": rows}, full=True).devices or ()
        print_text("\n\n".join(plain.device_facts(device, system_now()) for device in devices))
    return ExitCode.OK
