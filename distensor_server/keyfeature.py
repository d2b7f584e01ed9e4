"""The key of the running supervisor: the gate `key`, the section `auth`; test, login and logout by the local socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from distensor.comm import LinkState
from distensor.core.errors import AuthenticationError, DistensorError, HubProtocolError, HubUnreachableError
from distensor_server.feature import Feature, SectionBuilder
from distensor_server.keys.chain import KeyStore
from distensor_server.keys.identity import bring_back, set_aside
from distensor_server.keys.login import Check, check_with_hub, log_in
from distensor_server.keys.model import FoundKey
from distensor_server.localserver import Method, RequestError
from distensor_server.node import Node
from distensor_server.picture import Gate, Picture
from distensor_server.sections import Section

LONGEST_KEY = 4096
NEXT_STEP = "give this machine its key: distensor auth login"


class KeyState(StrEnum):
    MISSING = "missing"
    UNPROVEN = "unproven"
    """There is a key, and the hub has not answered yet."""
    REGISTERED = "registered"
    REJECTED = "rejected"


class KeyFeature(Feature):
    """Sees keys; shows only where they are and how they end."""

    def __init__(self, node: Node, *, found: FoundKey | None, store: KeyStore, check: Check = check_with_hub) -> None:
        self._node = node
        self._found = found
        self._store = store
        self._check = check
        self._registered_at: float | None = None
        self._busy = asyncio.Lock()

    def open(self) -> None:
        for note in self._store.notes:
            self._node.journal.add("info", "key", note)
        self._look()
        if self._state() is KeyState.MISSING:
            self._node.journal.add("warning", "key", f"no key yet; {NEXT_STEP}")

    def on_tick(self, picture: Picture) -> None:
        self._look()

    def _look(self) -> None:
        self._registered_at = _written_at(self._node.state.credential)

    def _state(self) -> KeyState:
        link = self._node.link.status
        if link.error is not None and link.error.code == "authentication":
            return KeyState.REJECTED
        if self._registered_at is not None or link.state is LinkState.CONNECTED:
            return KeyState.REGISTERED
        return KeyState.MISSING if self._found is None else KeyState.UNPROVEN

    # What is shown

    def gates(self) -> Sequence[Gate]:
        state, link = self._state(), self._node.link.status
        if state is KeyState.MISSING:
            return (Gate(gate="key", open=False, reading=f"no key yet; {NEXT_STEP}", limit="a key"),)
        if state is KeyState.REJECTED and link.error is not None:
            reading = f"refused: {link.error.message}"
            return (Gate(gate="key", open=False, reading=reading, limit="a key that the hub knows"),)
        readings = {KeyState.REGISTERED: "this machine is registered", KeyState.UNPROVEN: "not tried yet"}
        return (Gate(gate="key", open=True, reading=readings[state], limit="a key"),)

    def sections(self) -> Mapping[str, SectionBuilder]:
        return {"auth": self._section}

    def _section(self, picture: Picture) -> Section:
        state, found, link = self._state(), self._found, picture.link
        return {
            "state": state.value,
            "source": None if found is None else found.source.value,
            "where": None if found is None else found.where,
            "key": None if found is None else found.masked,
            "hub": link.address or None,
            "node_id": link.node_id,
            "registered_at": self._registered_at,
            "problem": link.error.message if state is KeyState.REJECTED and link.error is not None else None,
            "fix": NEXT_STEP if state in (KeyState.MISSING, KeyState.REJECTED) else None,
        }

    # What may be asked

    def methods(self) -> Mapping[str, Method]:
        return {"auth_test": self._on_test, "auth_login": self._on_login, "auth_logout": self._on_logout}

    def _on_test(self, params: Mapping[str, Any]) -> Awaitable[Mapping[str, Any]]:
        return self._test(_key_of(params, ()))

    async def _test(self, key: str) -> Mapping[str, Any]:
        try:
            token = await self._check(key)
        except DistensorError as error:
            raise refusal(error) from error
        return {"hub": str(token.address), "fingerprint": token.fingerprint}

    def _on_login(self, params: Mapping[str, Any]) -> Awaitable[Mapping[str, Any]]:
        key = _key_of(params, ("test", "in_file"))
        return self._login(key, test=_flag(params, "test", default=True), in_file=_flag(params, "in_file"))

    async def _login(self, key: str, *, test: bool, in_file: bool) -> Mapping[str, Any]:
        async with self._busy:
            try:
                login = await log_in(key, self._store, test=test, in_file=in_file, check=self._check)
            except DistensorError as error:
                raise refusal(error, by_systemd=bool(self._node.environment.get("CONFIGURATION_DIRECTORY"))) from error
            await asyncio.to_thread(bring_back, self._node.state.credential, login.fingerprint)
            self._found = login.kept
            self._node.link.use_token(login.kept.key)
            self._look()
            self._node.reconsider()
            self._node.journal.add("info", "key", f"a new key for {login.hub}, kept in {login.kept.where}")
        return {
            "source": login.kept.source.value,
            "where": login.kept.where,
            "key": login.kept.masked,
            "hub": login.hub,
            "tested": login.tested,
        }

    def _on_logout(self, params: Mapping[str, Any]) -> Awaitable[Mapping[str, Any]]:
        if params:
            raise RequestError(code="bad_params", message="auth_logout takes no parameters")
        return self._logout()

    async def _logout(self) -> Mapping[str, Any]:
        async with self._busy:
            try:
                removed = await asyncio.to_thread(self._store.forget)
                aside = await asyncio.to_thread(set_aside, self._node.state.credential)
            except DistensorError as error:
                raise refusal(error) from error
            self._found = None
            self._node.link.use_token(None)
            self._look()
            self._node.reconsider()
            self._node.journal.add("info", "key", "logged out: this machine takes no work until it has a key again")
        return {"removed": list(removed), "identity": aside}


def refusal(error: DistensorError, *, by_systemd: bool = False) -> RequestError:
    """An answer of ours for a key that was not taken: code, cause, fix.

    `by_systemd`: this is the machine's own service, whose configuration is root's.
    """
    match error:
        case AuthenticationError():
            return RequestError(code="key_refused", message=str(error), fix="ask the hub's operator for a node's token")
        case HubUnreachableError():
            fix = "check that the hub runs and can be reached; `distensor auth login --no-test` keeps the key untried"
            return RequestError(code="hub_unreachable", message=str(error), fix=fix)
        case HubProtocolError():
            return RequestError(
                code="not_a_hub", message=str(error), fix="check the address; both sides need one version"
            )
        case _:
            fix = "sudo distensor auth login --system" if by_systemd else "make the configuration directory writable"
            return RequestError(code="not_kept", message=str(error), fix=fix)


def _key_of(params: Mapping[str, Any], others: Sequence[str]) -> str:
    key = params.get("key")
    if params.keys() - {"key", *others} or not isinstance(key, str) or not 0 < len(key.strip()) <= LONGEST_KEY:
        raise RequestError(code="bad_params", message="expected {'key': text}", fix="send the key that the hub printed")
    return key.strip()


def _flag(params: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = params.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(code="bad_params", message=f"{name} is true or false")
    return value


def _written_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
