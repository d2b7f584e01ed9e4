"""Ask a hub whether it knows a join token, without using the token up."""

from __future__ import annotations

import asyncio

from distensor.comm.bootstrap import fetch_authority
from distensor.comm.channels import bearer
from distensor.comm.link_stream import LinkStream
from distensor.comm.tokens import JoinToken, decode_node_token

CHECK_SECONDS = 10.0


async def check_node_token(text: str, *, seconds: float = CHECK_SECONDS) -> JoinToken:
    """Check form, certificate and token with the hub that the token names. Nothing is registered.

    Raises:
        AuthenticationError: malformed, another hub, unknown to the hub, or used already.
        HubUnreachableError: nobody answers there.
        HubProtocolError: something answers that is no hub.
    """
    token = decode_node_token(text)
    authority = await asyncio.to_thread(fetch_authority, token.address, token.fingerprint, seconds)
    stream = await LinkStream.open(token.address, authority, bearer("join", token.secret))
    try:
        await stream.end_without_register(within=seconds)
    finally:
        await stream.close()
    return token
