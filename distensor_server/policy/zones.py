"""The time zone of this machine, with its changes of the clock."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, tzinfo
from pathlib import Path

from distensor.core.errors import ConfigError

LOCALTIME = Path("/etc/localtime")


def named_zone(name: str) -> tzinfo:
    """Raises ConfigError for a name that the system has no zone for."""
    from zoneinfo import ZoneInfo

    try:
        return ZoneInfo(name)
    except (OSError, ValueError, KeyError) as error:
        # ZoneInfoNotFoundError is a KeyError; a name that leads out of the directory is a ValueError.
        raise ConfigError(f"this system has no time zone {name!r:.60}") from error


def local_zone(environment: Mapping[str, str], localtime: Path = LOCALTIME) -> tzinfo:
    """What TZ says, else /etc/localtime, else UTC: the same that the system's own programs show."""
    from zoneinfo import ZoneInfo

    name = environment.get("TZ", "").removeprefix(":")
    if name and not name.startswith("/"):
        try:
            return ZoneInfo(name)
        except (OSError, ValueError, KeyError):
            return UTC  # as the C library does
    try:
        with (Path(name) if name else localtime).open("rb") as file:
            return ZoneInfo.from_file(file)
    except (OSError, ValueError):
        return UTC
