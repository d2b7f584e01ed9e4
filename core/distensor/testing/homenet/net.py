"""Hosts with a network namespace each, between them the emulated internet of `router.py`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distensor.core.errors import ConfigError, SessionError
from distensor.testing.homenet.profiles import HOME, Profile

_TOOLS = ("unshare", "nsenter", "setpriv", "ip")
_TUN = "/dev/net/tun"
_END_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Permission:
    """Whether this machine lets us emulate a network, and how or why not."""

    granted: bool
    reason: str


def permitted() -> Permission:
    """Find out by doing it: two hosts are made and one asks the other."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if sys.platform != "linux" or missing:
        what = f"{', '.join(missing)} not found" if missing else f"{sys.platform} has no network namespaces"
        return Permission(granted=False, reason=what)
    if not os.access(_TUN, os.R_OK | os.W_OK):
        return Permission(granted=False, reason=f"{_TUN} is not there, or this user may not open it")
    try:
        with HomeNet(["one"]):
            how = "as root" if os.geteuid() == 0 else "in a user namespace"
            return Permission(granted=True, reason=f"network namespaces {how}, TUN devices and a router in user space")
    except SessionError as error:
        return Permission(granted=False, reason=str(error))


@dataclass(frozen=True, kw_only=True, slots=True)
class Counters:
    """IP packets of one host, headers included: bytes that its line carried, and packets that it lost or refused."""

    sent: int
    received: int
    lost: int


class HomeNet:
    """Use as a context manager: with the block everything ends, and also when this process is killed.

    Args:
        hosts: their names; each is reached under `address(name)`.
        profile: of every host's line; `profiles` has those of single hosts.
        closed: hosts to which nobody may open a connection, as behind a home router.
        congestion: the algorithm of TCP in the namespaces ("cubic" is what most machines use); None: the system's.
        seed: decides which packets are lost.

    Raises:
        SessionError: not permitted on this machine; `permitted` says so beforehand.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        profile: Profile = HOME,
        *,
        profiles: Mapping[str, Profile] | None = None,
        closed: Collection[str] = (),
        congestion: str | None = None,
        seed: int = 0,
    ) -> None:
        if len(set(hosts)) != len(hosts) or not 1 <= len(hosts) <= 200:
            raise ConfigError(f"hosts {list(hosts)}: expected 1 to 200 different names")
        self._addresses = {name: (f"10.77.0.{i}", f"fd77::{i:x}") for i, name in enumerate(hosts, start=1)}
        self._user_namespace = os.geteuid() != 0
        unshare = ["unshare", "-Ur", "-n"] if self._user_namespace else ["unshare", "-n"]
        self._router = subprocess.Popen(
            [*unshare, sys.executable, "-m", "distensor.testing.homenet.router"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        orders = [
            {
                "name": name,
                "addresses": self._addresses[name],
                "profile": asdict((profiles or {}).get(name, profile)),
                "closed": name in closed,
                "congestion": congestion,
            }
            for name in hosts
        ]
        try:
            self._holders: dict[str, int] = self._ask({"seed": seed, "hosts": orders})["holders"]
        except BaseException:  # an interrupt included: the router must not stay
            self.close()
            raise

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._router.stdin, self._router.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(order).encode() + b"\n")
            stdin.flush()
            answer: dict[str, Any] = json.loads(stdout.readline() or b'{"error": "the router ended"}')
        except BrokenPipeError:
            answer = {"error": "the router ended"}
        if "error" in answer:
            raise SessionError(f"no emulated network: {answer['error']}")
        return answer

    def address(self, host: str) -> str:
        """IPv4 address of a host."""
        return self._addresses[host][0]

    def address6(self, host: str) -> str:
        """IPv6 address of a host."""
        return self._addresses[host][1]

    def command(self, host: str, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on a host; once it runs it is killed when whoever started it ends."""
        pid = self._holders[host]
        user = [f"--user=/proc/{pid}/ns/user", "--preserve-credentials"] if self._user_namespace else []
        return ["nsenter", *user, f"--net=/proc/{pid}/ns/net", "--", "setpriv", "--pdeathsig", "KILL", *command]

    def popen(self, host: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process on a host. Its pid is that of the command. Call it from a thread that lasts."""
        return subprocess.Popen(self.command(host, command), **options)

    def cut(self, one: str, other: str) -> None:
        """No packet passes between two hosts any more; those on their way still arrive."""
        self._ask({"cut": [one, other], "yes": True})

    def mend(self, one: str, other: str) -> None:
        """Undo `cut`."""
        self._ask({"cut": [one, other], "yes": False})

    def counters(self) -> dict[str, Counters]:
        """What every host's line has carried so far."""
        return {
            name: Counters(
                sent=both["up"]["bytes"],
                received=both["down"]["bytes"],
                lost=both["up"]["dropped"] + both["down"]["dropped"],
            )
            for name, both in self._ask({"counters": True}).items()
        }

    def close(self) -> None:
        """End the network; processes in it find their interface gone. Safe to call twice."""
        for stream in (self._router.stdin, self._router.stdout):
            if stream is not None:
                stream.close()
        try:
            self._router.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._router.kill()
            self._router.wait()

    def __enter__(self) -> HomeNet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
