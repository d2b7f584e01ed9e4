"""What the owner set: the command line first, then the configuration file, then the defaults."""

from __future__ import annotations

import re
import socket
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from distensor.core.errors import ConfigError
from distensor.core.ids import is_valid_name
from distensor_server.logfiles import MAX_BYTES

DEFAULT_CPU_WORKERS = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What may change while the supervisor runs (SIGHUP)."""

    cpu_workers: int = DEFAULT_CPU_WORKERS
    drain_seconds: float = 90.0
    step_limit_seconds: float = 3600.0
    """A worker in a run that finishes nothing for so long is ended with that reason; 0: never."""
    metrics_port: int = 0
    """Loopback port of the Prometheus page; 0: none."""
    update_check: bool = False
    """The owner's consent to ask `update_index` once a day whether there is a newer version."""
    update_index: str = ""
    """HTTPS address of the list of versions."""
    energy_price: float = 0.0
    """Of one kWh, in `currency`; 0: not given, so no cost is shown."""
    currency: str = ""
    """How the owner's money is called: EUR."""
    credits_per_currency: float = 0.0
    """So many credits are worth one unit of `currency`; 0: not given, so credits and money are not mixed."""
    fixed_watts: float = 0.0
    """What the machine draws while it works, for devices that cannot tell; it is shown as the owner's figure."""

    def __post_init__(self) -> None:
        if not 0 <= self.cpu_workers <= 1024:
            raise ConfigError(f"cpu_workers = {self.cpu_workers}: expected 0 to 1024")
        if not 0 <= self.drain_seconds <= 3600:
            raise ConfigError(f"drain_seconds = {self.drain_seconds}: expected 0 to 3600")
        if not 0 <= self.step_limit_seconds <= 7 * 86400:
            raise ConfigError(f"step_limit_seconds = {self.step_limit_seconds}: expected 0 (never) to 604800 (a week)")
        if not 0 <= self.metrics_port <= 65535:
            raise ConfigError(f"metrics_port = {self.metrics_port}: expected 1 to 65535, or 0 for none")
        for name, high in (("energy_price", 1000), ("credits_per_currency", 1e9), ("fixed_watts", 20000)):
            if not 0 <= getattr(self, name) <= high:
                raise ConfigError(f"{name} = {getattr(self, name)}: expected 0 to {high:g}")
        if len(self.currency) > 8 or not self.currency.isprintable():
            raise ConfigError(f"currency = {self.currency!r:.40}: expected a short name such as EUR")
        if self.update_check and not self.update_index.startswith("https://"):
            raise ConfigError(
                f"update_index = {self.update_index!r}: update_check needs the address of a list, https://..."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything the supervisor is told at its start. `host` is where workers listen and where peers reach them."""

    state_dir: Path
    socket_path: Path
    name: str
    host: str = "127.0.0.1"
    config_file: Path | None = None
    overrides: Mapping[str, Any] | None = None
    """Limits from the command line: they win over the file, also after it is read again."""
    log_bytes: int = MAX_BYTES
    """How long one log file gets; five of them are kept."""

    def __post_init__(self) -> None:
        if not is_valid_name(self.name):
            raise ConfigError(
                f"--name {self.name!r}: expected 1 to 63 letters, digits, dots, dashes or underscores, "
                "the first a letter or digit"
            )
        if not self.host or any(char.isspace() for char in self.host):
            raise ConfigError(f"--host {self.host!r}: expected an address or a host name of this machine")

    def limits(self) -> Limits:
        """The limits of this moment.

        Raises:
            ConfigError: the file cannot be read or says something that is not a setting.
        """
        from_file = Limits() if self.config_file is None else read_limits_file(self.config_file)
        return replace(from_file, **dict(self.overrides or {}))


def read_limits_file(path: Path) -> Limits:
    """Every key is checked: a misspelled one is an error, not a default."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration file {path}: {error}") from error
    known = {field.name: str(field.type) for field in fields(Limits)}
    for key, value in values.items():
        _check(path, key, value, known)
    try:
        return Limits(**values)
    except ConfigError as error:
        raise ConfigError(f"configuration file {path}: {error}") from error


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "str": ((str,), "text in quotes"),
    "bool": ((bool,), "true or false"),
}
"""By the annotation of a setting: what TOML may give, and how that is called."""


def _check(path: Path, key: str, value: Any, known: Mapping[str, str]) -> None:
    if key not in known:
        raise ConfigError(f"configuration file {path}: unknown key {key!r}; known are {', '.join(sorted(known))}")
    kinds, wanted = _KINDS[known[key]]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ConfigError(f"configuration file {path}: {key} = {value!r}, expected {wanted}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; the port may still be on it."""
    name = host.rsplit(":", 1)[0].strip("[]") if host.count(":") == 1 or host.startswith("[") else host
    return name == "localhost" or name == "::1" or name.startswith("127.")


def default_name() -> str:
    """The host name, made into a valid name."""
    text = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname().split(".")[0])[:63].lstrip("._-")
    return text or "node"


def default_state_dir(environment: Mapping[str, str]) -> Path:
    """systemd's state directory when there is one, else the user's."""
    from_systemd = environment.get("STATE_DIRECTORY", "").split(":")[0]
    return Path(from_systemd) if from_systemd else _user_state_dir() / "server"


def default_socket_path(environment: Mapping[str, str], platform: str) -> Path:
    """Where the dashboard looks too: DISTENSOR_SOCKET, the user's runtime directory, the user's state directory."""
    if explicit := environment.get("DISTENSOR_SOCKET"):
        return Path(explicit)
    runtime = environment.get("XDG_RUNTIME_DIR", "")
    if platform == "linux" and runtime and (Path(runtime) / "distensor").is_dir():
        return Path(runtime) / "distensor" / "supervisor.sock"
    return _user_state_dir() / "supervisor.sock"


def _user_state_dir() -> Path:
    # Imported here because a service is given its directories and never needs it.
    import platformdirs

    return Path(platformdirs.user_state_dir("distensor"))
