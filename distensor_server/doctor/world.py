"""The real world for `distensor doctor`."""

from __future__ import annotations

import asyncio
import functools
import os
import resource
import shutil
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

from distensor import __version__
from distensor.comm.address import HubAddress, parse_address
from distensor.comm.bootstrap import fetch_authority
from distensor.comm.credential import load_credential
from distensor.comm.tokens import JoinToken
from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.errors import AuthenticationError, ServiceError, StoreError
from distensor.core.reading import Reading, Unavailable
from distensor_server.config import DEFAULT_CPU_WORKERS
from distensor_server.devices.detect import Detector
from distensor_server.devices.host import Host, HostMemory, cpu_device, cpu_name
from distensor_server.devices.model import Device
from distensor_server.doctor.model import World, run_child
from distensor_server.keys.chain import KeyStore, config_dir, take_given
from distensor_server.keys.login import check_with_hub, read_key
from distensor_server.keys.model import FoundKey
from distensor_server.keys.ring import KeyRing
from distensor_server.localclient import NoAnswerError, Snapshot, look
from distensor_server.ownaddress import OwnAddress
from distensor_server.service.cli import chosen_layout, chosen_manager
from distensor_server.service.manager import ServiceStatus
from distensor_server.service.runner import run_command
from distensor_server.statedir import CREDENTIAL_FILE

T = TypeVar("T")

CONNECT_SECONDS = 5.0
WHEELS = ("distensor", "distensor-server", "distensor-tui")


def this_machine(environment: Mapping[str, str], *, state: Path, socket_path: Path, host: str) -> World:
    """The world as it is. Reads the key's sources, changes nothing."""
    identity = _Identity.read(environment, state, KeyStore(config_dir(environment, sys.platform), KeyRing(environment)))
    return World(
        environment=environment,
        platform=sys.platform,
        version=__version__,
        uid=os.geteuid(),
        state=state,
        socket=socket_path,
        host=OwnAddress(host, lambda: str(identity.hub or "")).look(),
        root=Path("/"),
        hub=identity.hub,
        fingerprint=identity.fingerprint,
        registered=identity.registered,
        key=identity.key,
        key_problem=identity.problem,
        store=identity.store,
        look=_once(lambda: _look(socket_path)),
        wheels={name: _version(name) for name in WHEELS},
        python=sys.version_info[:3],
        bits=struct.calcsize("P") * 8,
        run=run_child,
        devices=_devices,
        memory=_memory,
        disk_free=lambda path: shutil.disk_usage(path).free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        resolve=_resolve,
        connect=_connect,
        authority=lambda address, fingerprint: fetch_authority(address, fingerprint, CONNECT_SECONDS),
        try_key=_try_key,
        bind=_bind,
        service=_once(lambda: _service(environment)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Identity:
    """Who this machine is to which hub, as far as its files say."""

    hub: HubAddress | None
    fingerprint: str | None
    registered: bool
    key: FoundKey | None
    problem: str | None
    store: KeyStore

    @classmethod
    def read(cls, environment: Mapping[str, str], state: Path, store: KeyStore) -> _Identity:
        hub, fingerprint, key, problem, registered = None, None, None, None, False
        try:
            credential = load_credential(state / CREDENTIAL_FILE)
            if credential is not None:
                registered = True
                hub, fingerprint = parse_address(credential.address), credential.fingerprint
        except StoreError:
            pass  # the check `identity` says so
        try:
            key = take_given(None, dict(environment)) or store.find(registered=registered)
            token = None if key is None else read_key(key.key)
            if token is not None:
                hub, fingerprint = token.address, token.fingerprint
        except AuthenticationError as error:
            problem = str(error)
        return cls(hub=hub, fingerprint=fingerprint, registered=registered, key=key, problem=problem, store=store)


def _once(read: Callable[[], T]) -> Callable[[], T]:
    """Several checks ask; the world is asked once."""
    return functools.lru_cache(maxsize=1)(read)


def _look(path: Path) -> Reading[Snapshot]:
    try:
        return look(path)
    except NoAnswerError as nobody:
        return Unavailable(reason=f"{nobody.code}: {nobody}")


def _version(wheel: str) -> str | None:
    try:
        return version(wheel)
    except PackageNotFoundError:
        return None


def _devices() -> Sequence[Device]:
    sample = Host().sample()
    found = asyncio.run(Detector().accelerators(sample.memory))
    return (*found, cpu_device(sample, slots=DEFAULT_CPU_WORKERS, name=cpu_name()))


def _memory() -> HostMemory:
    return Host().sample().memory


def _resolve(host: str) -> Sequence[str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return sorted({str(entry[4][0]) for entry in found})


def _connect(address: HubAddress) -> float:
    started = SYSTEM_CLOCK.monotonic()
    with socket.create_connection((address.host, address.port), CONNECT_SECONDS):
        return SYSTEM_CLOCK.monotonic() - started


def _try_key(key: str) -> JoinToken:
    return asyncio.run(_tried(key))


async def _tried(key: str) -> JoinToken:
    return await check_with_hub(key)


def _bind(host: str) -> None:
    family, kind, protocol, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.bind(where)


def _service(environment: Mapping[str, str]) -> Reading[ServiceStatus]:
    try:
        manager = chosen_manager(
            chosen_layout(environment, sys.platform, run_command, system=False), sys.platform, run_command
        )
        problem = manager.available()
        return manager.status() if problem is None else Unavailable(reason=problem.splitlines()[0])
    except (ServiceError, ValueError) as error:
        return Unavailable(reason=str(error).splitlines()[0])
