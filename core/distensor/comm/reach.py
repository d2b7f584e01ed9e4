"""How a node reaches its hub: the network as an argument, so that a simulation can put its own in the place of gRPC."""

from __future__ import annotations

from typing import Any, Protocol

from distensor.comm.address import HubAddress
from distensor.comm.bootstrap import fetch_authority
from distensor.comm.link_stream import LinkStream
from distensor.comm.messages import HubToNode, NodeToHub

Metadata = tuple[tuple[str, str], ...]


class Stream(Protocol):
    """What a link needs of its open stream; `LinkStream` is the real one and says what each raises."""

    def send(self, message: NodeToHub) -> None: ...

    async def drain(self) -> None: ...

    async def write(self, message: NodeToHub) -> None: ...

    async def read(self, *, within: float) -> HubToNode | None: ...

    async def ask(self, method: str, request: Any, metadata: Metadata) -> Any: ...

    async def close(self) -> None: ...


class Reach(Protocol):
    """The way to a hub."""

    def authority(self, address: HubAddress, fingerprint: str, seconds: float) -> str:
        """As `bootstrap.fetch_authority`; blocks."""

    async def open(
        self, address: HubAddress, authority_pem: str, metadata: Metadata, seconds: float | None = None
    ) -> Stream:
        """As `LinkStream.open`."""


class GrpcReach:
    """Over TLS and gRPC."""

    __slots__ = ()

    def authority(self, address: HubAddress, fingerprint: str, seconds: float) -> str:
        return fetch_authority(address, fingerprint, seconds)

    async def open(
        self, address: HubAddress, authority_pem: str, metadata: Metadata, seconds: float | None = None
    ) -> Stream:
        return await LinkStream.open(address, authority_pem, metadata, seconds)


GRPC: Reach = GrpcReach()
