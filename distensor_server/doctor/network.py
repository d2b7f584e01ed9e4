"""Checks of the key, the hub, the clock and the way of other machines to this one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from distensor.comm.address import PROXY_VARIABLES
from distensor.core.errors import AuthenticationError, ControlError
from distensor.core.reading import Unavailable
from distensor_server.config import is_loopback
from distensor_server.doctor.model import Finding, World, fail, ok, warning

LOGIN = "distensor auth login"
MOST_SKEW_SECONDS = 5.0
SLOW_SECONDS = 1.0


def key(world: World) -> Finding:
    if world.key_problem is not None:
        return fail("key", world.key_problem, f"repair the file, or give the key anew: {LOGIN}")
    if world.key is not None:
        return ok("key", f"{world.key.masked} from {world.key.source} ({world.key.where})")
    if world.registered:
        return ok("key", "none is needed: this machine is registered")
    return fail("key", "this machine has no key", LOGIN)


def keyring(world: World) -> Finding:
    found = world.store.probe()
    if isinstance(found, Unavailable):
        return ok("keyring", f"not used: {found.reason}; a key is kept in {world.store.file} with mode 0600")
    return ok("keyring", f"{found.backend} keeps the key")


def hub(world: World) -> Sequence[Finding]:
    """Name, connection, certificate, key: the first that fails ends it."""
    if world.hub is None:
        return [warning("hub", "no hub is known before there is a key", LOGIN)]
    rows: list[Finding] = []
    try:
        addresses = world.resolve(world.hub.host)
        rows.append(ok("hub name", f"{world.hub.host} is {', '.join(addresses)}"))
    except OSError as error:
        fix = "check the name and this machine's DNS; `getent hosts NAME` shows what it finds"
        return [fail("hub name", f"{world.hub.host} has no address: {error.strerror or error}", fix)]
    try:
        seconds = world.connect(world.hub)
    except OSError as error:
        fix = "check that the hub runs, and firewalls on the way"
        return [*rows, fail("hub connection", f"{world.hub} does not answer: {error.strerror or error}", fix)]
    text = f"{world.hub} answers in {seconds * 1000:.0f} ms"
    slow = warning("hub connection", text, "a slow way to the hub delays placement, not the work itself")
    return [*rows, slow if seconds > SLOW_SECONDS else ok("hub connection", text), *_trust(world)]


def _trust(world: World) -> list[Finding]:
    if world.hub is None or world.fingerprint is None:
        return []
    try:
        world.authority(world.hub, world.fingerprint)
    except AuthenticationError as error:
        fix = f"if the hub was set up anew, ask for a new key: {LOGIN}; else somebody is in between"
        return [fail("hub certificate", str(error), fix)]
    except ControlError as error:
        return [fail("hub certificate", str(error), "check the address: it is not a hub's")]
    return [ok("hub certificate", f"it is the expected one ({world.fingerprint[:16]})"), *_accepted(world)]


def _accepted(world: World) -> list[Finding]:
    """The hub's word about this machine: by the running supervisor, else by the key."""
    running = world.look()
    if not isinstance(running, Unavailable):
        section = running.sections.get("hub")
        error = section.get("error") if isinstance(section, dict) else None
        if isinstance(error, dict):
            return [fail("hub login", str(error.get("message")), str(error.get("fix") or LOGIN))]
        return [ok("hub login", f"the supervisor is {section.get('state') if isinstance(section, dict) else 'there'}")]
    if world.registered or world.key is None:
        return [ok("hub login", "tried at the next start: this machine is registered")]
    try:
        world.try_key(world.key.key)
    except ControlError as error:
        return [fail("hub login", str(error), f"ask the hub's operator for a new key: {LOGIN}")]
    return [ok("hub login", "the hub knows this key")]


def proxy(world: World) -> Finding:
    """None is used, which is worth knowing where only the proxy is let out."""
    found = [name for name in PROXY_VARIABLES if world.environment.get(name)]
    if not found:
        return ok("proxy", "none is set")
    return ok("proxy", f"{', '.join(found)} set; hub and peers are reached directly all the same")


def clock(world: World) -> Finding:
    running = world.look()
    section = running.sections.get("hub") if not isinstance(running, Unavailable) else None
    skew = section.get("clock_skew_s") if isinstance(section, dict) else None
    if not isinstance(skew, int | float):
        return ok("clock", "compared with the hub's while the supervisor is connected")
    text = f"{abs(skew):.1f} s {'behind' if skew > 0 else 'ahead of'} the hub's clock"
    if abs(skew) > MOST_SKEW_SECONDS:
        return warning("clock", text, "let the machine set its clock: timedatectl set-ntp true")
    return ok("clock", text)


def peers(world: World) -> Finding:
    """By which way the peers of the present job are reached."""
    running = world.look()
    jobs = running.sections.get("jobs") if not isinstance(running, Unavailable) else None
    links = [link for job in jobs or () if isinstance(job, dict) for link in job.get("links") or ()]
    ways = Counter(link["path"] for link in links if isinstance(link, dict) and isinstance(link.get("path"), str))
    if not ways:
        return ok("peers", "told while a job runs: by which way each peer is reached")
    text = ", ".join(f"{count} by {way}" for way, count in sorted(ways.items()))
    if ways["relay"]:
        fix = (
            "let your router forward the workers' ports to this machine, and start with --host 0.0.0.0 --advertise and "
            "the router's address; or leave it, at the relay's speed"
        )
        return warning("peers", f"connections to peers: {text}", fix)
    return ok("peers", f"connections to peers: {text}")


def ports(world: World) -> Finding:
    """What the router has opened, where the owner asked for it."""
    running = world.look()
    section = running.sections.get("ports") if not isinstance(running, Unavailable) else None
    if not isinstance(section, dict) or not section.get("consent"):
        return ok("ports", "the router is not asked to open any (open_ports)")
    trouble = [str(each) for each in section.get("trouble") or ()]
    opened = [each for each in section.get("open") or () if isinstance(each, int)]
    if not opened or trouble:
        text = "; ".join(trouble[:3]) or "nothing is open yet"
        fix = "switch UPnP on at the router, forward the ports there by hand, or set open_ports to false"
        return warning("ports", f"{len(opened)} open at the router: {text}", fix)
    where = f"ports {opened[0]} to {opened[-1]} of {section.get('external') or 'an address that it does not tell'}"
    lasting = "; this router keeps them open when the machine vanishes" if section.get("lasting") else ""
    return ok("ports", f"the router forwards {where} to this machine{lasting}")


def reachable(world: World) -> Finding:
    """Whether other machines' workers can reach this one's at the address that it gives them."""
    try:
        world.bind(world.host)
    except OSError as error:
        fix = "start with --host and an address of this machine; `ip address` or `ifconfig` lists them"
        return fail("host", f"workers cannot listen at {world.host}: {error.strerror or error}", fix)
    if is_loopback(world.host) and world.hub is not None and not is_loopback(world.hub.host):
        fix = "start with --host and this machine's address; check it with `distensor doctor --host ADDRESS`"
        return warning("host", f"other machines cannot reach workers at {world.host}", fix)
    return ok("host", f"workers can listen at {world.host}, where others reach this machine")
