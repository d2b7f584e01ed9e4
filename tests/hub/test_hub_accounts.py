"""Accounts and keys: their form, their life, the throttle and the door's table. Pure."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from access_kit import ALL_KINDS, clerk
from hub_kit import info
from hypothesis import given
from hypothesis import strategies as st

from distensor.comm.keys import KeyKind, decode_key, is_key, new_key, shown_part
from distensor.comm.tokens import Role
from distensor.core.errors import AuthenticationError, ConfigError
from distensor.core.ids import AccountId, NodeId
from distensor.hub import access
from distensor.hub.accounts import Account, Minted, barred_by, ended, main_account, mint_key, new_account, rotated
from distensor.hub.administration import add_account, create_key, revoke_key, rotate_key, set_disabled
from distensor.hub.authorization import RULES, Decision, Operation, Reach, Scope, Who, decide, scopes_of
from distensor.hub.hashing import hash_secret
from distensor.hub.throttle import MOST_HOSTS, Limit, Throttle
from distensor.testing.hub_store import MemoryStore

ME, OTHER = AccountId("me"), AccountId("other")
OPERATOR = clerk()

# The text of a key


@pytest.mark.parametrize(("kind", "prefix"), [("provider", "dt_p_"), ("trainer", "dt_u_"), ("admin", "dt_a_")])
def test_a_key_says_what_it_is_for_and_no_two_are_equal(kind: str, prefix: str) -> None:
    one, two = new_key(KeyKind(kind)), new_key(KeyKind(kind))
    assert one != two
    assert one.startswith(prefix)
    assert len(one) == 5 + 43 + 8
    assert decode_key(one) is KeyKind(kind)
    assert shown_part(one) == one[:12]


@given(st.integers(5, 55), st.characters(codec="ascii"))
def test_a_key_that_was_altered_is_refused_without_being_repeated(place: int, letter: str) -> None:
    key = new_key(KeyKind.TRAINER)
    wrong = key[:place] + letter + key[place + 1 :]
    if wrong != key:
        with pytest.raises(AuthenticationError, match=r"trainer key .* incomplete or altered") as caught:
            decode_key(wrong)
        assert key[12:] not in str(caught.value)


@pytest.mark.parametrize("cut", [5, 6, 30, 55])
def test_a_key_that_was_cut_off_is_told_from_a_wrong_one(cut: int) -> None:
    with pytest.raises(AuthenticationError, match=rf"\({cut} characters\) is incomplete"):
        decode_key(new_key(KeyKind.ADMIN)[:cut])


@pytest.mark.parametrize("text", ["", "dt_x_" + "a" * 51, "dtj_abc", "dt_u", "Bearer dt_u_"])
def test_what_is_no_key_is_no_key(text: str) -> None:
    assert not is_key(text)
    with pytest.raises(AuthenticationError, match="begins with dt_p_, dt_u_ or dt_a_"):
        decode_key(text)


# Accounts and the life of a key


def account(*kinds: KeyKind, name: str = "me") -> Account:
    return new_account(name, frozenset(kinds or ALL_KINDS), 100)


def minted(kind: KeyKind = KeyKind.TRAINER, **more: int) -> Minted:
    return mint_key(account(), kind, 100, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "two words", "-x", "a/b", "x" * 64, "a\n"])
def test_an_account_has_a_name_that_fits_everywhere(name: str) -> None:
    with pytest.raises(ConfigError, match="expected 1 to 63 letters"):
        new_account(name, ALL_KINDS, 0)


def test_an_account_without_a_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="provider, trainer, admin"):
        new_account("me", frozenset(), 0)


def test_the_books_get_the_hash_and_never_the_key() -> None:
    key = minted()
    assert key.record.secret_hash == hash_secret(key.text)
    assert key.text not in repr(key)
    assert key.record.secret_hash not in repr(key)
    assert key.record.shown == key.text[:12]


def test_a_key_has_the_scopes_that_are_of_use_to_its_kind_or_fewer() -> None:
    assert minted().record.scopes == scopes_of(Who.TRAINER)
    fewer = mint_key(account(), KeyKind.TRAINER, 0, scopes=frozenset({Scope.JOBS_READ}))
    assert fewer.record.scopes == {Scope.JOBS_READ}
    with pytest.raises(ConfigError, match="nodes:join is of no use to a trainer key: expected accounts:read, "):
        mint_key(account(), KeyKind.TRAINER, 0, scopes=frozenset({Scope.NODES_JOIN}))
    with pytest.raises(ConfigError, match="without scopes"):
        mint_key(account(), KeyKind.TRAINER, 0, scopes=frozenset())


def test_an_account_has_only_keys_of_its_kinds_and_none_while_disabled() -> None:
    with pytest.raises(ConfigError, match="kind provider, not admin"):
        mint_key(account(KeyKind.PROVIDER), KeyKind.ADMIN, 0)
    with pytest.raises(ConfigError, match="disabled"):
        mint_key(replace(account(), disabled=True), KeyKind.TRAINER, 0)
    with pytest.raises(ConfigError, match="label"):
        mint_key(account(), KeyKind.TRAINER, 0, label="two\nlines")
    assert main_account(0).kinds == {KeyKind.PROVIDER, KeyKind.TRAINER}


def test_a_key_ends_at_its_time() -> None:
    key = minted(expires_at=200).record
    assert ended(key, 199) is None
    assert ended(key, 200) == "has expired"


def test_a_rotated_key_goes_on_for_the_grace_and_hands_its_rights_on() -> None:
    old = mint_key(account(), KeyKind.TRAINER, 100, scopes=frozenset({Scope.JOBS_READ}), label="ci").record
    after, fresh = rotated(old, 1000, 60)
    assert (ended(after, 1059), ended(after, 1060)) == (None, "has expired")
    assert ended(fresh.record, 10**9) is None
    assert (fresh.record.scopes, fresh.record.label, fresh.record.account_id) == (old.scopes, "ci", ME)
    assert fresh.record.family == old.key_id
    assert after.replaced_by == fresh.record.key_id
    with pytest.raises(ConfigError, match=f"replaced by {fresh.record.key_id}"):
        rotated(after, 1001, 60)


def test_a_rotation_never_makes_a_key_live_longer() -> None:
    after, fresh = rotated(minted(expires_at=1010).record, 1000, 60)
    assert after.expires_at == fresh.record.expires_at == 1010.0


def test_what_has_ended_is_not_rotated() -> None:
    with pytest.raises(ConfigError, match="was revoked; make a new one"):
        rotated(replace(minted().record, revoked_at=150), 200, 0)


def test_revoking_the_newest_of_a_row_bars_its_nodes_and_an_older_one_does_not() -> None:
    first = minted(KeyKind.PROVIDER).record
    old, fresh = rotated(first, 200, 60)
    gone = replace(old, revoked_at=300)
    barred = barred_by([account(), replace(account(name="x"), disabled=True)], [gone, fresh.record])
    assert (barred.accounts, barred.keys, barred.families) == ({"x"}, {first.key_id}, frozenset())
    last = replace(fresh.record, revoked_at=300)
    assert barred_by([], [gone, last]).families == {first.key_id}


# Changes


def test_every_change_is_in_the_audit_log_and_raises_the_version() -> None:
    store = MemoryStore()
    versions = []

    def looked() -> None:
        versions.append(books.access_version())

    with store.transaction() as books:
        looked()
        add_account(books, OPERATOR, "me", ALL_KINDS)
        looked()
        key = create_key(books, OPERATOR, "me", KeyKind.PROVIDER, label="rig")
        looked()
        fresh = rotate_key(books, OPERATOR, key.record.key_id, 60)
        looked()
        revoke_key(books, OPERATOR, fresh.record.key_id)
        looked()
        set_disabled(books, OPERATOR, "me", disabled=True)
        looked()
        lines = books.audit(10)
    assert versions == sorted(set(versions))
    actions = ["account disable", "key revoke", "key rotate", "key create", "account add"]
    assert [line.action for line in lines] == actions
    assert [line.number for line in lines] == [5, 4, 3, 2, 1]
    everything = repr(lines)
    assert key.text not in everything
    assert key.record.shown in everything


def test_what_changes_nothing_is_not_written_down() -> None:
    store = MemoryStore()
    with store.transaction() as books:
        add_account(books, OPERATOR, "me", ALL_KINDS)
        key = create_key(books, OPERATOR, "me", KeyKind.TRAINER).record.key_id
        revoke_key(books, OPERATOR, key)
        before = books.audit(10)
        revoke_key(books, OPERATOR, key)
        set_disabled(books, OPERATOR, "me", disabled=False)
        assert books.audit(10) == before


def test_names_that_are_taken_or_unknown_are_refused() -> None:
    with MemoryStore().transaction() as books:
        add_account(books, OPERATOR, "me", ALL_KINDS)
        with pytest.raises(ConfigError, match="an account 'me' already"):
            add_account(books, OPERATOR, "me", ALL_KINDS)
        with pytest.raises(ConfigError, match="no account 'you'"):
            create_key(books, OPERATOR, "you", KeyKind.TRAINER)
        with pytest.raises(ConfigError, match="no key 'k_1'"):
            revoke_key(books, OPERATOR, "k_1")


# Machines that join by a key


def test_what_stands_for_a_machine_that_joined_by_a_key_is_nothing_that_can_be_shown() -> None:
    store = MemoryStore()
    with store.transaction() as books:
        add_account(books, OPERATOR, "me", ALL_KINDS)
        key = create_key(books, OPERATOR, "me", KeyKind.PROVIDER).record
        by = access.JoinKey(secret_hash=key.secret_hash, family=key.family, account=ME)
        joining = access.Joining(info=info("atlas"), host="::1", node_id=NodeId("n_1"), credential="c")
        node = access.admit_by_key(books, by, joining, None)
        assert access.admit_by_key(books, by, replace(joining, node_id=NodeId("n_2")), None).node_id == node.node_id
        shown = hash_secret(f"{key.secret_hash}/atlas/::1")
        with pytest.raises(AuthenticationError, match="does not know this join token"):
            access.find_unspent(books, shown)
    assert store.tables.tokens
    assert all(len(mark) != len(shown) for mark in store.tables.tokens), "every hash could be of something shown"


def test_a_mark_that_an_older_hub_made_is_no_join_token() -> None:
    old = access.token_for("hash/atlas/::1", Role.NODE, "key", ME)
    with MemoryStore().transaction() as books:
        books.save_token(old)
        with pytest.raises(AuthenticationError, match="does not know this join token"):
            access.find_unspent(books, old.secret_hash)


# The throttle


def test_a_host_is_refused_after_so_many_failures_until_they_are_old() -> None:
    throttle = Throttle(Limit(failures=3, seconds=10.0))
    for second in range(3):
        assert throttle.wait("h", second) == 0
        throttle.failed("h", second)
    assert throttle.wait("h", 2) == 8
    assert throttle.wait("other", 2) == 0
    assert throttle.wait("h", 10) == 0
    throttle.failed("h", 10)
    assert throttle.wait("h", 10) == 1


def test_the_throttle_remembers_a_bounded_number_of_hosts() -> None:
    throttle = Throttle(Limit(failures=1, seconds=10))
    for number in range(MOST_HOSTS + 1):
        throttle.failed(str(number), 0)
    assert throttle.wait("0", 0) == 0
    assert throttle.wait("1", 0) > 0


# The table


def test_every_operation_has_a_row_and_every_rule_a_reason() -> None:
    assert set(RULES) == set(Operation)
    assert all(RULES.values())
    used = {rule.scope for row in RULES.values() for rule in row.values() if rule.scope}
    assert used == set(Scope)


EVERY_SCOPE = frozenset(Scope)
SOME_SCOPES = [
    frozenset[Scope](),
    EVERY_SCOPE,
    *(frozenset({one}) for one in Scope),
    *(EVERY_SCOPE - {one} for one in Scope),
]
"""None, all, each alone, and all but each: no rule looks at two."""
CASES = list(itertools.product(Who, Operation, (None, ME, OTHER)))


@pytest.mark.parametrize(("who", "operation", "owner"), CASES, ids=[" ".join(map(str, case)) for case in CASES])
def test_the_answer_follows_from_the_rule_alone(who: Who, operation: Operation, owner: AccountId | None) -> None:
    rule = RULES[operation].get(who)
    for scopes in SOME_SCOPES:
        answer = decide(who, ME, scopes, operation, owner)
        if rule is None:
            assert answer is Decision.WRONG_KIND
        elif rule.scope is not None and rule.scope not in scopes:
            assert answer is Decision.NO_SCOPE
        elif owner == OTHER and rule.reach is Reach.OWN:
            assert answer is Decision.FOREIGN
        else:
            assert answer is Decision.ALLOWED


FOR_ADMINS = {
    Operation.READ_NODES,
    Operation.READ_TOPOLOGY,
    Operation.READ_RUN,
    Operation.READ_ACCOUNTS,
    Operation.ADD_ACCOUNT,
    Operation.CHANGE_ACCOUNT,
    Operation.READ_KEYS,
    Operation.CREATE_KEY,
    Operation.ROTATE_KEY,
    Operation.REVOKE_KEY,
    Operation.READ_AUDIT,
    Operation.READ_METRICS,
    Operation.READ_EARNINGS,
    Operation.READ_STATEMENT,
    Operation.READ_COST,
    Operation.READ_DEPOSIT,
    Operation.ENTER_DEPOSIT,
    Operation.READ_LEDGER,
    Operation.READ_PAYOUTS,
    Operation.MAKE_PAYOUT,
    Operation.END_PAYOUT,
}


def test_only_admins_reach_what_belongs_to_others_and_only_few_things() -> None:
    changing = {(o, w) for o, row in RULES.items() for w, rule in row.items() if rule.reach is Reach.ANY}
    assert changing == {
        (Operation.QUERY_MESH, Who.TRAINER),
        (Operation.QUERY_MESH, Who.ADMIN),
        (Operation.LIST_JOBS, Who.ADMIN),
        (Operation.EXPLAIN_JOB, Who.ADMIN),
        (Operation.END_JOB, Who.ADMIN),
        (Operation.READ_NODES, Who.TRAINER),
        *((operation, Who.ADMIN) for operation in FOR_ADMINS),
    }
    assert scopes_of(Who.NODE) == scopes_of(Who.JOIN) == frozenset()
