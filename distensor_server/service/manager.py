"""What a service manager does for us, as one interface for systemd and launchd."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from distensor.core.reading import Reading


class ServiceState(StrEnum):
    NOT_INSTALLED = "not installed"
    RUNNING = "running"
    STARTING = "starting"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceStatus:
    """What the manager says about our service. A figure that it does not tell is 'not available' with the reason."""

    manager: str
    unit: Path
    state: ServiceState
    enabled: bool
    """Whether it starts with the machine or session."""
    pid: Reading[int]
    last_exit: Reading[int]


class ServiceManager(Protocol):
    """systemd or launchd."""

    unit_path: Path

    def render(self) -> str:
        """The unit file, marked as ours."""

    def available(self) -> str | None:
        """None when it can be asked; else why not, and what to do instead."""

    def activate(self) -> None:
        """Start the unit that was just written, now and at every start; a running one is restarted.

        Raises:
            ServiceError: the manager refused.
        """

    def deactivate(self) -> None:
        """Stop it and take it out of what starts by itself; returns once its process is gone.

        Raises:
            ServiceError: it does not stop.
        """

    def forget(self) -> None:
        """Called after the unit file was removed."""

    def status(self) -> ServiceStatus:
        """What is true now."""
