"""The HTTP server, in the event loop of the hub."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import uvicorn

from distensor.cloud.app import wrapped
from distensor.cloud.context import Context
from distensor.cloud.idempotency import Repeats
from distensor.cloud.metrics import Metrics
from distensor.cloud.settings import CloudSettings, TlsFiles
from distensor.comm.address import HubAddress
from distensor.core.errors import ConfigError, ControlError, StoreError
from distensor.hub.app import Beside, Inside, Ready, check_listen

STOP_SECONDS = 5
IDLE_SECONDS = 15
BACKLOG = 512


class _Server(uvicorn.Server):
    """Ended by the hub, which has the process's signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_beside(settings: CloudSettings, on_listening: Callable[[HubAddress], None]) -> Beside:
    """The HTTP API as work beside a hub; `on_listening` gets the address with the port that it has.

    Raises:
        ControlError: the address cannot be listened on.
        ConfigError: the files for TLS cannot be used.
    """
    check_listen(settings.listen)
    if settings.tls is not None:
        _check_tls(settings.tls)

    @asynccontextmanager
    async def serving(inside: Inside, ready: Ready) -> AsyncIterator[None]:
        context = make_context(settings, inside, ready)
        with listening(settings.listen) as sock:
            server = _Server(_config(context))
            async with asyncio.TaskGroup() as tasks:
                running = tasks.create_task(server.serve(sockets=[sock]))
                try:
                    await _until_started(server, running)
                    host, port = sock.getsockname()[:2]
                    on_listening(HubAddress(host=host, port=port))
                    yield
                finally:
                    context.closing.set()
                    inside.service.runs.wake_all()
                    server.should_exit = True

    return serving


def make_context(settings: CloudSettings, inside: Inside, ready: Ready) -> Context:
    return Context(
        inside=inside,
        ready=ready,
        settings=settings,
        metrics=Metrics(inside.machine, inside.clock, lambda: _writable(inside)),
        repeats=Repeats(),
        closing=asyncio.Event(),
    )


def _writable(inside: Inside) -> bool:
    try:
        inside.writer.require_writable()
    except StoreError:
        return False
    return True


def _config(context: Context) -> uvicorn.Config:
    settings = context.settings
    return uvicorn.Config(
        wrapped(context),
        http="h11",
        ws="none",
        lifespan="off",
        loop="none",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        date_header=True,
        proxy_headers=bool(settings.proxies),
        forwarded_allow_ips=list(settings.proxies),
        ssl_certfile=None if settings.tls is None else str(settings.tls.certificate),
        ssl_keyfile=None if settings.tls is None else str(settings.tls.key),
        timeout_graceful_shutdown=STOP_SECONDS,
        timeout_keep_alive=IDLE_SECONDS,
        h11_max_incomplete_event_size=32 * 1024,
    )


def _check_tls(files: TlsFiles) -> None:
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(files.certificate, files.key)
    except OSError as error:  # ssl.SSLError is one too
        raise ConfigError(f"--tls-certificate {files.certificate}, --tls-key {files.key}: {error}") from error


@contextlib.contextmanager
def listening(address: HubAddress) -> Iterator[socket.socket]:
    """A socket that listens.

    Raises:
        ControlError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # By its protocol's number asyncio knows that it may send small parts at once; without it an answer waits 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address.host, address.port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ControlError(f"cannot listen on {address}: {error.strerror}") from error
    with sock:
        yield sock


async def _until_started(server: uvicorn.Server, running: asyncio.Task[None]) -> None:
    while not server.started and not running.done():
        await asyncio.wait([running], timeout=0.01)
    if running.done():
        running.result()
