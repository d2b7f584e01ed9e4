"""Many nodes at once, and pings that the hub must bear."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from hub_kit import HubProcess, WordNode, until

from distensor.comm import HubClient
from distensor.comm.channels import SERVER_OPTIONS

HERD = 200


@pytest.mark.asyncio
async def test_a_herd_comes_back_to_a_hub_that_was_killed(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path / "state", tokens=HERD)
    nodes = [WordNode(f"n{i}", token, tmp_path / f"n{i}.json") for i, token in enumerate(hub.ready["node_tokens"])]
    tasks = [asyncio.create_task(node.link.run()) for node in nodes]
    try:
        await until(lambda: all(node.connected for node in nodes), seconds=90, what="all nodes joined")
        hub.kill()
        await until(lambda: not any(node.connected for node in nodes), what="all nodes noticed")
        hub = await asyncio.to_thread(hub.restart)
        started = time.monotonic()
        await until(lambda: all(node.connected for node in nodes), seconds=60, what="all nodes back")
        print(f"{HERD} nodes back {time.monotonic() - started:.2f} s after the hub was ready")
        with HubClient(hub.ready["trainer_token"]) as client:
            mesh = await asyncio.to_thread(client.query_mesh)
        assert mesh.available_workers == 2 * HERD
        assert len({node.info.node_id for node in mesh.nodes}) == HERD
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert hub.stop() == 0
    assert "Traceback" not in hub.log()


class Idle(grpc.GenericRpcHandler):
    """A service whose one stream says nothing."""

    def service(self, handler_call_details: Any) -> Any:
        async def stay(_: Any, context: Any) -> None:
            await context.write(b"hello")
            await asyncio.sleep(60)

        return grpc.stream_stream_rpc_method_handler(stay)


EAGER: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", 100),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_time_between_pings_ms", 100),
]


async def end_of_pings(server_options: list[Any], seconds: float) -> str | None:
    """Why an idle stream of an eager client ended; None when it is still open after some seconds."""
    server = grpc.aio.server(options=server_options)
    server.add_generic_rpc_handlers((Idle(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{port}", options=[*EAGER, ("grpc.enable_http_proxy", 0)]
    ) as channel:
        call = channel.stream_stream("/x/y")()
        assert await call.read() == b"hello"
        try:
            await asyncio.wait_for(call.read(), seconds)
        except TimeoutError:
            return None
        except grpc.aio.AioRpcError as error:
            return str(error.details())
        finally:
            call.cancel()
            await server.stop(None)
    raise AssertionError("the server ended the stream in order")


@pytest.mark.asyncio
async def test_eager_pings_are_not_punished() -> None:
    assert await end_of_pings(SERVER_OPTIONS, 2.0) is None


@pytest.mark.asyncio
async def test_the_defaults_would_punish_them() -> None:
    """So that the test above can fail."""
    defaults = [("grpc.http2.max_ping_strikes", 2)]
    assert await end_of_pings(defaults, 10.0) == "Too many pings"
