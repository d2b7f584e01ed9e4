"""The open stream of a node: typed messages in and out, one writer, our errors."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from distensor.comm.address import HubAddress
from distensor.comm.channels import EOF, open_aio_channel
from distensor.comm.failures import error_of_status
from distensor.comm.messages import HubToNode, NodeToHub
from distensor.comm.stream_codec import read_hub_message, write_node_message
from distensor.core.errors import HubUnreachableError
from distensor.proto.control_pb2_grpc import ControlStub

CONNECT_SECONDS = 10.0


class LinkStream:
    """One stream on one channel of its own, so that no attempt inherits another's backoff."""

    def __init__(self, address: HubAddress, channel: grpc.aio.Channel, call: Any) -> None:
        self._address = address
        self._channel = channel
        self._call = call
        self._queue: asyncio.Queue[NodeToHub] = asyncio.Queue()

    @classmethod
    async def open(
        cls,
        address: HubAddress,
        authority_pem: str,
        metadata: tuple[tuple[str, str], ...],
        seconds: float | None = None,
    ) -> LinkStream:
        """Raises: HubUnreachableError: no verified connection within `seconds` (10)."""
        seconds = CONNECT_SECONDS if seconds is None else seconds
        channel = open_aio_channel(address, authority_pem)
        call = ControlStub(channel).Node(metadata=metadata)  # type: ignore[no-untyped-call]  # generated
        stream = cls(address, channel, call)
        try:
            async with asyncio.timeout(seconds):
                await call.wait_for_connection()
        except TimeoutError as error:
            await stream.close()
            raise HubUnreachableError(f"no hub answers at {address} within {seconds:g} s") from error
        except grpc.aio.AioRpcError as error:
            await stream.close()
            raise error_of_status(error.code(), error.details() or "", address) from error
        except asyncio.CancelledError:
            await stream.close()
            raise
        return stream

    def send(self, message: NodeToHub) -> None:
        """Queue a message for `drain`."""
        self._queue.put_nowait(message)

    async def drain(self) -> None:
        """Write what is queued until cancelled or the stream breaks."""
        while True:
            await self.write(await self._queue.get())

    async def write(self, message: NodeToHub) -> None:
        try:
            await self._call.write(write_node_message(message))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._broken() from error

    async def read(self, *, within: float) -> HubToNode | None:
        """The next message, or None at the stream's orderly end.

        Raises:
            HubUnreachableError: the connection broke, or nothing came within `within` seconds.
        """
        try:
            async with asyncio.timeout(within):
                message = await self._call.read()
        except TimeoutError as error:
            text = f"the hub at {self._address} has not answered for {within:g} s"
            raise HubUnreachableError(text) from error
        except grpc.aio.AioRpcError as error:
            raise error_of_status(error.code(), error.details() or "", self._address) from error
        if message is EOF:
            return None
        return read_hub_message(message)

    async def ask(self, method: str, request: Any, metadata: tuple[tuple[str, str], ...]) -> Any:
        """One call beside the stream, on the same connection.

        Raises:
            ControlError: what the hub refused, or that it does not answer within 10 seconds.
        """
        try:
            call = getattr(ControlStub(self._channel), method)  # type: ignore[no-untyped-call]  # generated
            return await call(request, metadata=metadata, timeout=CONNECT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise error_of_status(error.code(), error.details() or "", self._address) from error

    async def end_without_register(self, *, within: float) -> None:
        """End the stream before a Register. A hub that recognises the caller complains about just that.

        Raises:
            AuthenticationError: the hub does not recognise the caller.
            HubUnreachableError: the connection broke, or nothing came within `within` seconds.
        """
        await self._call.done_writing()
        try:
            async with asyncio.timeout(within):
                code = await self._call.code()
        except TimeoutError as error:
            text = f"the hub at {self._address} has not answered for {within:g} s"
            raise HubUnreachableError(text) from error
        if code is not grpc.StatusCode.INVALID_ARGUMENT:
            raise error_of_status(code, await self._call.details() or "", self._address)

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close(None)

    async def _broken(self) -> Exception:
        return error_of_status(await self._call.code(), await self._call.details() or "", self._address)
