"""What the supervisor is given of the world around it. Tests give another one."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from distensor.core.reading import Reading, Unavailable
from distensor_server.surroundings.ask import Ask, ask
from distensor_server.surroundings.idle import idle_seconds
from distensor_server.surroundings.metered import is_metered
from distensor_server.surroundings.power import PowerSource, read_power


def disk_free(path: Path) -> Reading[int]:
    """Bytes that this user may still write where `path` lies."""
    try:
        return shutil.disk_usage(path).free
    except OSError as error:
        return Unavailable(reason=f"{path}: {error.strerror}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """The real machine, by default. `ask` runs a program; the others read files and must not block."""

    platform: str = sys.platform
    ask: Ask = ask
    read_power: Callable[[str], Reading[PowerSource]] = read_power
    disk_free: Callable[[Path], Reading[int]] = disk_free

    def power(self) -> Reading[PowerSource]:
        return self.read_power(self.platform)

    async def idle_seconds(self, now: float) -> Reading[float]:
        return await idle_seconds(self.ask, platform=self.platform, now=now)

    async def metered(self) -> Reading[bool]:
        return await is_metered(self.ask, platform=self.platform)
