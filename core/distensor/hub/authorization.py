"""Who may do what: one table for every way into the hub. Pure.

A question is a kind of caller with its scopes, an operation, and the account that owns the object (None where there is
no object yet). The answer is ALLOWED or a reason. Whoever asks about a foreign object is told what one hears about an
object that does not exist, so FOREIGN never leaves the hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from distensor.core.ids import AccountId


class Who(StrEnum):
    """Kinds of callers."""

    JOIN = "join token"
    """The holder of a join token for one node."""
    NODE = "node credential"
    PROVIDER = "provider key"
    TRAINER = "trainer key"
    """Also the trainer's token of a standalone hub."""
    ADMIN = "admin key"


class Scope(StrEnum):
    """What a key may be limited to."""

    NODES_JOIN = "nodes:join"
    MESH_READ = "mesh:read"
    JOBS_READ = "jobs:read"
    JOBS_WRITE = "jobs:write"
    JOBS_END = "jobs:end"
    NODES_READ = "nodes:read"
    ACCOUNTS_READ = "accounts:read"
    ACCOUNTS_WRITE = "accounts:write"
    KEYS_WRITE = "keys:write"
    KEYS_REVOKE = "keys:revoke"
    AUDIT_READ = "audit:read"
    METRICS_READ = "metrics:read"
    LEDGER_READ = "ledger:read"
    DEPOSITS_WRITE = "deposits:write"
    PAYOUTS_WRITE = "payouts:write"


class Operation(StrEnum):
    """What can be asked of a hub: the calls of `control.proto`, then what only the HTTP API has."""

    NODE = "Node"
    STATEMENT = "Statement"
    UNITS = "Units"
    QUERY_MESH = "QueryMesh"
    SUBMIT_JOB = "SubmitJob"
    RECONFIGURE_JOB = "ReconfigureJob"
    TAKE_OVER_JOB = "TakeOverJob"
    WATCH_JOB = "WatchJob"
    REPORT_UNITS = "ReportUnits"
    REPORT_PROGRESS = "ReportProgress"
    LIST_JOBS = "ListJobs"
    EXPLAIN_JOB = "ExplainJob"
    END_JOB = "EndJob"
    WHO_AM_I = "WhoAmI"
    READ_NODES = "ReadNodes"
    READ_TOPOLOGY = "ReadTopology"
    READ_RUN = "ReadRun"
    READ_ACCOUNTS = "ReadAccounts"
    ADD_ACCOUNT = "AddAccount"
    CHANGE_ACCOUNT = "ChangeAccount"
    READ_KEYS = "ReadKeys"
    CREATE_KEY = "CreateKey"
    ROTATE_KEY = "RotateKey"
    REVOKE_KEY = "RevokeKey"
    READ_AUDIT = "ReadAudit"
    READ_METRICS = "ReadMetrics"
    READ_TERMS = "ReadTerms"
    READ_EARNINGS = "ReadEarnings"
    READ_STATEMENT = "ReadStatement"
    READ_COST = "ReadCost"
    READ_DEPOSIT = "ReadDeposit"
    ENTER_DEPOSIT = "EnterDeposit"
    READ_LEDGER = "ReadLedger"
    READ_PAYOUTS = "ReadPayouts"
    MAKE_PAYOUT = "MakePayout"
    END_PAYOUT = "EndPayout"


class Reach(StrEnum):
    """Whose objects."""

    OWN = "own"
    ANY = "any"


class Decision(StrEnum):
    ALLOWED = "allowed"
    WRONG_KIND = "not for this kind of key"
    NO_SCOPE = "not among the scopes of this key"
    FOREIGN = "the object belongs to another account"


@dataclass(frozen=True, slots=True)
class Rule:
    """What a kind of caller needs for an operation; a scope of None means that its kind is enough."""

    scope: Scope | None
    reach: Reach = Reach.OWN


_READ_MESH = Rule(Scope.MESH_READ, Reach.ANY)
_READ_JOBS = Rule(Scope.JOBS_READ)
_READ_ALL_JOBS = Rule(Scope.JOBS_READ, Reach.ANY)
_WRITE_JOBS = Rule(Scope.JOBS_WRITE)
_BY_KIND = Rule(None)
_READ_ACCOUNT = Rule(Scope.ACCOUNTS_READ)
_READ_ALL_ACCOUNTS = Rule(Scope.ACCOUNTS_READ, Reach.ANY)
_WRITE_ACCOUNTS = Rule(Scope.ACCOUNTS_WRITE, Reach.ANY)
_WRITE_KEYS = Rule(Scope.KEYS_WRITE, Reach.ANY)
_REVOKE = Rule(Scope.KEYS_REVOKE)
_READ_MONEY = Rule(Scope.LEDGER_READ)
_READ_ALL_MONEY = Rule(Scope.LEDGER_READ, Reach.ANY)
_WRITE_PAYOUTS = Rule(Scope.PAYOUTS_WRITE, Reach.ANY)

RULES: Mapping[Operation, Mapping[Who, Rule]] = MappingProxyType(
    {
        Operation.NODE: {Who.JOIN: _BY_KIND, Who.NODE: _BY_KIND, Who.PROVIDER: Rule(Scope.NODES_JOIN)},
        Operation.STATEMENT: {Who.NODE: _BY_KIND},
        Operation.UNITS: {Who.NODE: _BY_KIND},
        Operation.QUERY_MESH: {Who.TRAINER: _READ_MESH, Who.ADMIN: _READ_MESH},
        Operation.SUBMIT_JOB: {Who.TRAINER: _WRITE_JOBS},
        Operation.RECONFIGURE_JOB: {Who.TRAINER: _WRITE_JOBS},
        Operation.TAKE_OVER_JOB: {Who.TRAINER: _WRITE_JOBS},
        Operation.WATCH_JOB: {Who.TRAINER: _READ_JOBS},
        Operation.REPORT_UNITS: {Who.TRAINER: _WRITE_JOBS},
        Operation.REPORT_PROGRESS: {Who.TRAINER: _WRITE_JOBS},
        Operation.LIST_JOBS: {Who.TRAINER: _READ_JOBS, Who.ADMIN: _READ_ALL_JOBS},
        Operation.EXPLAIN_JOB: {Who.TRAINER: _READ_JOBS, Who.ADMIN: _READ_ALL_JOBS},
        Operation.END_JOB: {Who.TRAINER: Rule(Scope.JOBS_END), Who.ADMIN: Rule(Scope.JOBS_END, Reach.ANY)},
        Operation.WHO_AM_I: {Who.PROVIDER: _BY_KIND, Who.TRAINER: _BY_KIND, Who.ADMIN: _BY_KIND},
        Operation.READ_NODES: {
            Who.PROVIDER: Rule(Scope.NODES_READ),
            Who.TRAINER: _READ_MESH,
            Who.ADMIN: _READ_MESH,
        },
        Operation.READ_TOPOLOGY: {Who.TRAINER: _READ_JOBS, Who.ADMIN: _READ_ALL_JOBS},
        Operation.READ_RUN: {Who.TRAINER: _READ_JOBS, Who.ADMIN: _READ_ALL_JOBS},
        Operation.READ_ACCOUNTS: {
            Who.PROVIDER: _READ_ACCOUNT,
            Who.TRAINER: _READ_ACCOUNT,
            Who.ADMIN: _READ_ALL_ACCOUNTS,
        },
        Operation.ADD_ACCOUNT: {Who.ADMIN: _WRITE_ACCOUNTS},
        Operation.CHANGE_ACCOUNT: {Who.ADMIN: _WRITE_ACCOUNTS},
        Operation.READ_KEYS: {
            Who.PROVIDER: _READ_ACCOUNT,
            Who.TRAINER: _READ_ACCOUNT,
            Who.ADMIN: _READ_ALL_ACCOUNTS,
        },
        Operation.CREATE_KEY: {Who.ADMIN: _WRITE_KEYS},
        Operation.ROTATE_KEY: {Who.ADMIN: _WRITE_KEYS},
        Operation.REVOKE_KEY: {Who.PROVIDER: _REVOKE, Who.TRAINER: _REVOKE, Who.ADMIN: _WRITE_KEYS},
        Operation.READ_AUDIT: {Who.ADMIN: Rule(Scope.AUDIT_READ, Reach.ANY)},
        Operation.READ_METRICS: {Who.ADMIN: Rule(Scope.METRICS_READ, Reach.ANY)},
        Operation.READ_TERMS: {Who.PROVIDER: _BY_KIND, Who.TRAINER: _BY_KIND, Who.ADMIN: _BY_KIND},
        Operation.READ_EARNINGS: {Who.PROVIDER: _READ_MONEY, Who.ADMIN: _READ_ALL_MONEY},
        Operation.READ_STATEMENT: {Who.PROVIDER: _READ_MONEY, Who.TRAINER: _READ_MONEY, Who.ADMIN: _READ_ALL_MONEY},
        Operation.READ_COST: {Who.TRAINER: _READ_MONEY, Who.ADMIN: _READ_ALL_MONEY},
        Operation.READ_DEPOSIT: {Who.TRAINER: _READ_MONEY, Who.ADMIN: _READ_ALL_MONEY},
        Operation.ENTER_DEPOSIT: {Who.ADMIN: Rule(Scope.DEPOSITS_WRITE, Reach.ANY)},
        Operation.READ_LEDGER: {Who.ADMIN: _READ_ALL_MONEY},
        Operation.READ_PAYOUTS: {Who.PROVIDER: _READ_MONEY, Who.ADMIN: _READ_ALL_MONEY},
        Operation.MAKE_PAYOUT: {Who.ADMIN: _WRITE_PAYOUTS},
        Operation.END_PAYOUT: {Who.ADMIN: _WRITE_PAYOUTS},
    }
)
"""Whatever is not in the table is refused."""


def scopes_of(who: Who) -> frozenset[Scope]:
    """Every scope that is of use to this kind of caller: what a key has unless it is made with fewer."""
    rules = (by_kind[who] for by_kind in RULES.values() if who in by_kind)
    return frozenset(rule.scope for rule in rules if rule.scope is not None)


def decide(
    who: Who, account: AccountId, scopes: frozenset[Scope], operation: Operation, owner: AccountId | None = None
) -> Decision:
    """Whether `account`, by a caller of this kind and scopes, may do this to an object of `owner`."""
    rule = RULES[operation].get(who)
    if rule is None:
        return Decision.WRONG_KIND
    if rule.scope is not None and rule.scope not in scopes:
        return Decision.NO_SCOPE
    if owner is not None and rule.reach is Reach.OWN and owner != account:
        return Decision.FOREIGN
    return Decision.ALLOWED
