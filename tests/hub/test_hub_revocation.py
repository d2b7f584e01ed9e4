"""Keys at work: machines that join by one, and what happens to open streams when it is rotated, revoked or barred."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from access_kit import DoorHub, clerk, door_hub
from hub_kit import WordNode, info, spec, until

from distensor.comm import HubClient, LinkState
from distensor.comm.channels import bearer, open_aio_channel
from distensor.comm.credential import load_credential
from distensor.comm.key_check import check_node_token
from distensor.comm.keys import KeyKind
from distensor.comm.messages import Register
from distensor.comm.stream_codec import read_hub_message, write_node_message
from distensor.comm.tokens import Role
from distensor.core.control import JobState
from distensor.core.errors import AuthenticationError, NotAllowedError, StoreError
from distensor.core.ids import NodeId
from distensor.hub.administration import create_key, revoke_key, rotate_key, set_disabled
from distensor.hub.authorization import Scope
from distensor.proto.control_pb2_grpc import ControlStub

pytestmark = pytest.mark.asyncio


@contextlib.asynccontextmanager
async def linked(*nodes: WordNode) -> AsyncIterator[None]:
    linking = [asyncio.create_task(node.link.run()) for node in nodes]
    try:
        yield
    finally:
        for task in linking:
            task.cancel()
        await asyncio.gather(*linking, return_exceptions=True)


async def provider(hub: DoorHub, account: str = "me") -> tuple[str, str]:
    """A node's token that wraps a new provider key, and the key's id."""
    await hub.account(account)
    text, key = await hub.key(account, KeyKind.PROVIDER)
    return hub.token(Role.NODE, text), key


def node_id(node: WordNode) -> NodeId:
    found = node.link._identity.node_id
    assert found is not None
    return found


def says(node: WordNode) -> str:
    error = node.link.status.error
    return "" if error is None else f"{error.code}: {error.message} {error.fix}"


# Machines that join by a key


async def test_one_key_joins_many_machines_and_each_keeps_a_credential_of_its_own(tmp_path: Path) -> None:
    async with door_hub(tmp_path) as hub:
        token, key = await provider(hub)
        nodes = [WordNode(name, token, tmp_path / f"{name}.json") for name in ("atlas", "bolt")]
        assert (await check_node_token(token)).role is Role.NODE
        async with linked(*nodes):
            await until(lambda: all(node.connected for node in nodes))
            records = hub.store.tables.nodes
            assert {records[node_id(node)].info.name for node in nodes} == {"atlas", "bolt"}
            assert {(record.account, record.joined_by) for record in records.values()} == {("me", key)}
        again = WordNode("atlas", None, tmp_path / "atlas.json")
        async with linked(again):
            await until(lambda: again.connected)
            assert node_id(again) == node_id(nodes[0])
        assert len(hub.store.tables.nodes) == 2
        used = await hub.do(lambda books: books.list_keys())
        assert [one.last_used_at is not None for one in used] == [True]
        assert [line.action for line in await hub.audit() if line.action == "join"] == ["join", "join"]


async def test_a_machine_that_crashes_before_it_keeps_its_credential_leaves_no_ghost(tmp_path: Path) -> None:
    async with door_hub(tmp_path) as hub, open_aio_channel(hub.address, hub.authority_pem) as channel:
        await hub.account("me")
        text, _ = await hub.key("me", KeyKind.PROVIDER)
        welcomed = []
        for _ in range(3):
            stream = ControlStub(channel).Node(metadata=bearer("join", text))
            await stream.write(write_node_message(Register(info=info("atlas"))))
            welcomed.append(read_hub_message(await stream.read()))
            stream.cancel()
        assert len({welcome.node_id for welcome in welcomed}) == 1  # type: ignore[union-attr]
        assert len({welcome.credential for welcome in welcomed}) == 3  # type: ignore[union-attr]
        node = WordNode("atlas", hub.token(Role.NODE, text), tmp_path / "n.json")
        async with linked(node):
            await until(lambda: node.connected)
        other = WordNode("atlas", hub.token(Role.NODE, text), tmp_path / "other.json")
        async with linked(other):
            await until(lambda: other.connected)
        assert len(hub.store.tables.nodes) == 2, "a second machine of the same name is a node of its own"


async def test_a_key_without_the_scope_joins_nothing_and_is_not_asked_again_soon(tmp_path: Path) -> None:
    async with door_hub(tmp_path) as hub:
        await hub.account("me")
        text, _ = await hub.key("me", KeyKind.TRAINER)
        node = WordNode("atlas", hub.token(Role.NODE, text), tmp_path / "n.json")
        async with linked(node):
            await until(lambda: node.link.status.state is LinkState.REJECTED)
            assert "a trainer key is no key for a node" in says(node)


# Revocation


async def test_a_revoked_key_ends_the_streams_of_its_nodes_and_a_new_one_brings_the_same_node_back(
    tmp_path: Path,
) -> None:
    async with door_hub(tmp_path) as hub:
        token, key = await provider(hub)
        node = WordNode("atlas", token, tmp_path / "n.json")
        async with linked(node):
            await until(lambda: node.connected)
            before = node_id(node)
            await hub.do(lambda books: revoke_key(books, clerk(), key))
            await until(lambda: node.link.status.state is LinkState.REJECTED)
            assert "was revoked" in says(node)
            assert "distensor auth login" in says(node)
            text, _ = await hub.key("me", KeyKind.PROVIDER)
            node.link.use_token(hub.token(Role.NODE, text))
            await until(lambda: node.connected)
            assert node_id(node) == before
        kept = load_credential(tmp_path / "n.json")
        assert kept is not None
        assert kept.node_id == before
        assert len(hub.store.tables.nodes) == 1


async def test_the_key_of_another_account_does_not_take_a_node_over(tmp_path: Path) -> None:
    async with door_hub(tmp_path) as hub:
        token, key = await provider(hub)
        node = WordNode("atlas", token, tmp_path / "n.json")
        async with linked(node):
            await until(lambda: node.connected)
            before = node_id(node)
            await hub.do(lambda books: revoke_key(books, clerk(), key))
            await until(lambda: node.link.status.state is LinkState.REJECTED)
            theirs, _ = await provider(hub, "them")
            node.link.use_token(theirs)
            await until(lambda: node.connected)
            assert node_id(node) != before
        assert [record.account for record in hub.store.tables.nodes.values()] == ["me", "them"]


async def test_a_rotated_key_keeps_its_nodes_until_the_new_one_is_revoked(tmp_path: Path) -> None:
    async with door_hub(tmp_path) as hub:
        token, key = await provider(hub)
        node = WordNode("atlas", token, tmp_path / "n.json")
        async with linked(node):
            await until(lambda: node.connected)
            fresh = await hub.do(lambda books: rotate_key(books, clerk(), key, 0))
            await hub.do(lambda books: revoke_key(books, clerk(), key))
            second = WordNode("bolt", hub.token(Role.NODE, fresh.text), tmp_path / "b.json")
            late = WordNode("late", token, tmp_path / "l.json")
            async with linked(second, late):
                await until(lambda: second.connected)
                await until(lambda: late.link.status.state is LinkState.REJECTED)
                assert node.connected
                statuses = len(node.statuses)
                await hub.do(lambda books: revoke_key(books, clerk(), fresh.record.key_id))
                await until(lambda: not node.connected and not second.connected)
                assert len(node.statuses) > statuses


async def test_a_disabled_account_is_out_with_its_nodes_and_back_when_it_is_enabled(tmp_path: Path) -> None:
    async with door_hub(tmp_path) as hub:
        token, _ = await provider(hub)
        node = WordNode("atlas", token, tmp_path / "n.json")
        async with linked(node):
            await until(lambda: node.connected)
            await hub.do(lambda books: set_disabled(books, clerk(), "me", disabled=True))
            await until(lambda: node.link.status.state is LinkState.REJECTED)
            assert "me" in says(node)
            assert "disabled" in says(node)
            await hub.do(lambda books: set_disabled(books, clerk(), "me", disabled=False))

            async with asyncio.timeout(15):
                while not node.connected:  # each try may come before the hub has looked, which it does twice a second
                    node.link.wake()
                    await asyncio.sleep(0.3)  # a host that is refused twenty times would have to wait


async def test_who_watches_a_job_is_shown_out_when_the_key_is_revoked(tmp_path: Path) -> None:
    async with door_hub(tmp_path) as hub:
        token, _ = await provider(hub)
        text, key = await hub.key("me", KeyKind.TRAINER)
        node = WordNode("atlas", token, tmp_path / "n.json")
        async with linked(node):
            await until(lambda: node.connected)
            with HubClient(hub.token(Role.TRAINER, text)) as client:
                job_id, _ = await asyncio.to_thread(client.submit_job, spec())
                watching = client.watch_job(job_id)
                while (await asyncio.to_thread(next, watching)).state is not JobState.RUNNING:
                    pass
                await hub.do(lambda books: revoke_key(books, clerk(), key))
                with pytest.raises(AuthenticationError, match="trainer key was revoked"):
                    await asyncio.to_thread(next, watching)
                with pytest.raises(AuthenticationError, match="was revoked"):
                    await asyncio.to_thread(client.query_mesh)
            assert hub.store.tables.jobs[job_id].state is JobState.RUNNING, "the job itself goes on until it is missed"


async def test_while_the_books_do_not_answer_the_hub_goes_on_and_a_revocation_is_heard_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def away() -> None:
        asked.append("reading")
        raise StoreError("the database is away")

    async with door_hub(tmp_path) as hub:
        token, key = await provider(hub)
        node = WordNode("atlas", token, tmp_path / "n.json")
        async with linked(node):
            await until(lambda: node.connected)
            with monkeypatch.context() as patch:
                patch.setattr(hub.store, "reading", away)
                await hub.do(lambda books: revoke_key(books, clerk(), key))
                await until(lambda: len(asked) > 1)
                assert node.connected
            await until(lambda: node.link.status.state is LinkState.REJECTED)
            assert "was revoked" in says(node)


async def test_an_open_stream_ends_when_its_key_expires(tmp_path: Path) -> None:
    async with door_hub(tmp_path) as hub:
        token, _ = await provider(hub)
        node = WordNode("atlas", token, tmp_path / "n.json")
        async with linked(node):
            await until(lambda: node.connected)
            key = await hub.do(lambda books: create_key(books, clerk(), "me", KeyKind.TRAINER, seconds=3))
            with HubClient(hub.token(Role.TRAINER, key.text)) as client:
                job_id, _ = await asyncio.to_thread(client.submit_job, spec())
                with pytest.raises(AuthenticationError, match="has expired"):
                    await asyncio.to_thread(list, client.watch_job(job_id))


async def test_the_standalone_trainer_is_out_too_when_its_account_is_disabled(tmp_path: Path) -> None:
    async with door_hub(tmp_path) as hub:
        text, _ = await hub.key("main", KeyKind.TRAINER, Scope.MESH_READ)
        with HubClient(hub.token(Role.TRAINER, text)) as client:
            await asyncio.to_thread(client.query_mesh)
            with pytest.raises(NotAllowedError, match="SubmitJob is not among the scopes of this key"):
                await asyncio.to_thread(client.submit_job, spec())
            await hub.do(lambda books: set_disabled(books, clerk(), "main", disabled=True))

            async def refused() -> str:
                try:
                    await asyncio.to_thread(client.query_mesh)
                except AuthenticationError as error:
                    return str(error)
                return ""

            words = ""
            async with asyncio.timeout(10):
                while not words:
                    words = await refused()
            assert "disabled" in words
