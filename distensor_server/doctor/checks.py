"""All checks in the order in which they are shown, and how they are run: side by side, each with a time limit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from distensor_server.doctor import machine, network, service, software
from distensor_server.doctor.model import Check, Finding, World, fail
from distensor_server.redact import redact_keys

LIMIT_SECONDS = 20.0
TORCH_LIMIT_SECONDS = 100.0
"""Importing torch from a cold disk takes tens of seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A check with its limit."""

    name: str
    check: Check
    limit: float = LIMIT_SECONDS


STEPS: Sequence[Step] = (
    Step(name="python", check=software.python),
    Step(name="wheels", check=software.wheels),
    Step(name="torch", check=software.torch, limit=TORCH_LIMIT_SECONDS),
    Step(name="devices", check=software.devices, limit=TORCH_LIMIT_SECONDS),
    Step(name="driver", check=software.driver),
    Step(name="state", check=machine.state),
    Step(name="identity", check=machine.identity),
    Step(name="supervisor", check=machine.socket),
    Step(name="disk", check=machine.disk),
    Step(name="memory", check=machine.memory),
    Step(name="files", check=machine.files),
    Step(name="watches", check=machine.watches),
    Step(name="key", check=network.key),
    Step(name="keyring", check=network.keyring),
    Step(name="hub", check=network.hub, limit=45.0),
    Step(name="proxy", check=network.proxy),
    Step(name="clock", check=network.clock),
    Step(name="host", check=network.reachable),
    Step(name="peers", check=network.peers),
    Step(name="ports", check=network.ports),
    Step(name="service", check=service.service),
    Step(name="linger", check=service.linger),
)


@dataclass(kw_only=True, slots=True)
class _Run:
    step: Step
    thread: threading.Thread
    found: list[Finding] = field(default_factory=list)


def examine(world: World, monotonic: Callable[[], float], steps: Sequence[Step] = STEPS) -> list[Finding]:
    """What every check finds. One that fails itself, or does not end, is a finding like any other."""
    started = monotonic()
    runs = [_start(step, world) for step in steps]
    for run in runs:
        run.thread.join(max(0.0, started + run.step.limit - monotonic()))
    return [finding for run in runs for finding in _outcome(run)]


def _start(step: Step, world: World) -> _Run:
    run = _Run(step=step, thread=threading.Thread())
    # A daemon: a check that hangs in the kernel may not keep the command from ending.
    run.thread = threading.Thread(target=_examine, args=(run, world), name=f"check {step.name}", daemon=True)
    run.thread.start()
    return run


def _examine(run: _Run, world: World) -> None:
    try:
        found = run.step.check(world)
    except Exception as error:  # noqa: BLE001 - one broken check may not take the others' answers away
        text = redact_keys(f"the check failed itself: {type(error).__name__}: {error}")
        found = fail(run.step.name, text, "please report this: distensor bugreport")
    run.found = [found] if isinstance(found, Finding) else list(found)


def _outcome(run: _Run) -> list[Finding]:
    if run.thread.is_alive():
        fix = "something that it asks does not answer: look at disks, drivers and network"
        return [fail(run.step.name, f"no answer within {run.step.limit:g} s", fix)]
    return run.found
