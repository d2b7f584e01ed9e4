"""How long nobody has used this machine. Our own load does not count, and a machine without people is idle.

Linux: systemd-logind knows all sessions and, of a terminal, when it was last typed at. A desktop tells logind only when
it wants to; GNOME and KDE can be asked for the exact time over the session's bus. A desktop that does neither is a
reading that cannot be had: to take it for 'in use' would mean to wait for ever, as others do on Wayland.
macOS: the HID system counts nanoseconds since the last input.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from distensor.core.reading import Reading, Unavailable
from distensor_server.surroundings.ask import Ask

NOBODY = math.inf
DEV = Path("/dev")
_GRAPHICAL = ("x11", "wayland", "mir")
_MUTTER = (
    "busctl",
    "--user",
    "call",
    "org.gnome.Mutter.IdleMonitor",
    "/org/gnome/Mutter/IdleMonitor/Core",
    "org.gnome.Mutter.IdleMonitor",
    "GetIdletime",
)
_SCREEN_SAVER = (
    "busctl",
    "--user",
    "call",
    "org.freedesktop.ScreenSaver",
    "/org/freedesktop/ScreenSaver",
    "org.freedesktop.ScreenSaver",
    "GetSessionIdleTime",
)
_PROPERTIES = ("IdleHint", "IdleSinceHint", "Type", "Class", "State")
_MUTE = Unavailable(
    reason="the desktop tells nobody when it is idle; let it set the session's idle hint (swayidle, xss-lock)"
)


async def idle_seconds(ask: Ask, *, platform: str, now: float, dev: Path = DEV) -> Reading[float]:
    """Seconds since somebody used the machine; infinite when nobody is logged in. `now` is Unix time."""
    return await _macos(ask) if platform == "darwin" else await _linux(ask, now, dev)


async def _macos(ask: Ask) -> Reading[float]:
    told = await ask(("ioreg", "-c", "IOHIDSystem"))
    if isinstance(told, Unavailable):
        return told
    found = re.search(r'"HIDIdleTime"\s*=\s*(\d+)', told)
    return int(found[1]) / 1e9 if found else NOBODY


async def _linux(ask: Ask, now: float, dev: Path) -> Reading[float]:
    listed = await ask(("loginctl", "list-sessions", "--no-legend"))
    if isinstance(listed, Unavailable):
        return _terminals(dev, now)
    idle = NOBODY
    for session in (line.split()[0] for line in listed.splitlines() if line.split()):
        options = [word for name in _PROPERTIES for word in ("-p", name)]
        shown = await ask(("loginctl", "show-session", session, *options))
        if isinstance(shown, Unavailable):
            continue  # it has just ended
        one = await _session(ask, _properties(shown), now)
        if isinstance(one, Unavailable):
            return one
        idle = min(idle, one)
    return idle


def _properties(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


async def _session(ask: Ask, session: Mapping[str, str], now: float) -> Reading[float]:
    if session.get("Class") != "user" or session.get("State") == "closing":
        return NOBODY  # the login screen, or what is left of somebody who is gone
    since = int(session["IdleSinceHint"]) / 1e6 if session.get("IdleSinceHint", "").isdigit() else 0.0
    if session.get("IdleHint") == "yes":
        return max(0.0, now - since) if since else 0.0
    if session.get("Type") not in _GRAPHICAL:
        return 0.0
    exact = await _from_desktop(ask)
    if not isinstance(exact, Unavailable):
        return exact
    # A desktop that sets the hint has left the time of the last change; one that never did has none.
    return 0.0 if since else _MUTE


async def _from_desktop(ask: Ask) -> Reading[float]:
    for command, per_second in ((_MUTTER, 1000.0), (_SCREEN_SAVER, 1.0)):
        told = await ask(command)
        if not isinstance(told, Unavailable) and (found := re.fullmatch(r"[tu] (\d+)\s*", told)):
            return int(found[1]) / per_second
    return _MUTE


def _terminals(dev: Path, now: float) -> Reading[float]:
    """Without logind: when a terminal was last typed at. The kernel keeps it as the time of the last access."""
    typed = max(_accessed([*dev.glob("tty[0-9]*"), *dev.glob("pts/[0-9]*")]), default=None)
    return NOBODY if typed is None else max(0.0, now - typed)


def _accessed(paths: Iterable[Path]) -> Iterable[float]:
    for path in paths:
        try:
            yield path.stat().st_atime
        except OSError:
            continue
