"""A hub in the loop of the test: real sockets, real TLS, short heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hub_kit import WordNode

from distensor.comm import HubClient
from distensor.comm.address import HubAddress
from distensor.core.clock import SYSTEM_CLOCK, Clock
from distensor.hub.app import HubConfig, Ready, run_hub
from distensor.hub.machine import Patience

QUICK = Patience(heartbeat=0.1)


@dataclass
class LocalHub:
    """A hub in this process that can be stopped and started on the same port."""

    state: Path
    ready: Ready | None = None
    clock: Clock = SYSTEM_CLOCK
    lines: list[str] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, tokens: int = 0, patience: Patience = QUICK) -> Ready:
        port = self.ready.address.port if self.ready else 0
        listen = HubAddress(host="127.0.0.1", port=port)
        config = HubConfig(state=self.state, listen=listen, node_tokens=tokens, patience=patience)
        ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        running = run_hub(config, clock=self.clock, on_ready=ready.set_result, log=self.lines.append, stop=self._stop)
        self._task = asyncio.create_task(running)
        await asyncio.wait([ready, self._task], return_when=asyncio.FIRST_COMPLETED)
        if not ready.done():
            self._task.result()
        self.ready = ready.result()
        return self.ready

    async def stop(self) -> None:
        self._stop.set()
        if self._task is not None:
            await self._task


@asynccontextmanager
async def hub_of(tmp_path: Path, tokens: int = 1, patience: Patience = QUICK) -> AsyncIterator[LocalHub]:
    hub = LocalHub(tmp_path / "hub")
    await hub.start(tokens, patience)
    try:
        yield hub
    finally:
        await hub.stop()


@asynccontextmanager
async def running(node: WordNode) -> AsyncIterator[WordNode]:
    task = asyncio.create_task(node.link.run())
    try:
        yield node
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            task.result()


def node_of(hub: LocalHub, tmp_path: Path, name: str = "atlas-1") -> WordNode:
    assert hub.ready is not None
    return WordNode(name, hub.ready.node_tokens[0], tmp_path / f"{name}.json")


@asynccontextmanager
async def client_of(hub: LocalHub) -> AsyncIterator[HubClient]:
    assert hub.ready is not None
    client = HubClient(hub.ready.trainer_token, timeout=5)
    try:
        yield client
    finally:
        await asyncio.to_thread(client.close)
