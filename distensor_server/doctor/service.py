"""Checks of the background service."""

from __future__ import annotations

from distensor.core.reading import Unavailable
from distensor_server.doctor.model import Finding, World, fail, ok, warning
from distensor_server.service.manager import ServiceState

INSTALL = "distensor service install"
_CAUSES = {
    77: ("its key is refused, or others can read it", "distensor auth status, then distensor auth login"),
    78: ("a setting is wrong", "look at the log: distensor service status"),
    75: ("another supervisor uses its state directory", "end the other one"),
    73: ("its directory or socket cannot be made", "see the checks `state` and `supervisor`"),
}


def service(world: World) -> Finding:
    found = world.service()
    if isinstance(found, Unavailable):
        return ok("service", f"not looked at: {found.reason}")
    if found.state is ServiceState.NOT_INSTALLED:
        return warning("service", "not installed: the supervisor runs only as long as you start it", INSTALL)
    if found.state is ServiceState.FAILED:
        code = None if isinstance(found.last_exit, Unavailable) else found.last_exit
        cause, fix = _CAUSES.get(code or 0, ("the log says why", "distensor logs, or the journal of the unit"))
        return fail("service", f"installed but failed: last exit {code} ({cause})", fix)
    if not found.enabled:
        return warning("service", f"{found.state}, but it does not start by itself", INSTALL)
    if found.state is ServiceState.STOPPED:
        return warning("service", "installed but stopped", INSTALL)
    return ok("service", f"{found.state} ({found.manager}), starts by itself")


def linger(world: World) -> Finding:
    """A user's services end with the last session, unless the user lingers."""
    users = world.root / "var/lib/systemd/linger"
    found = world.service()
    if world.platform == "darwin" or isinstance(found, Unavailable) or found.state is ServiceState.NOT_INSTALLED:
        return ok("linger", "does not matter without a service of this user")
    name = world.environment.get("USER") or world.environment.get("LOGNAME") or ""
    if world.uid == 0 or (name and (users / name).exists()):
        return ok("linger", "the service goes on after you log out")
    return warning("linger", "the service ends when you log out", f"loginctl enable-linger {name}".strip())
