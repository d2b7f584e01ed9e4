"""The table of settings as docs/limits.md shows it."""

from __future__ import annotations

from distensor_server.policy.table import KEYS, Key, Kind


def markdown() -> str:
    """One row a setting."""
    head = "| setting | value | default | per device | what it does |\n|---|---|---|---|---|\n"
    return head + "".join(_row(key) for key in KEYS)


def _row(key: Key) -> str:
    value = "gates, see above" if key.kind is Kind.GATES else key.expected.replace("|", "\\|")
    device = "yes" if key.per_device else ""
    return f"| `{key.name}` | {value} | `{_default(key)}` | {device} | {key.help} |\n"


def _default(key: Key) -> str:
    if isinstance(key.default, bool):
        return str(key.default).lower()
    if isinstance(key.default, tuple):
        return "[]"
    return f'"{key.default}"' if isinstance(key.default, str) else f"{key.default:g}"
