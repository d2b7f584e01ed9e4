"""Where the supervisor's local socket is. Both sides compute the same path."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

SOCKET_VARIABLE = "DISTENSOR_SOCKET"
SOCKET_NAME = "supervisor.sock"
SYSTEM_SOCKET = Path("/run/distensor/supervisor.sock")
LONGEST_SOCKET_PATH = 100
"""`sun_path` holds 108 bytes on Linux and 104 on macOS, with the closing zero."""


def socket_path(
    chosen: str | None, environ: Mapping[str, str], platform: str = sys.platform, system: Path = SYSTEM_SOCKET
) -> Path:
    """The option wins over the environment, the environment over the default place.

    Root, who alone may open it, sees the machine's own service where no supervisor of its own runs.
    """
    named = chosen or environ.get(SOCKET_VARIABLE)
    if named:
        return Path(named).expanduser()
    own = _default_folder(environ, platform) / SOCKET_NAME
    return system if os.access(system, os.F_OK) and not own.exists() else own


def path_too_long(path: Path) -> bool:
    return len(str(path).encode()) > LONGEST_SOCKET_PATH


def _default_folder(environ: Mapping[str, str], platform: str) -> Path:
    runtime = environ.get("XDG_RUNTIME_DIR")
    if platform.startswith("linux") and runtime and (Path(runtime) / "distensor").is_dir():
        return Path(runtime) / "distensor"
    import platformdirs  # costs 15 ms, and most Linux desktops never need it

    return Path(platformdirs.user_state_dir("distensor"))
