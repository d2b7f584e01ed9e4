"""What the routes work with, and who calls them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from fastapi import Request, Security
from fastapi.security import HTTPBearer
from starlette.responses import Response

from distensor.cloud.idempotency import Repeats
from distensor.cloud.metrics import Metrics
from distensor.cloud.problems import Refusal
from distensor.cloud.settings import CloudSettings
from distensor.comm.server import NOTHING_SHOWN, Bearer, Principal
from distensor.comm.tokens import PREFIX, Role, decode_token
from distensor.core.errors import AuthenticationError
from distensor.core.ids import AccountId
from distensor.hub.administration import Clerk
from distensor.hub.app import Inside, Ready
from distensor.hub.authorization import Operation, Reach
from distensor.hub.door import actor_of, reach_of
from distensor.hub.repository import Books

T = TypeVar("T")
LONGEST_SECRET = 1024
KEY_SCHEME = HTTPBearer(
    scheme_name="key",
    description="A key (dt_p_..., dt_u_..., dt_a_...), or the token of a trainer (dtj_...).",
    auto_error=False,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The hub, and what the HTTP side keeps while it runs. `closing` is set when streams have to end."""

    inside: Inside
    ready: Ready
    settings: CloudSettings
    metrics: Metrics
    repeats: Repeats
    closing: asyncio.Event

    async def look(self, run: Callable[[Books], T]) -> T:
        return await self.inside.writer.read(run)

    async def change(self, run: Callable[[Books], T]) -> T:
        """Raises: ReadOnlyError: nothing can be written at present."""
        self.inside.writer.require_writable()
        return await self.inside.writer.submit(run)


def context_of(request: Request) -> Context:
    found = request.app.state.context
    assert isinstance(found, Context), "make_app has put it there"
    return found


def bearer_of(request: Request) -> Bearer:
    """What the caller shows, and nowhere but in this one header."""
    shown = request.headers.getlist("authorization")
    scheme, _, text = (shown[0] if len(shown) == 1 else "").partition(" ")
    if scheme.lower() != "bearer" or not text or len(text) > LONGEST_SECRET or not text.isascii():
        return NOTHING_SHOWN
    if not text.startswith(PREFIX):
        return Bearer(kind="api", parts=(text,))
    try:
        token = decode_token(text)
    except AuthenticationError:
        return NOTHING_SHOWN
    return Bearer(kind="api", parts=(token.secret,)) if token.role is Role.TRAINER else NOTHING_SHOWN


def _peer(request: Request) -> str:
    """As gRPC writes it."""
    if request.client is None:
        return ""
    host = request.client.host
    return f"ipv6:[{host}]:0" if ":" in host else f"ipv4:{host}:0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Somebody who may do `operation`, if the object is one that the table lets him reach."""

    who: Principal
    operation: Operation
    context: Context
    request: Request

    @property
    def only(self) -> AccountId | None:
        """The account to which lists are limited; None for a caller who sees those of all."""
        return None if self.sees_all else AccountId(self.who.account)

    @property
    def sees_all(self) -> bool:
        return reach_of(self.who, self.operation) is Reach.ANY

    def require(self, target: str, owner: str | None, missing: str) -> AccountId:
        """Raises: ControlError: `missing`, where the object is not there or another account's."""
        door = self.context.inside.door
        return door.require_object(self.who, self.operation, target, owner, missing)

    def clerk(self) -> Clerk:
        return Clerk(actor=actor_of(self.who), now=int(self.context.inside.clock.now()))

    async def once(self, key: str | None, asked: object, run: Callable[[], Awaitable[Response]]) -> Response:
        """Run it, or give the answer again that the same request got before.

        Raises:
            Refusal: the key was used for another request.
        """
        if key is None:
            return await run()
        name = (self.who.account, self.who.key or self.who.subject, key)
        asked = (self.request.method, self.request.url.path, asked)
        return await self.context.repeats.once(name, repr(asked), run, self.context.inside.clock.monotonic())


def guard(operation: Operation) -> Callable[..., Awaitable[Caller]]:
    """A dependency: who calls, refused where the table never allows this operation to such a key."""

    async def caller(request: Request, _: Annotated[Any, Security(KEY_SCHEME)] = None) -> Caller:
        context = context_of(request)
        door = context.inside.door
        who = await door.recognise(bearer_of(request), _peer(request))
        door.require(who, operation)
        refuse_unknown_query(request)
        return Caller(who=who, operation=operation, context=context, request=request)

    caller.operation = operation  # type: ignore[attr-defined]  # a test walks all routes and reads it
    return caller


def refuse_unknown_query(request: Request) -> None:
    """Raises: Refusal: a filter with a slip of the pen in its name would otherwise let everything through."""
    route = request.scope["route"]
    known = {field.alias for field in route.dependant.query_params}
    if unknown := sorted(set(request.query_params) - known):
        expected = ", ".join(sorted(known)) or "none"
        raise Refusal(422, f"query parameter {unknown[0][:60]!r} is unknown here; expected {expected}")


def account_filter(caller: Caller, wanted: str | None) -> AccountId | None:
    """By which account to filter a list; a foreign one gives an empty list, as one that does not exist does."""
    if caller.only is None:
        return None if wanted is None else AccountId(wanted)
    return caller.only if wanted in (None, caller.only) else AccountId("")
