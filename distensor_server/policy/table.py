"""Every setting that may change while the supervisor runs: unit, range, default and help, in one table.

The configuration file, `distensor limits`, the Limits screen and docs/limits.md all show it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from distensor.core.errors import ConfigError
from distensor.core.numbers import is_finite
from distensor_server.policy.windows import parse_windows
from distensor_server.policy.zones import named_zone

GATES = (
    "schedule",
    "idle",
    "battery",
    "metered",
    "ram",
    "disk",
    "bytes_day",
    "bytes_month",
    "foreign_gpu",
    "temperature",
    "power",
    "vram",
)
"""The names that `strict` may hold, in the order in which the gates are asked."""


class Kind(StrEnum):
    """What a value is."""

    SWITCH = "switch"
    WHOLE = "whole number"
    NUMBER = "number"
    TEXT = "text"
    WINDOWS = "windows"
    ZONE = "time zone"
    GATES = "gates"


_EXAMPLES = {
    Kind.SWITCH: "true or false",
    Kind.WHOLE: "a whole number",
    Kind.NUMBER: "a number",
    Kind.TEXT: "text in quotes",
    Kind.WINDOWS: 'times such as "mon-fri 18:00-08:00; sat,sun"',
    Kind.ZONE: "a time zone such as Europe/Berlin",
    Kind.GATES: f"a list of gates out of {', '.join(GATES)}",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One setting. `per_device`: a table [devices."ID"] may set it for one device."""

    name: str
    kind: Kind
    default: Any
    help: str
    unit: str = ""
    low: float = 0
    high: float = 0
    per_device: bool = False

    def check(self, value: Any, path: str = "") -> Any:
        """`value` as it is kept.

        Raises:
            ConfigError: it is of the wrong kind or out of range; the message begins with `path`, or with the name.
        """
        path = path or self.name
        try:
            return _CHECKS[self.kind](self, value)
        except _WrongError as wrong:
            raise ConfigError(f"{path} = {_shown(value)}: expected {wrong}") from None

    def parse(self, text: str) -> Any:
        """A value as somebody types it: without quotes, and lists with commas.

        Raises:
            ConfigError: as `check`.
        """
        return self.check(_typed(self.kind, text.strip()))

    @property
    def expected(self) -> str:
        """The range in words."""
        if self.kind in (Kind.WHOLE, Kind.NUMBER):
            return f"{self.low:g} to {self.high:g}" + (f" {self.unit}" if self.unit else "")
        return _EXAMPLES[self.kind]


class _WrongError(Exception):
    """What was expected instead."""


def _switch(key: Key, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _WrongError(_EXAMPLES[key.kind])
    return value


def _whole(key: Key, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _WrongError(_EXAMPLES[key.kind])
    if not key.low <= value <= key.high:
        raise _WrongError(key.expected)
    return value


def _number(key: Key, value: Any) -> float:
    if not is_finite(value):
        raise _WrongError(_EXAMPLES[key.kind])
    if not key.low <= value <= key.high:
        raise _WrongError(key.expected)
    return float(value)


def _text(key: Key, value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise _WrongError(_EXAMPLES[key.kind])
    if key.high and len(value) > key.high:
        raise _WrongError(f"at most {key.high:g} characters")
    return value


def _windows(key: Key, value: Any) -> str:
    try:
        parse_windows(_text(key, value))
    except ConfigError as error:
        raise _WrongError(f"{_EXAMPLES[key.kind]} ({error})") from None
    return str(value)


_LONGEST_ZONE = 64
"""No zone has a name that long, and looking one up follows each of its slashes."""


def _zone(key: Key, value: Any) -> str:
    name = _text(key, value)
    if len(name) > _LONGEST_ZONE:
        raise _WrongError(_EXAMPLES[key.kind])
    try:
        if name:
            named_zone(name)
    except ConfigError as error:
        raise _WrongError(f"{_EXAMPLES[key.kind]}; {error}") from None
    return name


def _gates(key: Key, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or any(item not in GATES for item in value):
        raise _WrongError(_EXAMPLES[key.kind])
    return tuple(value)


_CHECKS = {
    Kind.SWITCH: _switch,
    Kind.WHOLE: _whole,
    Kind.NUMBER: _number,
    Kind.TEXT: _text,
    Kind.WINDOWS: _windows,
    Kind.ZONE: _zone,
    Kind.GATES: _gates,
}


def _typed(kind: Kind, text: str) -> Any:
    """The TOML value that is meant; the text itself where it is none, so that the check can say what is wrong."""
    if kind is Kind.SWITCH:
        return {"true": True, "false": False}.get(text, text)
    if kind is Kind.GATES:
        return [word.strip() for word in text.split(",") if word.strip()]
    if kind in (Kind.WHOLE, Kind.NUMBER):
        try:
            return int(text)
        except ValueError:
            return _float_or_text(text) if kind is Kind.NUMBER else text
    return text


def _float_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _shown(value: Any) -> str:
    return "true" if value is True else "false" if value is False else f"{value!r:.60}"


KEYS: tuple[Key, ...] = (
    Key(
        name="schedule",
        kind=Kind.WINDOWS,
        default="",
        per_device=True,
        help="when this node may work, by the local clock; a window may pass midnight; empty: at any time",
    ),
    Key(name="schedule_zone", kind=Kind.ZONE, default="", help="time zone of the schedule; empty: this machine's"),
    Key(name="only_when_idle", kind=Kind.SWITCH, default=False, help="work only while nobody uses this machine"),
    Key(
        name="idle_minutes",
        kind=Kind.NUMBER,
        default=5.0,
        low=0.5,
        high=1440,
        unit="min",
        help="so long after the last key or mouse movement the machine counts as idle",
    ),
    Key(
        name="run_on_battery",
        kind=Kind.SWITCH,
        default=True,
        help="work while the machine runs on its battery",
    ),
    Key(
        name="battery_min_percent",
        kind=Kind.NUMBER,
        default=0.0,
        high=100,
        unit="%",
        help="with run_on_battery: stop below this charge; 0: no limit",
    ),
    Key(
        name="run_on_metered",
        kind=Kind.SWITCH,
        default=True,
        help="work while the network is metered (a phone's, for example)",
    ),
    Key(
        name="yield_gpu",
        kind=Kind.SWITCH,
        default=True,
        per_device=True,
        help="leave a GPU while other programs use it, a game for example",
    ),
    Key(
        name="yield_gpu_mib",
        kind=Kind.NUMBER,
        default=1024.0,
        high=1_000_000,
        unit="MiB",
        per_device=True,
        help="with yield_gpu: so much GPU memory of other programs counts as use; 0: any",
    ),
    Key(
        name="temperature_max_c",
        kind=Kind.NUMBER,
        default=0.0,
        high=120,
        unit="C",
        per_device=True,
        help="above it work slows down first, and stops when that does not help; 0: no limit",
    ),
    Key(
        name="power_max_w",
        kind=Kind.NUMBER,
        default=0.0,
        high=5000,
        unit="W",
        per_device=True,
        help="above it work slows down first, and stops when that does not help; 0: no limit",
    ),
    Key(
        name="duty_min_percent",
        kind=Kind.NUMBER,
        default=25.0,
        low=25,
        high=100,
        unit="%",
        per_device=True,
        help="how far work is slowed down before it stops; 100: never slowed",
    ),
    Key(
        name="vram_reserve_gib",
        kind=Kind.NUMBER,
        default=0.0,
        high=1024,
        unit="GiB",
        per_device=True,
        help="GPU memory that stays free for you; 0: none",
    ),
    Key(
        name="ram_reserve_gib",
        kind=Kind.NUMBER,
        default=0.0,
        high=65536,
        unit="GiB",
        help="memory that stays free for you; 0: none",
    ),
    Key(
        name="disk_reserve_gib",
        kind=Kind.NUMBER,
        default=0.0,
        high=1_000_000,
        unit="GiB",
        help="disk space that stays free where the state directory lies; 0: none",
    ),
    Key(
        name="bytes_day_gb",
        kind=Kind.NUMBER,
        default=0.0,
        high=1_000_000,
        unit="GB",
        help="traffic of workers in a day, both directions; 0: no limit",
    ),
    Key(
        name="bytes_month_gb",
        kind=Kind.NUMBER,
        default=0.0,
        high=10_000_000,
        unit="GB",
        help="traffic of workers in a calendar month, both directions; 0: no limit",
    ),
    Key(
        name="upload_max_mb_s",
        kind=Kind.NUMBER,
        default=0.0,
        high=100_000,
        unit="MB/s",
        help="most that all workers together send; 0: no limit",
    ),
    Key(
        name="download_max_mb_s",
        kind=Kind.NUMBER,
        default=0.0,
        high=100_000,
        unit="MB/s",
        help="most that all workers together receive; 0: no limit",
    ),
    Key(
        name="dwell_seconds",
        kind=Kind.NUMBER,
        default=60.0,
        low=5,
        high=3600,
        unit="s",
        help="a gate that closed stays closed until its reading was good for so long",
    ),
    Key(
        name="strict",
        kind=Kind.GATES,
        default=(),
        help="gates that close when their reading cannot be had; the others stay open and say so",
    ),
    Key(name="cpu_workers", kind=Kind.WHOLE, default=1, high=1024, help="how many workers may run on the CPU"),
    Key(
        name="drain_seconds",
        kind=Kind.NUMBER,
        default=90.0,
        high=3600,
        unit="s",
        help="time for running work to finish when this node is drained or stopped",
    ),
    Key(
        name="step_limit_seconds",
        kind=Kind.NUMBER,
        default=3600.0,
        high=7 * 86400,
        unit="s",
        help="a worker in a run that finishes nothing for so long is ended; 0: never",
    ),
    Key(
        name="metrics_port",
        kind=Kind.WHOLE,
        default=0,
        high=65535,
        help="loopback port of the Prometheus page; 0: none",
    ),
    Key(
        name="worker_port_first",
        kind=Kind.WHOLE,
        default=0,
        high=65535,
        help="workers listen on this port and those after it; 0: on any free one",
    ),
    Key(
        name="worker_ports",
        kind=Kind.WHOLE,
        default=16,
        low=1,
        high=256,
        help="with worker_port_first: so many ports; twice the number of workers is enough",
    ),
    Key(
        name="open_ports",
        kind=Kind.SWITCH,
        default=False,
        help="ask the home's router to forward these ports to this machine (UPnP); needs distensor-server[upnp]",
    ),
    Key(
        name="update_check",
        kind=Kind.SWITCH,
        default=False,
        help="ask update_index once a day whether there is a newer version",
    ),
    Key(name="update_index", kind=Kind.TEXT, default="", help="HTTPS address of the list of versions"),
    Key(
        name="energy_price",
        kind=Kind.NUMBER,
        default=0.0,
        high=1000,
        unit="per kWh",
        help="what a kWh costs you, in your currency; 0: not given, so no cost is shown",
    ),
    Key(name="currency", kind=Kind.TEXT, default="", high=8, help="a short name of your money, such as EUR"),
    Key(
        name="credits_per_currency",
        kind=Kind.NUMBER,
        default=0.0,
        high=1e9,
        help="so many credits are worth one unit of your currency; 0: not given, so the two are not mixed",
    ),
    Key(
        name="fixed_watts",
        kind=Kind.NUMBER,
        default=0.0,
        high=20000,
        unit="W",
        help="what this machine draws while it works, where nothing can be measured; shown as your figure",
    ),
)
BY_NAME = {key.name: key for key in KEYS}
PER_DEVICE = tuple(key for key in KEYS if key.per_device)


def find_key(name: str, path: str = "") -> Key:
    """The setting called `name`.

    Raises:
        ConfigError: there is none; the nearest names are told.
    """
    if (key := BY_NAME.get(name)) is not None:
        return key
    import difflib

    near = difflib.get_close_matches(name, BY_NAME, n=2)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise ConfigError(f"unknown key {path or name!r}; {hint}known are {', '.join(sorted(BY_NAME))}")
