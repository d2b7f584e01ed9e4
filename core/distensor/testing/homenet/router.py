"""`python -m distensor.testing.homenet.router`: the emulated internet as a process.

It makes a network namespace for each host, held open by a child, and a TUN device in it whose other end it holds. It
reads its orders as JSON lines on standard input and ends with it, and so do the namespaces: nothing has a name in the
system, so a killed owner leaves nothing to sweep.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import struct
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from distensor.core.clock import SYSTEM_CLOCK
from distensor.testing.homenet.packets import packed
from distensor.testing.homenet.profiles import Line, Profile, lines_of
from distensor.testing.homenet.routing import Place, Router

_TUNSETIFF = 0x400454CA
_TUN_WITHOUT_INFO = 0x1001
_LONGEST_PACKET = 1 << 16
_AT_ONCE = 64
"""Packets of one host that are read before the others have their turn."""
_HOLD = ("unshare", "-n", "sh", "-c", "echo; exec cat")
"""Says that the namespace is there, then lasts as long as standard input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Host:
    place: Place
    tun: int
    holder: subprocess.Popen[bytes]


def _open_host(index: int, order: dict[str, Any], chance: random.Random) -> _Host:
    device = f"home{index}"
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", device.encode(), _TUN_WITHOUT_INFO))
    holder = subprocess.Popen(_HOLD, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    if not holder.stdout.readline():
        raise OSError("a second network namespace is not permitted")
    move = ["ip", "link", "set", device, "netns", str(holder.pid)]
    subprocess.run(move, check=True)
    _configure(holder.pid, device, order)
    up, down = lines_of(Profile(**order["profile"]), chance)
    addresses = tuple(map(packed, order["addresses"]))
    place = Place(name=order["name"], addresses=addresses, up=up, down=down, closed=order["closed"])
    return _Host(place=place, tun=tun, holder=holder)


def _configure(pid: int, device: str, order: dict[str, Any]) -> None:
    v4, v6 = order["addresses"]
    enter = ["nsenter", f"--net=/proc/{pid}/ns/net"]
    lines = ["link set lo up", f"addr add {v4}/32 dev {device}", f"addr add {v6}/128 dev {device} nodad"]
    lines += [f"link set {device} up", f"route add default dev {device}", f"route add ::/0 dev {device}"]
    subprocess.run([*enter, "ip", "-batch", "-"], input="\n".join(lines).encode(), check=True)
    if order["congestion"]:
        tcp = "/proc/sys/net/ipv4/tcp_congestion_control"
        subprocess.run([*enter, "sh", "-c", f'echo "$0" > {tcp}', order["congestion"]], check=True)


def _counters(line: Line) -> dict[str, int]:
    return {"bytes": line.carried, "dropped": line.dropped}


class _Process:
    """Standard input, the TUN devices and the time."""

    def __init__(self, hosts: list[_Host]) -> None:
        self._hosts = {host.place.name: host for host in hosts}
        self._router = Router({name: host.place for name, host in self._hosts.items()})

    def run(self) -> None:
        orders = sys.stdin.fileno()
        by_tun = {host.tun: name for name, host in self._hosts.items()}
        while True:
            next_at = self._router.next_at
            wait = None if next_at is None else max(0.0, next_at - SYSTEM_CLOCK.monotonic())
            ready, _, _ = select.select([orders, *by_tun], [], [], wait)
            for tun in set(ready) - {orders}:
                self._read(tun, by_tun[tun])
            for name, packet in self._router.due(SYSTEM_CLOCK.monotonic()):
                self._write(self._hosts[name].tun, packet)
            if orders in ready:
                line = sys.stdin.readline()
                if not line:
                    return
                self._obey(json.loads(line))

    def _read(self, tun: int, name: str) -> None:
        now = SYSTEM_CLOCK.monotonic()
        for _ in range(_AT_ONCE):
            try:
                self._router.take(name, os.read(tun, _LONGEST_PACKET), now)
            except BlockingIOError:
                return

    @staticmethod
    def _write(tun: int, packet: bytes) -> None:
        try:
            os.write(tun, packet)
        except OSError as error:
            sys.stderr.write(f"a packet was lost: {error}\n")

    def _obey(self, order: dict[str, Any]) -> None:
        """{"cut": [one, other], "yes": true}, or {"counters": true}; each is answered with a line."""
        if "cut" in order:
            one, other = order["cut"]
            self._router.cut(one, other, cut=order["yes"])
            _say({"cut": order["cut"]})
        else:
            places = [host.place for host in self._hosts.values()]
            _say({place.name: {"up": _counters(place.up), "down": _counters(place.down)} for place in places})


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> int:
    chance: random.Random
    first = json.loads(sys.stdin.readline())
    chance = random.Random(first["seed"])  # noqa: S311 - which packets are lost is to be the same in each run
    try:
        hosts = [_open_host(index, order, chance) for index, order in enumerate(first["hosts"])]
    except (OSError, subprocess.CalledProcessError) as error:
        _say({"error": str(error)})
        return 1
    _say({"holders": {host.place.name: host.holder.pid for host in hosts}})
    _Process(hosts).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
