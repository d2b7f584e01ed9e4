"""Every route x every kind of key and scope x own, foreign and missing objects, over a real port."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloud_kit import Client, CloudHub, useful
from fastapi.routing import APIRoute

from distensor.cloud.app import ROUTERS
from distensor.comm.keys import KeyKind
from distensor.comm.tokens import Role
from distensor.core.ids import AccountId
from distensor.hub import access
from distensor.hub.accounts import WHO
from distensor.hub.audit import Outcome
from distensor.hub.authorization import Operation, Scope, Who
from distensor.hub.hashing import new_secret

S, P, T, A = Scope, Who.PROVIDER, Who.TRAINER, Who.ADMIN
OPEN = {"live", "ready"}
"""Routes that answer without a key."""
TABLE: dict[str, tuple[Operation, dict[Who, Scope | None]]] = {
    "who_am_i": (Operation.WHO_AM_I, {P: None, T: None, A: None}),
    "metrics": (Operation.READ_METRICS, {A: S.METRICS_READ}),
    "list_accounts": (Operation.READ_ACCOUNTS, {P: S.ACCOUNTS_READ, T: S.ACCOUNTS_READ, A: S.ACCOUNTS_READ}),
    "show_account": (Operation.READ_ACCOUNTS, {P: S.ACCOUNTS_READ, T: S.ACCOUNTS_READ, A: S.ACCOUNTS_READ}),
    "add_account": (Operation.ADD_ACCOUNT, {A: S.ACCOUNTS_WRITE}),
    "change_account": (Operation.CHANGE_ACCOUNT, {A: S.ACCOUNTS_WRITE}),
    "list_keys": (Operation.READ_KEYS, {P: S.ACCOUNTS_READ, T: S.ACCOUNTS_READ, A: S.ACCOUNTS_READ}),
    "show_key": (Operation.READ_KEYS, {P: S.ACCOUNTS_READ, T: S.ACCOUNTS_READ, A: S.ACCOUNTS_READ}),
    "create_key": (Operation.CREATE_KEY, {A: S.KEYS_WRITE}),
    "rotate_key": (Operation.ROTATE_KEY, {A: S.KEYS_WRITE}),
    "revoke_key": (Operation.REVOKE_KEY, {P: S.KEYS_REVOKE, T: S.KEYS_REVOKE, A: S.KEYS_WRITE}),
    "list_audit": (Operation.READ_AUDIT, {A: S.AUDIT_READ}),
    "list_nodes": (Operation.READ_NODES, {P: S.NODES_READ, T: S.MESH_READ, A: S.MESH_READ}),
    "show_node": (Operation.READ_NODES, {P: S.NODES_READ, T: S.MESH_READ, A: S.MESH_READ}),
    "list_devices": (Operation.READ_NODES, {P: S.NODES_READ, T: S.MESH_READ, A: S.MESH_READ}),
    "list_jobs": (Operation.LIST_JOBS, {T: S.JOBS_READ, A: S.JOBS_READ}),
    "show_job": (Operation.EXPLAIN_JOB, {T: S.JOBS_READ, A: S.JOBS_READ}),
    "explain_job": (Operation.EXPLAIN_JOB, {T: S.JOBS_READ, A: S.JOBS_READ}),
    "cancel_job": (Operation.END_JOB, {T: S.JOBS_END, A: S.JOBS_END}),
    "list_runs": (Operation.READ_RUN, {T: S.JOBS_READ, A: S.JOBS_READ}),
    "show_run": (Operation.READ_RUN, {T: S.JOBS_READ, A: S.JOBS_READ}),
    "list_steps": (Operation.READ_RUN, {T: S.JOBS_READ, A: S.JOBS_READ}),
    "watch_run": (Operation.READ_RUN, {T: S.JOBS_READ, A: S.JOBS_READ}),
    "list_epochs": (Operation.READ_TOPOLOGY, {T: S.JOBS_READ, A: S.JOBS_READ}),
    "show_topology": (Operation.READ_TOPOLOGY, {T: S.JOBS_READ, A: S.JOBS_READ}),
    "show_terms": (Operation.READ_TERMS, {P: None, T: None, A: None}),
    "list_earnings": (Operation.READ_EARNINGS, {P: S.LEDGER_READ, A: S.LEDGER_READ}),
    "show_earnings": (Operation.READ_EARNINGS, {P: S.LEDGER_READ, A: S.LEDGER_READ}),
    "show_statement": (Operation.READ_STATEMENT, {P: S.LEDGER_READ, T: S.LEDGER_READ, A: S.LEDGER_READ}),
    "show_cost": (Operation.READ_COST, {T: S.LEDGER_READ, A: S.LEDGER_READ}),
    "show_deposit": (Operation.READ_DEPOSIT, {T: S.LEDGER_READ, A: S.LEDGER_READ}),
    "enter_deposit": (Operation.ENTER_DEPOSIT, {A: S.DEPOSITS_WRITE}),
    "show_ledger": (Operation.READ_LEDGER, {A: S.LEDGER_READ}),
    "list_payouts": (Operation.READ_PAYOUTS, {P: S.LEDGER_READ, A: S.LEDGER_READ}),
    "show_payout": (Operation.READ_PAYOUTS, {P: S.LEDGER_READ, A: S.LEDGER_READ}),
    "make_payouts": (Operation.MAKE_PAYOUT, {A: S.PAYOUTS_WRITE}),
    "confirm_payout": (Operation.END_PAYOUT, {A: S.PAYOUTS_WRITE}),
    "fail_payout": (Operation.END_PAYOUT, {A: S.PAYOUTS_WRITE}),
}
"""Written out a second time on purpose: a change of the table has to be meant."""
ANY = {A: set(TABLE), T: {"list_nodes", "show_node", "list_devices"}, P: set[str]()}
"""Where a kind of key reaches the objects of all accounts."""
ABOUT = {
    "show_account": "account",
    "change_account": "account",
    "create_key": "account",
    "show_key": "key",
    "rotate_key": "key",
    "revoke_key": "key",
    "show_node": "node",
    "show_job": "job",
    "explain_job": "job",
    "cancel_job": "job",
    "show_run": "job",
    "list_steps": "job",
    "watch_run": "job",
    "list_epochs": "job",
    "show_topology": "job",
    "show_earnings": "node",
    "show_statement": "name",
    "show_cost": "job",
    "show_deposit": "account",
    "enter_deposit": "account",
    "make_payouts": "name",
    "show_payout": "payout",
    "confirm_payout": "payout",
    "fail_payout": "payout",
}
"""Of what kind the object is."""
MISSING = {
    "account": "nobody",
    "name": "nobody",
    "payout": "po-nobody",
    "key": "k_0123456789ab",
    "node": "n_0123456789abcdef",
    "job": "j_0123456789abcdef",
}


def routes() -> dict[str, APIRoute]:
    return {route.name: route for router in ROUTERS for route in router.routes if isinstance(route, APIRoute)}


def test_the_table_has_every_route_with_the_operation_that_it_asks_for() -> None:
    found = {}
    for name, route in routes().items():
        asked = [getattr(one.call, "operation", None) for one in route.dependant.dependencies]
        found[name] = next((one for one in asked if one is not None), None)
    assert found == {**dict.fromkeys(OPEN), **{name: operation for name, (operation, _) in TABLE.items()}}


@dataclass
class Caller:
    name: str
    who: Who
    client: Client
    scopes: frozenset[Scope] = field(default_factory=lambda: frozenset(Scope))


def _callers(hub: CloudHub) -> list[Caller]:
    secret = new_secret()
    token = access.token_for(secret, Role.TRAINER, "me", AccountId("me"))
    hub.do(_saved(hub, token))
    callers = [Caller("trainer token", T, Client(hub.address, secret))]
    for kind in KeyKind:
        callers.append(Caller(f"{kind} all", WHO[kind], hub.client("me", kind)))
        callers += [
            Caller(f"{kind} {only}", WHO[kind], hub.client("me", kind, only), frozenset({only}))
            for only in useful(kind)
        ]
    return callers


async def _saved(hub: CloudHub, token: Any) -> None:
    await hub.hub.writer.submit(lambda books: books.save_token(token))


def _ask(caller: Caller, name: str, objects: dict[str, str]) -> Any:
    route = routes()[name]
    path = route.path
    for kind, value in objects.items():
        path = path.replace(f"{{{kind}}}", value)
    method = next(iter(route.methods))
    return caller.client.ask(method, path.replace("{epoch}", "1"), _body(name, objects))


def _body(name: str, objects: dict[str, str]) -> Any:
    """A request that changes nothing, or nothing that another one would miss."""
    bodies: dict[str, Any] = {
        "add_account": {"account": "me", "kinds": ["trainer"]},  # there already: refused for what it says
        "change_account": {},
        "create_key": {"account": objects["account"], "kind": "trainer"},
        "rotate_key": {"hours": 1},
        "cancel_job": {"reason": "no"},
        "enter_deposit": {"key": f"of-{objects['account']}", "micro": 5},
        "make_payouts": {"name": objects["name"]},  # nothing is payable: refused for what it says
    }
    return bodies.get(name)


def _refused(caller: Caller, name: str, owner: str) -> int | None:
    """With which status the table refuses; None where it lets through."""
    row = TABLE[name][1]
    if caller.who not in row or (row[caller.who] not in {None, *caller.scopes}):
        return 403
    if name not in ABOUT or owner == "me" or (owner == "other" and name in ANY[caller.who]):
        return None
    return 404


def test_the_api_answers_as_the_table_says_and_a_foreign_object_reads_like_a_missing_one(hub: CloudHub) -> None:
    wrong: list[object] = []
    refused: Counter[tuple[str, str]] = Counter()
    for caller in _callers(hub):
        objects = {owner: _objects(hub, owner) for owner in ("me", "other")} | {"nobody": MISSING}
        for name, (operation, _) in TABLE.items():
            asked = objects if name in ABOUT else {"me": objects["me"]}
            replies = {owner: _ask(caller, name, names) for owner, names in asked.items()}
            for owner, reply in replies.items():
                expected = _refused(caller, name, owner)
                right = reply.status == expected if expected else reply.status in {200, 201, 409, 422}
                if not right:
                    wrong.append((caller.name, name, owner, expected, reply))
                refused[caller.who, operation] += expected == 403 or (expected == 404 and owner == "other")
            if name in ABOUT and replies["other"].status == 404:
                kind = ABOUT[name]
                told = replies["other"].json["detail"].replace(objects["other"][kind], MISSING[kind])
                assert told == replies["nobody"].json["detail"]
    assert not wrong, wrong[:5]
    lines = [line for line in hub.do(hub.hub.audit(100_000)) if line.outcome is Outcome.REFUSED]
    written = Counter((next(who for who in Who if line.actor.startswith(who)), line.action) for line in lines)
    assert written == +refused


def _objects(hub: CloudHub, owner: str) -> dict[str, str]:
    """Objects of an account, with a key that nobody has used up."""
    _, key = hub.do(hub.hub.key(owner, KeyKind.TRAINER))
    named = {"account": owner, "name": owner, "payout": f"po-{owner}"}
    return {**named, "key": key, "node": hub.nodes[owner], "job": hub.jobs[owner]}


def test_what_is_not_recognised_is_refused_alike_and_its_host_waits(tmp_path: Path) -> None:
    with CloudHub(tmp_path) as hub:
        known, fresh = hub.client("me", KeyKind.TRAINER), hub.client("me", KeyKind.TRAINER)
        assert known.get("/v1/me").status == 200
        names = _objects(hub, "me")
        shown = {"nothing": "", "a wrong secret": new_secret(), "a join token": hub.do(hub.hub.join_secret("me"))}
        for what, text in shown.items():
            caller = Caller(what, T, Client(hub.address, text))
            for name in TABLE:
                reply = _ask(caller, name, names)
                assert reply.status in {401, 429}, (what, name, reply)
                assert not text or text not in reply.body.decode()
        lines = [line for line in hub.do(hub.hub.audit(1000)) if line.action == "authenticate"]
        assert len(lines) == 20
        assert {line.actor for line in lines} == {"127.0.0.1"}
        assert fresh.get("/v1/me").status == 429
        assert known.get("/v1/me").status == 200
