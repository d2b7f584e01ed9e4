"""The memory and CPU that this process may really use: cgroup v2 and v1, not the host's figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from distensor.core.reading import Reading, Unavailable

DEFAULT_ROOT = Path("/sys/fs/cgroup")
DEFAULT_MEMBERSHIP = Path("/proc/self/cgroup")
NO_LIMIT_V1 = 2**60
"""v1 says 'no limit' with a number near 2**63; no machine has an exbibyte."""

_NO_LIMIT = Unavailable(reason="no limit set")
_NOT_COUNTED = Unavailable(reason="not counted here")


@dataclass(frozen=True, kw_only=True, slots=True)
class CgroupLimits:
    """`memory_free` is what the tightest limit still leaves. No limit is `Unavailable`: the host's figures count."""

    memory_limit: Reading[int] = _NO_LIMIT
    memory_free: Reading[int] = _NO_LIMIT
    cpus: Reading[float] = _NO_LIMIT
    oom_kills: Reading[int] = _NOT_COUNTED


def read_limits(root: Path = DEFAULT_ROOT, membership: Path = DEFAULT_MEMBERSHIP) -> CgroupLimits:
    """The tightest limits of this process's cgroup and of all above it."""
    paths = _memberships(membership)
    if "" in paths and (root / "cgroup.controllers").exists():
        return _read_v2(list(_upwards(root, paths[""])))
    return _read_v1(
        memory=list(_upwards(root / "memory", paths.get("memory", "/"))),
        cpu=list(_upwards(root / "cpu", paths.get("cpu", "/"))),
    )


def _memberships(file: Path) -> dict[str, str]:
    """Controller -> path; the key of v2 is the empty word."""
    try:
        # The name of a cgroup is any bytes, as that of a file.
        lines = file.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        found.update(dict.fromkeys(controllers.split(","), path))
    return found


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """The cgroup of `path` and its parents up to `root`.

    In a container without its own cgroup namespace the path is the host's and does not exist here: then only the
    root is left, and that is the container's own cgroup.
    """
    place = root / path.strip("/")
    if not place.is_relative_to(root) or ".." in place.parts:
        place = root
    for candidate in (place, *place.parents):
        if candidate.is_dir():
            yield candidate
        if candidate == root:
            return


def _read_v2(places: list[Path]) -> CgroupLimits:
    pairs = [
        (limit, _number(place / "memory.current", 0) - _reclaimable(place, "inactive_file"))
        for place in places
        if (limit := _limit(place / "memory.max")) is not None
    ]
    cpus = [cpus for place in places if (cpus := _cpu_max(place / "cpu.max")) is not None]
    kills = _field(places[0] / "memory.events", "oom_kill") if places else None
    return _combine(pairs, cpus, kills)


def _read_v1(memory: list[Path], cpu: list[Path]) -> CgroupLimits:
    pairs = [
        (limit, _number(place / "memory.usage_in_bytes", 0) - _reclaimable(place, "total_inactive_file"))
        for place in memory
        if (limit := _limit(place / "memory.limit_in_bytes")) is not None
    ]
    cpus = [cpus for place in cpu if (cpus := _cpu_quota(place)) is not None]
    kills = _field(memory[0] / "memory.oom_control", "oom_kill") if memory else None
    return _combine(pairs, cpus, kills)


def _combine(pairs: list[tuple[int, int]], cpus: list[float], kills: int | None) -> CgroupLimits:
    return CgroupLimits(
        memory_limit=min((limit for limit, _ in pairs), default=_NO_LIMIT),
        memory_free=min((max(0, limit - used) for limit, used in pairs), default=_NO_LIMIT),
        cpus=min(cpus, default=_NO_LIMIT),
        oom_kills=_NOT_COUNTED if kills is None else kills,
    )


def _limit(file: Path) -> int | None:
    """None where there is no limit: no such file, 'max', or v1's huge number."""
    value = _number(file, NO_LIMIT_V1)
    return value if 0 < value < NO_LIMIT_V1 else None


def _number(file: Path, missing: int) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return missing


def _reclaimable(place: Path, name: str) -> int:
    """Cached file pages count as used but are given back before anything is killed."""
    return _field(place / "memory.stat", name) or 0


def _field(file: Path, name: str) -> int | None:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return None


def _cpu_max(file: Path) -> float | None:
    try:
        quota, period = file.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        # ValueError also stands for 'max': no limit.
        return None


def _cpu_quota(place: Path) -> float | None:
    quota = _number(place / "cpu.cfs_quota_us", -1)
    period = _number(place / "cpu.cfs_period_us", 0)
    return quota / period if quota > 0 and period > 0 else None
