"""The hub's door: recognises callers, asks the table what they may, writes refusals down, and shows out who was barred.

What it knows of accounts and keys is as new as the last `refresh`, which the service asks for every half second:
whoever changes the books, in this process or another, is heard within that time.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from distensor.comm.address import host_of_peer
from distensor.comm.failures import THROTTLED
from distensor.comm.keys import decode_key, is_key
from distensor.comm.server import Bearer, Principal
from distensor.comm.tokens import Role
from distensor.core.clock import Clock
from distensor.core.errors import AuthenticationError, ControlError, NotAllowedError, ThrottledError
from distensor.core.ids import AccountId, KeyId, NodeId
from distensor.hub import access
from distensor.hub.access_books import AccessBooks
from distensor.hub.accounts import WHO, Barred, KeyRecord, ended
from distensor.hub.audit import AuditEntry, Outcome
from distensor.hub.authorization import RULES, Decision, Operation, Reach, Scope, Who, decide, scopes_of
from distensor.hub.hashing import hash_secret, matches
from distensor.hub.records import NodeRecord
from distensor.hub.throttle import DEFAULT_LIMIT, Limit, Throttle
from distensor.hub.writer import Writes

TOUCH_SECONDS = 60.0
"""How much older than the truth a key's last use may be in the books."""
NOBODY = Barred()
_WAYS = {
    "trainer": (Who.TRAINER, Who.ADMIN),
    "join": (Who.PROVIDER,),
    "api": (Who.PROVIDER, Who.TRAINER, Who.ADMIN),
}
"""Which kinds of keys may stand where a token of this kind does."""


@dataclass(frozen=True, eq=False, slots=True)
class Stay:
    """A caller who is in for longer than one call. Compared by identity."""

    who: Principal
    show_out: Callable[[str], None]


class Door:
    """Used in one event loop. `node_of` finds a node in memory; `barred` are those of access
    version `version`, without them the first `refresh` asks; `lines` is how many refusals of one caller the audit log
    takes."""

    def __init__(
        self,
        node_of: Callable[[NodeId], NodeRecord | None],
        writer: Writes,
        clock: Clock,
        *,
        barred: Barred = NOBODY,
        version: int = -1,
        lines: Limit = DEFAULT_LIMIT,
    ) -> None:
        self._node_of = node_of
        self._writer = writer
        self._clock = clock
        self._barred = barred
        self._version = version
        self._known: dict[str, Principal | None] = {}  # None: was good before the books changed
        self._touched: dict[str, float] = {}
        self._stays: set[Stay] = set()
        self._failures = Throttle()
        self._lines = Throttle(lines)

    # Who is it

    async def recognise(self, bearer: Bearer, peer: str) -> Principal:
        """Who shows this token, key or credential.

        Raises:
            AuthenticationError: unknown, spent, revoked, expired, or its account is disabled.
            ThrottledError: its host has shown too many wrong ones, and it is none that the hub knows at once.
        """
        host = host_of_peer(peer)
        try:
            who = self._at_once(bearer)
            if who is None:
                mark = hash_secret(bearer.parts[0])
                self._check_host(host, f"{bearer.kind} {mark}")
                who = await self._from_books(bearer, mark)
            if why := self._why_barred(who):
                raise AuthenticationError(f"{_name(who)} {why}; ask the hub's operator for another")
        except AuthenticationError as error:
            if bearer.parts:
                self._known.pop(f"{bearer.kind} {hash_secret(bearer.parts[0])}", None)
            self._note_failure(host, bearer.kind, error)
            raise
        self._touch(who)
        return replace(who, host=host)

    def _at_once(self, bearer: Bearer) -> Principal | None:
        """The caller, when memory is enough to know it."""
        match bearer:
            case Bearer(kind="node", parts=(node_id, secret)):
                node = self._node_of(NodeId(node_id))
                if node is None or not matches(secret, node.secret_hash):
                    raise AuthenticationError("the hub does not know this node's credential")
                return principal_of_node(node)
            case Bearer(kind="trainer" | "join" | "api", parts=(secret,)):
                return self._known.get(f"{bearer.kind} {hash_secret(secret)}")
        raise AuthenticationError("the call carries no token or credential of a known form")

    def _check_host(self, host: str, shown: str) -> None:
        """Wrong keys of a host do not keep out who was known before."""
        wait = self._failures.wait(host, self._clock.monotonic())
        if wait > 0 and shown not in self._known:
            raise ThrottledError(f"{THROTTLED} from {host}: try again in {wait:.0f} s")

    async def _from_books(self, bearer: Bearer, mark: str) -> Principal:
        secret, version = bearer.parts[0], self._version
        if is_key(secret):
            who = await self._from_key(bearer.kind, secret, mark)
        elif bearer.kind != "join":
            token = await self._writer.read(lambda books: access.find_token(books, mark, Role.TRAINER))
            who = Principal(
                kind=Who.TRAINER,
                subject=token.subject,
                account=token.account,
                scopes=scopes_of(Who.TRAINER),
            )
        else:
            token = await self._writer.read(lambda books: access.find_unspent(books, mark))
            return Principal(kind=Who.JOIN, subject=mark, account=token.account)  # not kept: it may be spent next time
        if version == self._version:
            self._known[f"{bearer.kind} {mark}"] = who
        return who

    async def _from_key(self, way: str, text: str, mark: str) -> Principal:
        kind = decode_key(text)
        if WHO[kind] not in _WAYS[way]:
            raise AuthenticationError(f"a {kind.value} key is no key for a {'node' if way == 'join' else way}")
        now = int(self._clock.now())
        key = await self._writer.read(lambda books: usable_key(books, mark, now))
        return Principal(
            kind=WHO[kind],
            subject=mark if kind.value == "provider" else key.account_id,
            account=key.account_id,
            key=key.key_id,
            scopes=frozenset(key.scopes),
            expires_at=key.expires_at,
        )

    def _why_barred(self, who: Principal) -> str | None:
        if who.account in self._barred.accounts:
            return f"is of account {who.account}, which is disabled"
        if who.key in (self._barred.families if who.kind == Who.NODE else self._barred.keys):
            return "was revoked"
        if who.expires_at is not None and who.expires_at <= self._clock.now():
            return "has expired"
        return None

    # What may it do

    def require(self, who: Principal, operation: Operation) -> None:
        """Raises: NotAllowedError: this caller may never do this, whatever the object."""
        decision = self._decide(who, operation, None)
        if decision is not Decision.ALLOWED:
            self._note_refusal(who, operation, "", decision)
            raise NotAllowedError(f"{operation.value} is {decision.value}: {_name(who)} was shown")

    def require_object(
        self, who: Principal, operation: Operation, target: str, owner: str | None, missing: str
    ) -> AccountId:
        """The owner of an object that the caller may do this to. `owner` is None when there is no such object.

        Raises:
            NotAllowedError: as `require`.
            ControlError: `missing`, the same words for an object that is not there and for a foreign one.
        """
        self.require(who, operation)
        if owner is not None:
            decision = self._decide(who, operation, AccountId(owner))
            if decision is Decision.ALLOWED:
                return AccountId(owner)
            self._note_refusal(who, operation, target, decision)
        raise ControlError(missing)

    @staticmethod
    def _decide(who: Principal, operation: Operation, owner: AccountId | None) -> Decision:
        scopes = frozenset(map(Scope, who.scopes))
        return decide(Who(who.kind), AccountId(who.account), scopes, operation, owner)

    # Who is in

    @contextmanager
    def staying(self, who: Principal, show_out: Callable[[str], None]) -> Iterator[None]:
        """While the block lasts, `show_out` is called with the reason when the caller is barred."""
        stay = self.enter(who, show_out)
        try:
            yield
        finally:
            self.leave(stay)

    def enter(self, who: Principal, show_out: Callable[[str], None]) -> Stay:
        stay = Stay(who, show_out)
        self._stays.add(stay)
        return stay

    def leave(self, stay: Stay) -> None:
        self._stays.discard(stay)

    async def refresh(self) -> bool:
        """Learn what has changed in the books, and show out who is barred by it or has expired; whether it has."""
        version = await self._writer.read(lambda books: books.access_version())
        changed = version != self._version
        if changed:
            barred = await self._writer.read(lambda books: books.barred())
            self._version, self._barred = version, barred
            self._known = dict.fromkeys(self._known)
        for stay in [stay for stay in self._stays if self._why_barred(stay.who)]:
            self._stays.discard(stay)
            stay.show_out(f"{_name(stay.who)} {self._why_barred(stay.who)}")
        return changed

    # What is written down

    def note(self, actor: str, action: str, target: str, outcome: Outcome, detail: str = "") -> None:
        """Add a line to the audit log, soon."""
        entry = AuditEntry(
            at=int(self._clock.now()), actor=actor, action=action, target=target, outcome=outcome, detail=detail
        )
        self._writer.submit(lambda books: books.append_audit(entry))

    def _note_failure(self, host: str, kind: str, error: AuthenticationError) -> None:
        now = self._clock.monotonic()
        if self._failures.wait(host, now) > 0:
            return
        self._failures.failed(host, now)
        blocked = " (further ones are refused without a look)" if self._failures.wait(host, now) > 0 else ""
        self.note(host, "authenticate", kind[:20], Outcome.REFUSED, f"{error}{blocked}")

    def _note_refusal(self, who: Principal, operation: Operation, target: str, decision: Decision) -> None:
        """As many lines for each caller as the throttle has room for: a loop must not fill the disk."""
        actor, now = actor_of(who), self._clock.monotonic()
        if self._lines.wait(actor, now) > 0:
            return
        self._lines.failed(actor, now)
        more = " (further ones are not written down for a while)" if self._lines.wait(actor, now) > 0 else ""
        self.note(actor, operation.value, target, Outcome.REFUSED, f"{decision.value}{more}")

    def _touch(self, who: Principal) -> None:
        now = self._clock.monotonic()
        if not who.key or who.kind == Who.NODE or now - self._touched.get(who.key, -TOUCH_SECONDS) < TOUCH_SECONDS:
            return
        self._touched[who.key] = now
        at = int(self._clock.now())
        self._writer.submit(lambda books: books.touch_key(KeyId(who.key), at))


def reach_of(who: Principal, operation: Operation) -> Reach:
    """Whose objects a caller sees that may do this at all."""
    return RULES[operation][Who(who.kind)].reach


def principal_of_node(node: NodeRecord) -> Principal:
    return Principal(kind=Who.NODE, subject=node.node_id, account=node.account, key=node.joined_by or "")


def actor_of(who: Principal) -> str:
    """Kind, account and key or node of a caller, for the audit log."""
    which = who.key or (who.subject if who.kind == Who.NODE else "")
    return " ".join(part for part in (who.kind, who.account, which, who.host) if part)


def usable_key(books: AccessBooks, mark: str, now: int) -> KeyRecord:
    """The key with this hash.

    Raises:
        AuthenticationError: it is unknown, revoked or expired, or its account is disabled.
    """
    key = books.find_key(mark)
    account = None if key is None else books.find_account(key.account_id)
    if key is None or account is None or not hmac.compare_digest(key.secret_hash, mark):
        raise AuthenticationError("the hub does not know this key")
    if why := ended(key, now):
        raise AuthenticationError(f"key {key.shown} {why}; ask the hub's operator for another")
    if account.disabled:
        raise AuthenticationError(f"account {account.account_id} is disabled; ask the hub's operator")
    return key


def _name(who: Principal) -> str:
    return f"{'an' if who.kind[0] in 'aeiou' else 'a'} {who.kind}"
