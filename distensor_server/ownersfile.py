"""The file that `distensor limits set` writes: settings on top of those of the configuration file.

It is written whole, so that a crash leaves the old or the new one; nobody else's file is ever edited.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distensor_server.config import read_settings_file
from distensor_server.policy.policy import DEVICES
from distensor_server.statedir import remove, write_text

HEADER = (
    "# Written by `distensor limits set`; it wins over the configuration file.\n"
    "# Comments of yours belong there: here they are lost with the next change.\n"
)


def read_owners_file(path: Path) -> dict[str, Any]:
    """Its settings; none where it does not exist. Raises ConfigError for one that somebody broke."""
    return read_settings_file(path) if path.exists() else {}


def changed(values: Mapping[str, Any], name: str, value: Any, device: str | None) -> dict[str, Any]:
    """`values` with one setting set, or without it where `value` is None."""
    after = {**values, DEVICES: {key: dict(table) for key, table in values.get(DEVICES, {}).items()}}
    table = after if device is None else after[DEVICES].setdefault(device, {})
    if value is None:
        table.pop(name, None)
    else:
        table[name] = value
    after[DEVICES] = {key: table for key, table in after[DEVICES].items() if table}
    return after if after[DEVICES] else {key: value for key, value in after.items() if key != DEVICES}


def write_owners_file(path: Path, values: Mapping[str, Any]) -> None:
    """Replace the file; without settings there is none.

    Raises:
        StoreError: it cannot be written.
    """
    if values:
        write_text(path, HEADER + to_toml(values))
    else:
        remove(path)


def to_toml(values: Mapping[str, Any]) -> str:
    """Settings as TOML: only the kinds of values that settings have."""
    lines = [f"{name} = {_literal(value)}" for name, value in sorted(values.items()) if name != DEVICES]
    for device, table in sorted(values.get(DEVICES, {}).items()):
        lines += ["", f"[{DEVICES}.{_literal(device)}]"]
        lines += [f"{name} = {_literal(value)}" for name, value in sorted(table.items())]
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    """JSON's numbers, lists, truth values and printable texts are TOML's too."""
    return json.dumps(value, ensure_ascii=False)
