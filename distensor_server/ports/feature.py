"""Keeps the workers' ports open at the router while the owner wants it, and takes them back afterwards.

Only with the owner's consent (`open_ports`), only the ports of `worker_port_first` and `worker_ports`, and only for a
time: a forwarding is renewed at half of it, so that of a machine that vanishes nothing stays open for longer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from distensor.core.reading import Reading, Unavailable
from distensor_server.addresses import EVERYWHERE
from distensor_server.config import Limits
from distensor_server.feature import Feature, SectionBuilder
from distensor_server.node import Node
from distensor_server.picture import Picture
from distensor_server.ports.router import Router, find_router
from distensor_server.sections import Section

LEASE_SECONDS = 3600
AGAIN_SECONDS = 300.0
"""After a failure: routers restart, and owners switch UPnP on."""

Find: TypeAlias = Callable[[], Reading[Router]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """What the router has done for us."""

    ports: tuple[int, ...] = ()
    external: str | None = None
    lasting: bool = False
    """It stays until it is withdrawn, because this router knows nothing else."""
    trouble: tuple[str, ...] = field(default=())
    """What did not work, each in words."""


class OpenPorts(Feature):
    """Section `ports`, events, and the router's address among those of the node."""

    def __init__(self, node: Node, *, find: Find = find_router) -> None:
        self._node = node
        self._find = find
        self._router: Router | None = None
        self._opened = Opened()
        self._changed = asyncio.Event()
        self._turn = threading.Lock()
        """Held while the router is asked for one forwarding: the end waits for that, and nothing opens after it."""
        self._asked: set[int] = set()
        self._ended = False

    def sections(self) -> Mapping[str, SectionBuilder]:
        return {"ports": self._section}

    def _section(self, _picture: Picture) -> Section:
        wanted, opened = self._node.limits.worker_port_range, self._opened
        return {
            "first": None if wanted is None else wanted[0],
            "last": None if wanted is None else wanted[1],
            "consent": self._node.limits.open_ports,
            "open": list(opened.ports),
            "external": opened.external,
            "lasting": opened.lasting,
            "trouble": list(opened.trouble),
        }

    def on_limits(self, limits: Limits) -> None:
        self._changed.set()

    def background(self) -> Sequence[Coroutine[Any, Any, None]]:
        return (self._run(),)

    def close(self) -> None:
        """Take back what is open. A router that has gone meanwhile costs some seconds of the end."""
        with self._turn:
            self._ended = True
        if self._router is not None:
            _withdraw(self._router, sorted(self._asked | set(self._opened.ports)))

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            wanted = self._node.limits.worker_port_range if self._node.limits.open_ports else None
            now = Opened() if wanted is None else await asyncio.to_thread(self._open, range(wanted[0], wanted[1] + 1))
            surplus = [port for port in self._opened.ports if port not in now.ports]
            if surplus and self._router is not None:
                await asyncio.to_thread(self._take_back, self._router, surplus)
            self._note(now)
            await self._sleep(None if wanted is None else AGAIN_SECONDS if now.trouble else LEASE_SECONDS / 2)

    async def _sleep(self, seconds: float | None) -> None:
        """Until the settings change, or so long."""
        changed = asyncio.ensure_future(self._changed.wait())
        sleeping = [] if seconds is None else [asyncio.ensure_future(self._node.clock.sleep_async(seconds))]
        try:
            await asyncio.wait([changed, *sleeping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (changed, *sleeping):
                task.cancel()

    def _open(self, ports: Sequence[int]) -> Opened:
        """In a thread: it blocks."""
        found = self._find()
        if isinstance(found, Unavailable):
            kept = tuple(port for port in self._opened.ports if port in ports)  # they may be in use
            return replace(self._opened, ports=kept, trouble=(found.reason,))
        self._router = found
        host = self._node.address.current
        if host not in EVERYWHERE and host != found.lan_address:
            return Opened(
                trouble=(
                    f"the router leads to {found.lan_address}, and workers listen at {host}: start with --host "
                    f"0.0.0.0 or --host {found.lan_address}",
                )
            )
        answers = self._forward(found, ports)
        external = found.external_address()
        failed = [answer.reason for answer in (*answers.values(), external) if isinstance(answer, Unavailable)]
        open_ports = {port: answer for port, answer in answers.items() if not isinstance(answer, Unavailable)}
        return Opened(
            ports=tuple(open_ports),
            external=None if isinstance(external, Unavailable) else external,
            lasting=0 in open_ports.values(),
            trouble=tuple(failed),
        )

    def _forward(self, router: Router, ports: Sequence[int]) -> dict[int, Reading[int]]:
        answers: dict[int, Reading[int]] = {}
        for port in ports:
            with self._turn:
                if self._ended:
                    break
                self._asked.add(port)
                answers[port] = router.forward(port, LEASE_SECONDS)
        return answers

    def _take_back(self, router: Router, ports: Sequence[int]) -> None:
        with self._turn:
            _withdraw(router, ports)
            self._asked.difference_update(ports)

    def _note(self, now: Opened) -> None:
        before, self._opened = self._opened, now
        self._node.outside = () if now.external is None or not now.ports else (now.external,)
        if now == before:
            return
        for words in now.trouble:
            if words not in before.trouble:
                self._node.journal.add("warning", "ports", words[:300])
        if now.ports != before.ports or now.external != before.external:
            self._node.journal.add("info", "ports", said_of(now))
        self._node.on_change()


def said_of(opened: Opened) -> str:
    """One line for people."""
    if not opened.ports:
        return "no port is open at the router"
    many = f"ports {opened.ports[0]} to {opened.ports[-1]}" if len(opened.ports) > 1 else f"port {opened.ports[0]}"
    where = "an address that it does not tell" if opened.external is None else opened.external
    return f"the router forwards {many} of {where} to this machine"


def _withdraw(router: Router, ports: Sequence[int]) -> None:
    for port in ports:
        router.withdraw(port)
