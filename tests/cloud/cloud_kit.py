"""A hub and its HTTP API in a thread of their own, and a client that speaks plain HTTP to them."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from access_kit import DoorHub, door_hub
from hub_kit import WordNode, spec, until

from distensor.cloud.serving import http_beside
from distensor.cloud.settings import CloudSettings
from distensor.comm.address import HubAddress
from distensor.comm.keys import KeyKind
from distensor.comm.server import Principal
from distensor.comm.tokens import Role
from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.control import UnitKey
from distensor.core.ids import Epoch, Generation, JobId, Rank
from distensor.hub.accounts import WHO
from distensor.hub.app import Ready
from distensor.hub.authorization import Scope, Who, scopes_of
from distensor.hub.ledger.accounts import DAY, Ledger
from distensor.hub.machine import Patience
from distensor.hub.repository import Books
from distensor.hub.throttle import Limit

T = TypeVar("T")
LOOPBACK = CloudSettings(listen=HubAddress(host="127.0.0.1", port=0))
PATIENT = Patience(heartbeat=0.2, silent_heartbeats=100)
"""No test here is about silent nodes, and a busy machine makes some."""
MANY = Limit(failures=100_000)


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    """One caller. `address` is where the API listens."""

    address: HubAddress
    key: str = field(repr=False, default="")

    def ask(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
        connection = http.client.HTTPConnection(self.address.host, self.address.port, timeout=30)
        try:
            return exchange(connection, method, path, body, self._headers(body) | dict(headers or {}))
        finally:
            connection.close()

    def _headers(self, body: Any) -> dict[str, str]:
        shown = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return shown if body is None else {**shown, "Content-Type": "application/json"}

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})

    def post(self, path: str, body: Any = None, **headers: str) -> Reply:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.ask("POST", path, {} if body is None else body, named)


def exchange(
    connection: http.client.HTTPConnection, method: str, path: str, body: Any, headers: Mapping[str, str]
) -> Reply:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request(method, path, data, dict(headers))
    answer = connection.getresponse()
    return Reply(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())


class CloudHub:
    """The accounts `me` and `other`, a node of each, of which that of `me` is connected, and a job of each on it."""

    def __init__(self, path: Path, settings: CloudSettings = LOOPBACK, lines: Limit = MANY) -> None:
        self._path = path
        self._settings = settings
        self._lines = lines
        self._up = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="cloud")
        self.hub: DoorHub
        self.node: WordNode
        self.jobs: dict[str, JobId] = {}
        self.nodes: dict[str, str] = {}

    def __enter__(self) -> CloudHub:
        self._thread.start()
        self._up.wait(60)
        if self._failure is not None:
            raise self._failure
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # noqa: BLE001  # raised where the tests are
            self._failure = error
        finally:
            self._up.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with AsyncExitStack() as stack:
            self.hub = await stack.enter_async_context(door_hub(self._path, self._lines, PATIENT))
            self.inside = self.hub.inside
            ready = Ready(
                address=self.hub.address,
                node_tokens=(),
                trainer_token="",
                generation=Generation(1),
                fingerprint=self.hub.fingerprint,
                known_nodes=0,
                live_jobs=0,
            )
            heard: list[HubAddress] = []
            await stack.enter_async_context(http_beside(self._settings, heard.append)(self.inside, ready))
            self.address = replace(self._settings.listen, port=heard[0].port)
            linking = await self._people()
            self._up.set()
            await self._stop.wait()
            linking.cancel()
            await asyncio.gather(linking, return_exceptions=True)

    async def _people(self) -> asyncio.Task[None]:
        for name in ("me", "other"):
            await self.hub.account(name)
        self.node = await self._node("me", "atlas-1")
        linking = asyncio.create_task(self.node.link.run())
        await until(lambda: self.node.connected)
        for name in ("me", "other"):
            self.jobs[name] = await self.submit(name)
        stranger = await self._node("other", "bolt-1")
        visiting = asyncio.create_task(stranger.link.run())
        await until(lambda: stranger.connected)
        visiting.cancel()
        await asyncio.gather(visiting, return_exceptions=True)
        self.nodes = {"me": _id_of(self.node), "other": _id_of(stranger)}
        await self.hub.writer.submit(self._earn)
        return linking

    def _earn(self, books: Books) -> None:
        """A unit of each node, payable as if its window were over, of which a part is in a payout."""
        ledger, at = Ledger(books=books, policy=books.policy()), int(SYSTEM_CLOCK.now())
        for name, node in self.nodes.items():
            key = UnitKey(job_id=self.jobs[name], epoch=Epoch(1), step=0, rank=Rank(0))
            ledger.credit(key, name, node, 5000, at=at, device="cpu")
        ledger.mature(at=at + ledger.policy.challenge_seconds + DAY)
        for name, node in self.nodes.items():
            ledger.begin_payout(f"po-{name}", node, 2000, at=at)

    async def _node(self, account: str, name: str) -> WordNode:
        text, _ = await self.hub.key(account, KeyKind.PROVIDER)
        return WordNode(name, self.hub.token(Role.NODE, text), self._path / f"{name}.json", slots=8)

    async def submit(self, account: str, submission: str = "s1") -> JobId:
        """A job of an account, as its trainer submits it."""
        who = Principal(kind=Who.TRAINER, subject=account, account=account, scopes=scopes_of(Who.TRAINER))
        await until(lambda: self.inside.machine.mesh(SYSTEM_CLOCK.monotonic()).available_workers)
        job_id, _ = await self.inside.service.submit_job(who, spec(submission=submission))
        return job_id

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it in the hub's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def key(self, account: str, kind: KeyKind, *scopes: Scope) -> str:
        return self.do(self.hub.key(account, kind, *scopes))[0]

    def client(self, account: str = "me", kind: KeyKind = KeyKind.ADMIN, *scopes: Scope) -> Client:
        return Client(self.address, self.key(account, kind, *scopes))

    def stranger(self) -> Client:
        return Client(self.address)


def useful(kind: KeyKind) -> list[Scope]:
    return sorted(scopes_of(WHO[kind]))


def _id_of(node: WordNode) -> str:
    return str(node.link._identity.node_id)
