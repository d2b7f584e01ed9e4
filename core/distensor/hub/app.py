"""One hub from start to end: state directory, authority, books, server."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from distensor.comm.address import HubAddress
from distensor.comm.server import start_server
from distensor.comm.tokens import Role
from distensor.core.clock import Clock
from distensor.core.errors import ControlError
from distensor.core.ids import Generation, new_job_id, new_node_id
from distensor.hub import access, money
from distensor.hub.accounts import MAIN, Barred, Quota, main_account, quotas_of
from distensor.hub.descriptors import room_for_streams, too_few
from distensor.hub.door import Door
from distensor.hub.hashing import new_secret
from distensor.hub.machine import DEFAULT_PATIENCE, HubMachine, Patience
from distensor.hub.pki import Authority
from distensor.hub.place import Place
from distensor.hub.repository import Snapshot, Store
from distensor.hub.service import HubService, Mint
from distensor.hub.standby import check_authority, keep_lease, store_in_turn
from distensor.hub.state_directory import StateDirectory
from distensor.hub.stores.address import DatabaseAddress
from distensor.hub.stores.opening import open_store
from distensor.hub.writer import Writer


@dataclass(frozen=True, kw_only=True, slots=True)
class HubConfig:
    """What the operator chose."""

    state: Path
    listen: HubAddress
    database: DatabaseAddress | None = None
    """None is a file of the state directory."""
    advertise: str | None = None
    """The host that tokens name, when it is not the one that the hub listens on."""
    node_tokens: int | None = None
    """How many node tokens to make; None makes one for a hub that has no node yet."""
    patience: Patience = DEFAULT_PATIENCE
    relay: str = ""
    """host:port of a relay; told to the members of every job."""
    other_hubs: tuple[HubAddress, ...] = ()
    """Where hubs are that may take this one's place, on the same database."""
    standby: bool = False
    """Wait while another hub serves on the database, and take its place when it is gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A hub that accepts connections."""

    address: HubAddress
    node_tokens: tuple[str, ...] = field(repr=False)
    trainer_token: str = field(repr=False)
    generation: Generation
    fingerprint: str
    known_nodes: int
    live_jobs: int
    relay: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inside:
    """The parts of a hub at work, for whatever serves it in another way from the same process."""

    machine: HubMachine
    writer: Writer
    door: Door
    service: HubService
    clock: Clock
    log: Callable[[str], None]


Beside: TypeAlias = Callable[[Inside, Ready], AbstractAsyncContextManager[None]]
"""Work that begins once the hub accepts connections and ends before the hub does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Opened:
    """What a start finds and makes in the books, before anyone can connect."""

    generation: Generation
    snapshot: Snapshot
    barred: Barred
    quotas: Mapping[str, Quota]
    access_version: int
    node_secrets: tuple[str, ...] = field(repr=False)
    trainer_secret: str = field(repr=False)


async def run_hub(
    config: HubConfig,
    *,
    clock: Clock,
    on_ready: Callable[[Ready], None],
    log: Callable[[str], None],
    stop: asyncio.Event,
    beside: Beside | None = None,
) -> None:
    """Run until `stop` is set. Errors of `beside` end the hub and are raised.

    Raises:
        StoreError: the state directory, the database or the authority cannot be used. In a group, SupersededError:
            another hub has taken this one's place.
        ControlError: the address cannot be listened on.
    """
    check_listen(config.listen)
    with StateDirectory(config.state) as directory:
        authority = Authority.load_or_create(config.state, clock)
        if config.database is not None and config.standby:
            store = await store_in_turn(config.database, authority, log, stop)
        else:
            store = open_store(config.database or directory.database, exclusive=True)
        if store is None:
            return
        with closing(store):
            opened = _open_books(config, directory, store, int(clock.now()), authority)
            if few := too_few(room_for_streams(), len(opened.snapshot.nodes)):
                log(few)
            async with _working(config, opened, store, authority, clock, log) as inside:
                server = await start_server(inside.service, authority.server_identity(), config.listen)
                try:
                    ready = _ready(config, opened, server.address, authority.fingerprint)
                    directory.write_addresses((ready.address, *config.other_hubs))
                    async with nullcontext() if beside is None else beside(inside, ready):
                        on_ready(ready)
                        await stop.wait()
                finally:
                    inside.service.stop()
                    await server.stop()


def _open_books(config: HubConfig, directory: StateDirectory, store: Store, now: int, authority: Authority) -> _Opened:
    trainer_secret = directory.trainer_secret()
    with store.transaction() as books:
        if config.database is not None:
            books.save_authority_mark(check_authority(books, authority, config.database))
        generation, snapshot = books.begin_generation(), books.snapshot()
        money.give_back_orphans(books, now)
        wanted = config.node_tokens if config.node_tokens is not None else int(not snapshot.nodes)
        node_secrets = tuple(new_secret() for _ in range(wanted))
        for secret in node_secrets:
            books.save_token(access.token_for(secret, Role.NODE, "node"))
        books.save_token(access.token_for(trainer_secret, Role.TRAINER, MAIN))
        if books.find_account(MAIN) is None:
            books.save_account(main_account(now))
        barred, quotas, version = books.barred(), quotas_of(books.accounts()), books.access_version()
    return _Opened(
        generation=generation,
        snapshot=snapshot,
        barred=barred,
        quotas=quotas,
        access_version=version,
        node_secrets=node_secrets,
        trainer_secret=trainer_secret,
    )


@asynccontextmanager
async def _working(
    config: HubConfig,
    opened: _Opened,
    store: Store,
    authority: Authority,
    clock: Clock,
    log: Callable[[str], None],
) -> AsyncIterator[Inside]:
    """The machine, the writer and the service, at work; all ended at the end of the block."""
    machine = HubMachine(
        generation=opened.generation,
        nodes=opened.snapshot.nodes,
        jobs=opened.snapshot.jobs,
        submissions=opened.snapshot.submissions,
        earnings=opened.snapshot.earnings,
        signer=authority,
        new_job_id=new_job_id,
        patience=config.patience,
        relay=config.relay,
        now=clock.monotonic(),
        quotas=opened.quotas,
    )
    writer = Writer(store, clock, lambda error: log(f"cannot write, trying again: {error}"))
    door = Door(machine.node, writer, clock, barred=opened.barred, version=opened.access_version)
    mint = Mint(node_id=new_node_id, secret=new_secret)
    hubs = (str(_advertised(config, config.listen)), *map(str, config.other_hubs)) if config.other_hubs else ()
    service = HubService(machine, writer, clock, mint, log, door, hubs=hubs)
    inside = Inside(machine=machine, writer=writer, door=door, service=service, clock=clock, log=log)
    try:
        async with asyncio.TaskGroup() as tasks:
            working = [tasks.create_task(service.run())]
            if config.database is not None:
                working.append(tasks.create_task(keep_lease(writer, clock)))
            try:
                yield inside
            finally:
                for task in working:
                    task.cancel()
    finally:
        await writer.close()


def _advertised(config: HubConfig, bound: HubAddress) -> HubAddress:
    return HubAddress(host=config.advertise or reachable_host(bound.host), port=bound.port)


def _ready(config: HubConfig, opened: _Opened, bound: HubAddress, fingerprint: str) -> Ready:
    place = Place(address=_advertised(config, bound), fingerprint=fingerprint, others=config.other_hubs)
    return Ready(
        address=place.address,
        node_tokens=tuple(place.token(Role.NODE, secret) for secret in opened.node_secrets),
        trainer_token=place.token(Role.TRAINER, opened.trainer_secret),
        generation=opened.generation,
        fingerprint=fingerprint,
        known_nodes=len(opened.snapshot.nodes),
        relay=config.relay,
        live_jobs=sum(not job.state.ended for job in opened.snapshot.jobs),
    )


def check_listen(address: HubAddress) -> None:
    """Find out in clear words whether the address can be listened on; gRPC's own answer has no reason in it.

    Raises:
        ControlError: the port is taken or not permitted, or the host is not of this machine.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen(1)
    except OSError as error:
        raise ControlError(f"cannot listen on {address}: {_why(error, address)}") from error


def _why(error: OSError, address: HubAddress) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {address.port} is taken by another program; choose another with --listen HOST:PORT"
    if error.errno == errno.EACCES:
        return f"this user may not use port {address.port}; choose one above 1023"
    return f"{error.strerror}; {address.host!r} should be an address of this machine"


def reachable_host(host: str) -> str:
    """The host that others use for a hub that listens on every interface: the one of the default route."""
    if host not in ("0.0.0.0", "::"):  # noqa: S104  # compared, not bound
        return host
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
