"""Who is trusted with what, and what may stand in the way of a hub."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from comm_kit import LocalHub, hub_of, node_of, running
from hub_kit import WordNode, until

from distensor.comm import HubClient, LinkState
from distensor.comm.address import HubAddress
from distensor.comm.bootstrap import fetch_authority
from distensor.comm.credential import load_credential
from distensor.comm.server import start_server
from distensor.comm.tokens import JoinToken, Role, decode_token
from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.errors import (
    AuthenticationError,
    HubProtocolError,
    HubUnreachableError,
)
from distensor.hub.pki import Authority

pytestmark = pytest.mark.asyncio


# Who is trusted


async def test_another_hub_at_the_address_is_refused_before_any_secret(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        assert hub.ready is not None
        true = decode_token(hub.ready.node_tokens[0])
        wrong = replace(true, fingerprint="0" * 64).encode()
        async with running(WordNode("atlas-1", wrong, tmp_path / "n.json")) as node:
            await until(lambda: node.link.status.state is LinkState.REJECTED)
            assert node.link.status.error is not None
            assert "No secret was sent" in node.link.status.error.message
        wrong = replace(decode_token(hub.ready.trainer_token), fingerprint="0" * 64).encode()
        with pytest.raises(AuthenticationError, match="No secret was sent"):
            await asyncio.to_thread(HubClient(wrong).query_mesh)


class Eavesdropper:
    """A hub of someone else, which shows the true authority's certificate without having its key."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    async def authenticate(self, bearer: object, peer: str) -> object:
        self.heard.append(bearer)
        raise AuthenticationError("heard you")

    def node_left(self, session: object) -> None:
        """Nothing to forget."""


async def test_a_copied_authority_certificate_gains_nothing(tmp_path: Path) -> None:
    for name in ("true", "false"):
        (tmp_path / name).mkdir()
    true = Authority.load_or_create(tmp_path / "true", SYSTEM_CLOCK)
    false = Authority.load_or_create(tmp_path / "false", SYSTEM_CLOCK).server_identity()
    copied = replace(false, chain_pem=false.chain_pem + true.authority_pem.encode())
    listener = Eavesdropper()
    server = await start_server(listener, copied, HubAddress(host="127.0.0.1", port=0))  # type: ignore[arg-type]
    try:
        token = JoinToken(address=server.address, fingerprint=true.fingerprint, role=Role.TRAINER, secret="s" * 40)
        fetched = await asyncio.to_thread(fetch_authority, token.address, token.fingerprint, 5)
        assert fetched.strip() == true.authority_pem.strip(), "the probe alone is fooled, and sends nothing"
        with pytest.raises(HubUnreachableError):
            await asyncio.to_thread(HubClient(token.encode(), timeout=1.5).query_mesh)
        node_token = replace(token, role=Role.NODE).encode()
        async with running(WordNode("n", node_token, tmp_path / "n.json")) as node:
            await until(lambda: node.link.status.state is LinkState.OFFLINE)
        assert listener.heard == []
    finally:
        await server.stop()


async def test_a_wrong_secret_is_told_as_such(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        assert hub.ready is not None
        for text, expected in ((hub.ready.trainer_token, "trainer"), (hub.ready.node_tokens[0], "node")):
            token = replace(decode_token(text), secret="x" * 43).encode()
            if expected == "trainer":
                with pytest.raises(AuthenticationError, match="does not know this join token"):
                    await asyncio.to_thread(HubClient(token).query_mesh)
            else:
                async with running(WordNode("n", token, tmp_path / "n.json")) as node:
                    await until(lambda: node.link.status.state is LinkState.REJECTED)
                    assert "does not know" in node.link.status.error.message  # type: ignore[union-attr]


async def test_tokens_are_not_exchangeable_between_roles(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        assert hub.ready is not None
        with pytest.raises(AuthenticationError, match="is for a node"):
            HubClient(hub.ready.node_tokens[0])
        relabelled = replace(decode_token(hub.ready.node_tokens[0]), role=Role.TRAINER).encode()
        with pytest.raises(AuthenticationError, match="for a node, not for a trainer"):
            await asyncio.to_thread(HubClient(relabelled).query_mesh)
        async with running(WordNode("n", hub.ready.trainer_token, tmp_path / "n.json")) as node:
            await until(lambda: node.link.status.state is LinkState.REJECTED)
            assert "is for a trainer" in node.link.status.error.message  # type: ignore[union-attr]


async def test_a_nodes_credential_is_no_trainers(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, running(node_of(hub, tmp_path)) as node:
        await until(lambda: node.connected)
        assert hub.ready is not None
        credential = load_credential(tmp_path / "atlas-1.json")
        assert credential is not None
        stolen = replace(decode_token(hub.ready.trainer_token), secret=credential.secret).encode()
        with pytest.raises(AuthenticationError):
            await asyncio.to_thread(HubClient(stolen).query_mesh)


async def test_a_damaged_token_or_no_token_is_told_without_a_connection(tmp_path: Path) -> None:
    for token, state, expected in (
        ("dtj_short", LinkState.REJECTED, "incomplete"),
        (None, LinkState.NO_KEY, "no join token was given"),
        ("hello", LinkState.REJECTED, "dtj_"),
    ):
        async with running(WordNode("n", token, tmp_path / "n.json")) as node:
            await until(lambda wanted=state: node.link.status.state is wanted)  # type: ignore[misc]
            assert expected in node.link.status.error.message  # type: ignore[union-attr]
            assert (node.link.status.next_retry_at is None) == (state is LinkState.NO_KEY)


async def test_a_hub_that_was_replaced_is_told_from_one_that_is_away(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub, running(node_of(hub, tmp_path)) as node:
        await until(lambda: node.connected)
        await hub.stop()
        other = LocalHub(tmp_path / "another", ready=hub.ready)
        await other.start()
        await until(lambda: node.link.status.state is LinkState.REJECTED)
        assert node.link.status.error is not None
        assert "its state was replaced" in node.link.status.error.message
        await other.stop()


# What stands in the way


@contextmanager
def silent_port() -> Iterator[int]:
    """A port that accepts and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextmanager
def rude_port(answer: bytes) -> Iterator[int]:
    """A port that answers everyone with the same bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def trainer_at(port: int) -> HubClient:
    address = HubAddress(host="127.0.0.1", port=port)
    token = JoinToken(address=address, fingerprint="0" * 64, role=Role.TRAINER, secret="s" * 40)
    return HubClient(token.encode(), timeout=0.5)


async def test_nobody_there_names_the_address_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(HubUnreachableError, match=f"no hub at 127.0.0.1:{port}: Connection refused"):
        await asyncio.to_thread(trainer_at(port).query_mesh)


async def test_a_silent_port_is_given_up_in_time() -> None:
    with silent_port() as port, pytest.raises(HubUnreachableError, match=r"within 0\.5 s"):
        await asyncio.to_thread(trainer_at(port).query_mesh)


async def test_something_that_is_no_hub_is_told_as_such() -> None:
    with rude_port(b"HTTP/1.0 400 Bad Request\r\n\r\n") as port, pytest.raises(HubProtocolError, match="not as a hub"):
        await asyncio.to_thread(trainer_at(port).query_mesh)


@contextmanager
def counting_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """What comes to the proxy that every variable of the environment names."""
    came: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def count() -> None:
            with suppress(OSError):  # the test is over
                while True:
                    connection, where = server.accept()
                    came.append(where)
                    connection.close()

        thread = threading.Thread(target=count)
        thread.start()
        for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.getsockname()[1]}")
        for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield came
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "LOCALHOST"])
async def test_proxies_in_the_environment_get_no_connection(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LOCALHOST is a name that does not look like this machine: for it, too, the hub is reached directly."""
    with counting_proxy(monkeypatch) as came:
        async with hub_of(tmp_path) as hub:
            assert hub.ready is not None
            node_token, trainer_token = (
                replace(token, address=replace(token.address, host=host)).encode()
                for token in map(decode_token, (hub.ready.node_tokens[0], hub.ready.trainer_token))
            )
            client = HubClient(trainer_token, timeout=5)
            async with running(WordNode("atlas-1", node_token, tmp_path / "n.json")) as node:
                await until(lambda: node.connected)
                assert (await asyncio.to_thread(client.query_mesh)).available_workers == 2
            await asyncio.to_thread(client.close)
    assert came == []


async def test_an_old_protocol_of_tls_is_not_spoken(tmp_path: Path) -> None:
    async with hub_of(tmp_path) as hub:
        assert hub.ready is not None
        address = hub.ready.address

        def offer_old() -> None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.maximum_version = ssl.TLSVersion.TLSv1_2
            context.set_ciphers("AES128-SHA")
            with socket.create_connection((address.host, address.port), 5) as raw:
                context.wrap_socket(raw)

        with pytest.raises(ssl.SSLError):
            await asyncio.to_thread(offer_old)
