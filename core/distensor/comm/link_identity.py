"""Who a node is to its hub: first by a join token, from then on by the credential that the hub gave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from distensor.comm.address import HubAddress, parse_address
from distensor.comm.channels import bearer
from distensor.comm.credential import NodeCredential, load_credential, save_credential
from distensor.comm.link_failures import LinkDownError
from distensor.comm.messages import Welcome
from distensor.comm.tokens import JoinToken, decode_node_token
from distensor.core.errors import AuthenticationError, HubProtocolError
from distensor.core.ids import NodeId

BOOTSTRAP_SECONDS = 10.0
ONE_OF_SEVERAL_SECONDS = 3.0
"""So long an address is tried where there is another: a process that is stopped takes connections and says nothing."""

Metadata = tuple[tuple[str, str], ...]


class LinkIdentity:
    """Token and credential of a node, and which of the two to show.

    A credential of the hub that the token names is preferred to the token: the token may be used up. A token of
    another hub means that the owner moves the node there. Where the hub refuses the credential (it was revoked, say),
    the token is shown instead: the owner may have been given a new one. `fetch`: `bootstrap.fetch_authority` or its
    stand-in.
    """

    def __init__(self, token: str | None, path: Path, fetch: Callable[[HubAddress, str, float], str]) -> None:
        self._fetch = fetch
        self._token_text = token
        self._path = path
        self._token: JoinToken | None = None
        self._credential: NodeCredential | None = None
        self._set_aside: NodeCredential | None = None
        self._authority: str | None = None
        self._loaded = False
        self._suspect = False
        self._turn = 0
        self._tried = 1

    @property
    def addresses(self) -> tuple[HubAddress, ...]:
        """Where the hub may be; empty where no hub is known."""
        if self._credential is not None:
            return tuple(map(parse_address, (self._credential.address, *self._credential.others)))
        return () if self._token is None else self._token.addresses

    @property
    def patience(self) -> float | None:
        """How many seconds to wait for a connection to one of several addresses; None where there is one."""
        return ONE_OF_SEVERAL_SECONDS if len(self.addresses) > 1 else None

    def turn(self) -> bool:
        """The address did not lead to the hub: another one comes next; whether it has yet to be tried in this round."""
        self._turn += 1
        self._tried += 1
        if self._tried <= len(self.addresses):
            return True
        self._tried = 1
        return False

    @property
    def node_id(self) -> NodeId | None:
        credential = self._credential or self._set_aside
        return None if credential is None else credential.node_id

    def refused(self) -> bool:
        """The hub did not accept what was shown; whether there is something else to show at once."""
        if self._credential is not None and self._token is not None:
            self._credential, self._set_aside = None, self._credential
            return True
        if self._set_aside is not None:  # later the credential may be good again: its account is enabled, say
            self._credential, self._set_aside = self._set_aside, None
        return False

    @property
    def address_text(self) -> str:
        return str(self._present()) if self.addresses else ""

    def _present(self) -> HubAddress:
        return self.addresses[self._turn % len(self.addresses)]

    @property
    def metadata(self) -> Metadata:
        """What a node that has joined shows with each call.

        Raises:
            AuthenticationError: it has not joined yet.
        """
        if self._credential is None:
            raise AuthenticationError("this node has not joined a hub yet")
        return bearer("node", self._credential.node_id, self._credential.secret)

    async def resolve(self) -> tuple[HubAddress, str, Metadata]:
        """Where to connect, what to trust and what to show.

        Raises:
            LinkDownError: neither token nor credential.
            AuthenticationError: the hub is not the one that they name.
            HubUnreachableError, StoreError
        """
        if not self._loaded:
            await asyncio.to_thread(self._load)
            self._loaded = True
        if self._credential is not None:
            return await self._with_credential(self._credential)
        if self._token is None:
            text = f"this machine has no key yet: no join token was given, and {self._path} holds no credential"
            raise LinkDownError.of("no_key", text, final=True)
        return await self._with_token(self._token)

    async def _with_credential(self, credential: NodeCredential) -> tuple[HubAddress, str, Metadata]:
        address = self._present()
        if self._suspect:  # the last attempt failed: tell a hub that was replaced from one that is away
            await asyncio.to_thread(self._fetch, address, credential.fingerprint, self.patience or BOOTSTRAP_SECONDS)
        self._suspect = True
        return address, credential.authority_pem, bearer("node", credential.node_id, credential.secret)

    async def _with_token(self, token: JoinToken) -> tuple[HubAddress, str, Metadata]:
        address, seconds = self._present(), self.patience or BOOTSTRAP_SECONDS
        self._authority = await asyncio.to_thread(self._fetch, address, token.fingerprint, seconds)
        return address, self._authority, bearer("join", token.secret)

    async def welcomed(self, welcome: Welcome) -> None:
        """Keep the credential that came with the welcome, if one did, and the addresses that the hub says it has."""
        self._suspect = False
        self._tried = 1
        if self._credential is None:
            await self._keep_new(welcome)
        elif welcome.credential or welcome.node_id != self._credential.node_id:
            raise HubProtocolError(f"the hub calls this node {welcome.node_id}, its credential says {self.node_id}")
        await self._keep_addresses(welcome.hubs)

    async def _keep_addresses(self, hubs: tuple[str, ...]) -> None:
        """They come in the order of whoever says it; only another set is another one."""
        before = self._credential
        if before is None or not hubs or {before.address, *before.others} == set(hubs):
            return
        after = replace(before, address=hubs[0], others=hubs[1:])
        await asyncio.to_thread(save_credential, self._path, after)
        self._credential, self._turn = after, 0

    async def _keep_new(self, welcome: Welcome) -> None:
        if not welcome.credential or self._token is None or self._authority is None:
            raise HubProtocolError("the hub's welcome has no credential for this new node")
        credential = NodeCredential(
            node_id=welcome.node_id,
            address=str(self._token.address),
            authority_pem=self._authority,
            secret=welcome.credential,
            others=tuple(map(str, self._token.others)),
        )
        await asyncio.to_thread(save_credential, self._path, credential)
        self._credential, self._set_aside = credential, None

    def _load(self) -> None:
        credential = load_credential(self._path)
        if self._token_text:
            self._token = decode_node_token(self._token_text)
            if credential is not None:
                credential = self._matching(credential, self._token)
        self._credential = credential

    @staticmethod
    def _matching(credential: NodeCredential, token: JoinToken) -> NodeCredential | None:
        if credential.fingerprint != token.fingerprint:
            return None
        others = tuple(map(str, token.others)) or credential.others
        return replace(credential, address=str(token.address), others=others)  # the same hub may have moved
