"""Where an installation lies, for one user or for the machine. The installers compute the same paths."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from distensor.core.errors import ConfigError
from distensor_server.service import manifest

LABEL = "org.distensor.server"
UNIT = "distensor.service"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The folders of one installation."""

    system: bool
    app: Path
    """Program files: virtual environments, and `current`, which points to the one in use."""
    state: Path
    config: Path
    manifest: Path
    unit_folder: Path
    logs: Path
    """What launchd writes for us; systemd has its journal."""
    variables: tuple[tuple[str, str], ...] = ()
    """What the program needs to find these folders: the shell's XDG variables, which no service manager knows."""

    @property
    def key_file(self) -> Path:
        """The key of a system installation; a user's lies where `distensor auth login` puts it."""
        return self.config / "key"


def user_layout(
    environment: Mapping[str, str], platform: str, manager: Mapping[str, str] = MappingProxyType({})
) -> Layout:
    """For the user with this HOME, by the XDG variables on Linux.

    Args:
        manager: the environment of the service manager, which looks for units by its own XDG_CONFIG_HOME.

    Raises:
        ConfigError: HOME is not set to a folder.
    """
    home = _home(environment)
    if platform == "darwin":
        support = home / "Library/Application Support/distensor"
        return Layout(
            system=False,
            app=support / "app",
            state=support,
            config=support,
            manifest=support / manifest.NAME,
            unit_folder=home / "Library/LaunchAgents",
            logs=home / "Library/Logs/distensor",
        )
    state = _xdg(environment, "XDG_STATE_HOME", home / ".local/state") / "distensor"
    config = _xdg(environment, "XDG_CONFIG_HOME", home / ".config")
    return Layout(
        system=False,
        app=_xdg(environment, "XDG_DATA_HOME", home / ".local/share") / "distensor",
        state=state,
        config=config / "distensor",
        manifest=state / manifest.NAME,
        unit_folder=_xdg(manager, "XDG_CONFIG_HOME", home / ".config") / "systemd/user",
        logs=state,
        variables=tuple(_unusual(environment, home)),
    )


_DEFAULTS = {"XDG_STATE_HOME": ".local/state", "XDG_CONFIG_HOME": ".config"}
"""What the supervisor itself looks at. The program files are named by the unit."""


def _unusual(environment: Mapping[str, str], home: Path) -> Iterator[tuple[str, str]]:
    for name, default in _DEFAULTS.items():
        if (path := _xdg(environment, name, home / default)) != home / default:
            yield name, str(path)


def system_layout(root: Path = Path("/")) -> Layout:
    """For the whole machine, on Linux. systemd makes the state directory for the user that it invents."""
    return Layout(
        system=True,
        app=root / "opt/distensor",
        state=root / "var/lib/private/distensor",
        config=root / "etc/distensor",
        manifest=root / "etc/distensor" / manifest.NAME,
        unit_folder=root / "etc/systemd/system",
        logs=root / "var/lib/private/distensor",
    )


def program(layout: Layout, prefix: Path | None = None) -> Path:
    """The `distensor-server` that a unit should name.

    It goes through `current` where that is the environment that runs, so that an update changes no unit.
    """
    prefix = prefix or Path(sys.prefix)
    current = layout.app / "current"
    used = current if current.exists() and prefix.resolve() == current.resolve() else prefix
    return used / "bin/distensor-server"


def _home(environment: Mapping[str, str]) -> Path:
    home = environment.get("HOME", "")
    if not home.startswith("/"):
        raise ConfigError(f"HOME = {home!r}: expected the path of the home folder")
    return Path(home)


def _xdg(environment: Mapping[str, str], name: str, default: Path) -> Path:
    """The XDG specification says to ignore a relative path."""
    value = environment.get(name, "")
    return Path(value) if value.startswith("/") else default
