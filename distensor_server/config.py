"""What the owner set: the command line first, then the configuration file, then the defaults."""

from __future__ import annotations

import re
import socket
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from distensor.core.errors import ConfigError
from distensor.core.ids import is_valid_name
from distensor_server.logfiles import MAX_BYTES
from distensor_server.policy.policy import DEVICES, Policy, check_values, make_policy, merge
from distensor_server.policy.table import BY_NAME

DEFAULT_CPU_WORKERS = 1
LAST_PORT = 65535
AUTO = "auto"
"""As `host`: the address that leads to the hub (ownaddress.py)."""
HOST_VARIABLE = "DISTENSOR_HOST"
LONGEST_HOST = 64
"""Characters of an address: what the hub takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What may change while the supervisor runs (SIGHUP)."""

    cpu_workers: int = DEFAULT_CPU_WORKERS
    drain_seconds: float = 90.0
    step_limit_seconds: float = 3600.0
    """A worker in a run that finishes nothing for so long is ended with that reason; 0: never."""
    metrics_port: int = 0
    """Loopback port of the Prometheus page; 0: none."""
    worker_port_first: int = 0
    """Workers listen on this port and those after it; 0: on any free one."""
    worker_ports: int = 16
    """How many ports that are: one for each worker, and for each that is just ending."""
    open_ports: bool = False
    """The owner's consent to ask the home's router to forward these ports (UPnP)."""
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

    policy: Policy = field(default_factory=Policy)
    """When and how hard this node works."""

    def __post_init__(self) -> None:
        for name in LIMITS_KEYS:
            BY_NAME[name].check(getattr(self, name))
        if self.worker_port_first + self.worker_ports > LAST_PORT + 1:
            raise ConfigError(
                f"worker_port_first = {self.worker_port_first} with worker_ports = {self.worker_ports}: expected ports "
                f"up to {LAST_PORT}"
            )
        if self.open_ports and not self.worker_port_first:
            raise ConfigError("open_ports = true: it needs worker_port_first, the first port that may be opened")
        if self.update_check and not self.update_index.startswith("https://"):
            raise ConfigError(
                f"update_index = {self.update_index!r}: update_check needs the address of a list, https://..."
            )

    @property
    def worker_port_range(self) -> tuple[int, int] | None:
        """First and last port on which workers listen; None for any."""
        first = self.worker_port_first
        return (first, first + self.worker_ports - 1) if first else None


LIMITS_KEYS = frozenset(item.name for item in fields(Limits)) - {"policy"}
"""Every other setting of the table belongs to the policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """Checked settings from one place. A later layer wins over an earlier one."""

    source: str
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything the supervisor is told at its start.

    `host` is where workers listen and peers reach them; 0.0.0.0 and :: are all interfaces. `advertise` are further
    addresses at which peers reach them, tried first.
    """

    state_dir: Path
    socket_path: Path
    name: str
    host: str = "127.0.0.1"
    advertise: tuple[str, ...] = ()
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
        for option, value in (("--host", self.host), *(("--advertise", each) for each in self.advertise)):
            if not value or len(value) > LONGEST_HOST or any(char.isspace() for char in value):
                raise ConfigError(f"{option} {value!r:.80}: expected an address or a host name of this machine")

    @property
    def owner_file(self) -> Path:
        """What `distensor limits set` writes. It lies with the state, where the service may write."""
        return self.state_dir / "limits.toml"

    def layers(self, owners: Mapping[str, Any] | None = None) -> tuple[Layer, ...]:
        """Where settings come from, the weakest first; the defaults are below all of them.

        Args:
            owners: instead of what the owner's file says.

        Raises:
            ConfigError: a file cannot be read or says something that is not a setting.
        """
        layers = []
        if self.config_file is not None:
            layers.append(Layer(source=f"file {self.config_file}", values=read_settings_file(self.config_file)))
        if owners is None and self.owner_file.exists():
            owners = read_settings_file(self.owner_file)
        if owners:
            layers.append(Layer(source=f"file {self.owner_file}", values=owners))
        if self.overrides:
            layers.append(Layer(source="command line", values=dict(self.overrides)))
        return tuple(layers)

    def limits(self) -> Limits:
        """The limits of this moment.

        Raises:
            ConfigError: as `layers`.
        """
        return make_limits(self.layers())


def make_limits(layers: Sequence[Layer]) -> Limits:
    """The settings of all layers on top of the defaults."""
    values = merge([layer.values for layer in layers])
    own = {name: value for name, value in values.items() if name in LIMITS_KEYS}
    return Limits(**own, policy=make_policy(values))


def source_of(layers: Sequence[Layer], name: str, device: str | None = None) -> str:
    """Which layer a setting has its value from, or 'default'."""
    for layer in reversed(layers):
        values = layer.values if device is None else layer.values.get(DEVICES, {}).get(device, {})
        if name in values:
            return layer.source
    return "default" if device is None else source_of(layers, name)


def read_settings_file(path: Path) -> dict[str, Any]:
    """Every key is checked: a misspelled one is an error, not a default.

    Raises:
        ConfigError: names the file, the key and what would be right.
    """
    try:
        return check_values(tomllib.loads(path.read_text()))
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, of a key, or a number of thousands of digits
        raise ConfigError(f"configuration file {path}: {error}") from error


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
