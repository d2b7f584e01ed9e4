"""The owner's limits as the supervisor tells them, and what it says would come of a change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from distensor_tui.fields import Fields, clean
from distensor_tui.model import Limits, Setting

OWN_FILE = "limits.toml"
"""What the supervisor calls the file of the owner's changes."""


def read_limits(raw: Any, problems: list[str]) -> Limits:
    """The section `limits`."""
    f = Fields(raw, "limits", problems)
    return Limits(file=f.text("file"), rows=tuple(_setting(row) for row in f.objects("rows")))


def _setting(f: Fields) -> Setting:
    return Setting(
        key=f.text("key"),
        device=f.maybe_text("device"),
        value=f.value("value"),
        default=f.value("default"),
        unit=f.text("unit"),
        expected=f.text("expected"),
        source=f.text("source"),
        per_device=f.flag("per_device"),
        help=f.text("help"),
    )


def source(setting: Setting) -> str:
    """In one word where the value is from."""
    if setting.source == "default":
        return "default"
    if setting.source.startswith("file"):
        return "you" if setting.source.endswith(OWN_FILE) else "file"
    return setting.source


def number_of(setting: Setting) -> float:
    """The value as a number; 0 where it is none."""
    try:
        return float(setting.value)
    except ValueError:
        return 0.0


def value_of(limits: Limits | None, key: str) -> float:
    """The number that holds for the whole node; 0 where there is none."""
    rows = limits.rows if limits is not None else ()
    return next((number_of(row) for row in rows if row.key == key and row.device is None), 0.0)


_WORDS = re.compile(r"\b(0|empty): ([^;,(]+)")


def with_unit(setting: Setting) -> str:
    """The value; for a value that means something of its own, what the help says of it: 'no limit' for 0."""
    text = setting.value or "-"
    meant: dict[str, str] = {word: what.strip() for word, what in _WORDS.findall(setting.help)}
    if special := meant.get(setting.value or "empty"):
        return special
    return f"{text} {setting.unit}" if setting.unit and text != "-" else text


def _unread(gate: Mapping[str, Any]) -> str:
    """A limit that nothing watches must not look like one that holds."""
    name, where = clean(str(gate.get("gate"))), clean(str(gate.get("device") or "this machine"))
    why = clean(str(gate.get("reading")))
    return f"This limit has no effect on {where}: {why}. `distensor limits set strict {name}` would stop work instead."


def consequence_of(result: Mapping[str, Any]) -> str:
    """What the supervisor says would come of a change."""
    closes, ends = result.get("closes"), result.get("ends_workers")
    parts = []
    if isinstance(closes, list) and closes:
        gates = [clean(f"{gate.get('gate')} ({gate.get('reading')})") for gate in closes if isinstance(gate, Mapping)]
        parts.append(f"This closes {', '.join(gates)}: you earn nothing until it opens again.")
    if isinstance(unread := result.get("unread"), list):
        parts += [_unread(gate) for gate in unread if isinstance(gate, Mapping)]
    if isinstance(ends, list) and ends:
        parts.append(f"Running work is drained: {', '.join(clean(str(name)) for name in ends)}.")
    if isinstance(note := result.get("note"), str) and note:
        parts.append(f"Mind: {clean(note)}.")
    return " ".join(parts) or "No gate closes and no running work ends."
