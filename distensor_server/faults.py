"""What is broken now, each fault with its code, cause, fix and the place of its log. Pure.

A gate that is closed is no fault: the owner wants it so, or it opens by itself. The section `faults` feeds the panels
of the dashboard, `distensor status` and the metrics.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from distensor.comm import LinkState
from distensor.core.control import WorkerState
from distensor_server.devices.model import Device
from distensor_server.exits import ExitCause
from distensor_server.picture import Picture, Unwritten, WorkerView

NO_KEY = "no_key"
"""Nothing is broken: the machine waits for its owner, and the gate `key` says so."""
OWN_LOG = "distensor logs"
FULL = (errno.ENOSPC, errno.EDQUOT)


class Part(StrEnum):
    """Where a fault is."""

    WORKER = "worker"
    DEVICE = "device"
    HUB = "hub"
    DISK = "disk"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """`subject` is the id of the worker or device; `log` is the command that shows what happened.

    `since` and `retry_at` are Unix time; None where nobody knows, or where nothing is tried again.
    """

    part: Part
    subject: str | None
    code: str
    cause: str
    fix: str
    log: str = OWN_LOG
    since: float | None = None
    retry_at: float | None = None


def faults(picture: Picture) -> list[Fault]:
    """All of this moment: what stops all work first."""
    found = [*_hub(picture), *_disk(picture.unwritten)]
    found += [_device(device) for device in picture.devices if device.fault]
    return found + [fault for worker in picture.workers if (fault := _worker(worker)) is not None]


def _hub(picture: Picture) -> Iterator[Fault]:
    link = picture.link
    if link.error is not None and link.state in (LinkState.OFFLINE, LinkState.REJECTED) and link.error.code != NO_KEY:
        yield Fault(
            part=Part.HUB,
            subject=None,
            code=link.error.code,
            cause=link.error.message,
            fix=link.error.fix,
            since=link.since,
            retry_at=link.next_retry_at,
        )


def _disk(unwritten: Unwritten | None) -> Iterator[Fault]:
    if unwritten is None:
        return
    full = unwritten.errno in FULL
    todo = "free some space there" if full else "let this user write there"
    yield Fault(
        part=Part.DISK,
        subject=None,
        code="disk_full" if full else "not_written",
        cause=unwritten.text,
        fix=f"{todo}; work goes on, and the hub's books count",
        since=unwritten.at,
    )


def _device(device: Device) -> Fault:
    """What was found at the start stays in `blocked`; without that, the device was usable before."""
    lost = device.blocked is None
    again = "it is used again as soon as it answers; if it does not, see `distensor doctor`, then restart the machine"
    return Fault(
        part=Part.DEVICE,
        subject=device.device_id,
        code="device_lost" if lost else "device_unusable",
        cause=device.unusable or "the driver gives no reason",
        fix=again if lost else "`distensor doctor` looks at drivers and permissions",
    )


_ADVICE = {
    ExitCause.OUT_OF_MEMORY: "it needs more memory than it gets: fewer workers here, or a smaller part of the model",
    ExitCause.PEER_LOST: "the machines at the other end are gone or out of reach",
}


def _worker(worker: WorkerView) -> Fault | None:
    life, assignment = worker.life, worker.assignment
    name = f"rank {assignment.rank} of {assignment.job_name or assignment.job_id}"
    times = f", {life.failures} times in a row" if life.failures > 1 else ""
    advice = f"; {_ADVICE[life.cause]}" if life.cause in _ADVICE else ""
    log = f"distensor logs --worker {worker.worker_id}"
    match life.state:
        case WorkerState.BROKEN:
            code, fix = (
                "crash_loop",
                f"`distensor retry {worker.worker_id}` (b in the dashboard) starts it again{advice}",
            )
        case WorkerState.BACKOFF:
            code, fix = "restarting", f"nothing to do: it is started again by itself{advice}"
        case _:
            return None
    return Fault(
        part=Part.WORKER,
        subject=worker.worker_id,
        code=code,
        cause=f"{name}: {life.last_exit or 'no reason is known'}{times}",
        fix=fix,
        log=log,
        since=worker.since,
        retry_at=worker.retry_at,
    )
