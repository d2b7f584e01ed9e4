"""Money in any order, twice, late and lost: the sum is 0, each unit is credited once, nobody falls below nothing."""

from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from distensor.core.control import UnitKey
from distensor.core.errors import LedgerError
from distensor.core.ids import Epoch, JobId, Rank
from distensor.hub.ledger import accounts
from distensor.hub.ledger.accounts import Ledger, Policy, quote
from distensor.hub.ledger.payouts import ManualAdapter, Payout, PayoutState, advance
from distensor.hub.ledger.statements import By, lines, to_csv, to_json
from distensor.hub.ledger.transfers import MAY_BE_NEGATIVE, OUTSIDE, PLATFORM, Kind, Transfer, post
from distensor.testing.hub_ledger import MemoryLedger

JOBS, NODES, TRAINERS = ("j_1", "j_2"), ("n_a", "n_b"), {"j_1": "ann", "j_2": "bob"}
WINDOW = 100
HOUR = 3600


def key(job: str = "j_1", step: int = 0, rank: int = 0) -> UnitKey:
    return UnitKey(job_id=JobId(job), epoch=Epoch(1), step=step, rank=Rank(rank))


def ledger(*, deposits: bool = True, fee: int = 100) -> Ledger:
    policy = Policy(deposits=deposits, fee_per_mille=fee, challenge_seconds=WINDOW, micro_per_micro_batch=1001)
    return Ledger(books=MemoryLedger(), policy=policy)


def balances(one: Ledger) -> dict[str, int]:
    assert isinstance(one.books, MemoryLedger)
    return {account: amount for account, amount in one.books.balances.items() if amount}


def test_from_deposit_to_paid() -> None:
    one = ledger(fee=125)
    one.deposit("ann", 10_000, receipt="bank-1", at=0)
    price = quote(one.policy, steps=2, ranks=1, micro_batches=3)
    assert (price.total, price.fee, price.work) == (6006, 750, 5256)  # 375.375 of each unit, rounded down
    one.begin_job("j_1", "ann", price.total, at=0)
    assert balances(one) == {OUTSIDE: -10_000, "deposit:ann": 3994, "escrow:j_1": 6006}
    one.credit(key(), "ann", "n_a", 3003, at=10)
    assert balances(one)["pending:n_a"] == 2628
    assert balances(one)["fees:n_a"] == 375
    assert one.mature(at=HOUR + WINDOW - 1) == ()
    assert [transfer.legs for transfer in one.mature(at=HOUR + WINDOW)] == [
        (("payable:n_a", 2628), ("pending:n_a", -2628))
    ]
    assert one.mature(at=HOUR + WINDOW) == ()
    one.end_job("j_1", at=200)
    said: dict[str, PayoutState] = {}
    adapter = ManualAdapter(said.get)
    payout = Payout(payout_id="p1", node_id="n_a", micro=2628)
    assert advance(one, adapter, payout, at=300) is PayoutState.SENT
    said["p1"] = PayoutState.PAID
    assert [advance(one, adapter, payout, at=301) for _ in range(3)] == [PayoutState.PAID] * 3
    assert balances(one) == {OUTSIDE: -10_000 + 2628, "deposit:ann": 6997, "fees:n_a": 375}


def test_without_deposits_the_platform_lends_and_gets_it_back_first() -> None:
    one = ledger(deposits=False, fee=0)
    one.deposit("ann", 1000, receipt="r", at=0)
    one.begin_job("j_1", "ann", 5000, at=0)
    one.credit(key(), "ann", "n_a", 500, at=0)
    one.end_job("j_1", at=1)
    assert balances(one) == {OUTSIDE: -1000, "pending:n_a": 500, "deposit:ann": 500}


def test_with_deposits_a_job_that_is_not_covered_does_not_begin() -> None:
    one = ledger()
    one.deposit("ann", 999, receipt="r", at=0)
    with pytest.raises(LedgerError, match="deposit:ann has 999 micro-credits, 1000 are needed"):
        one.begin_job("j_1", "ann", 1000, at=0)
    assert balances(one) == {OUTSIDE: -999, "deposit:ann": 999}


def test_work_beyond_the_quote_is_the_trainers_then_the_platforms_and_never_the_providers() -> None:
    one = ledger(fee=0)
    one.deposit("ann", 150, receipt="r", at=0)
    one.begin_job("j_1", "ann", 100, at=0)
    one.credit(key(), "ann", "n_a", 200, at=0)
    assert balances(one) == {OUTSIDE: -150, PLATFORM: -50, "pending:n_a": 200}


def test_a_unit_that_a_spot_check_found_wrong_goes_back_with_its_fee() -> None:
    one = ledger(fee=100)
    one.deposit("ann", 1000, receipt="r", at=0)
    one.begin_job("j_1", "ann", 1000, at=0)
    one.credit(key(), "ann", "n_a", 1000, at=0)
    one.hold(key(), "n_a", at=1)
    assert one.mature(at=HOUR + WINDOW) == ()
    one.decide(key(), "ann", "n_a", good=False, at=2)
    with pytest.raises(LedgerError, match="already"):
        one.decide(key(), "ann", "n_a", good=True, at=3)
    assert one.mature(at=2 * HOUR + WINDOW) == ()
    assert balances(one) == {OUTSIDE: -1000, "deposit:ann": 1000}


@pytest.mark.parametrize("late", [True, False])
def test_a_held_unit_that_was_good_is_where_it_would_be_without_the_check(late: bool) -> None:
    one = ledger(fee=0, deposits=False)
    for step in range(2):
        one.credit(key(step=step), "ann", "n_a", 500, at=0)
    one.hold(key(), "n_a", at=1)
    if late:
        one.mature(at=HOUR + WINDOW)
    one.decide(key(), "ann", "n_a", good=True, at=2)
    one.mature(at=HOUR + WINDOW)
    one.decide(key(), "ann", "n_a", good=True, at=3)  # again, when it would go elsewhere: the same decision
    assert balances(one) == {PLATFORM: -1000, "payable:n_a": 1000}
    with pytest.raises(LedgerError, match="payable already"):
        one.hold(key(step=1), "n_a", at=4)


def test_a_unit_that_is_credited_when_the_clock_went_back_becomes_payable_all_the_same() -> None:
    one = ledger(fee=0, deposits=False)
    one.credit(key(), "ann", "n_a", 500, at=10 * HOUR)
    one.mature(at=11 * HOUR + WINDOW)
    one.credit(key(step=1), "ann", "n_a", 500, at=0)
    one.mature(at=12 * HOUR + WINDOW)
    assert balances(one) == {PLATFORM: -1000, "payable:n_a": 1000}


def test_what_is_kept_for_open_units_goes_back_later_and_the_loan_first() -> None:
    one = ledger(fee=0, deposits=False)
    one.deposit("ann", 300, receipt="r", at=0)
    one.begin_job("j_1", "ann", 1000, at=0)
    one.end_job("j_1", at=1, keep=400)
    assert balances(one) == {OUTSIDE: -300, PLATFORM: -100, "escrow:j_1": 400}
    one.credit(key(), "ann", "n_a", 250, at=2)
    one.close_job("j_1", at=3)
    assert one.close_job("j_1", at=4) == one.books.find_transfer("refund-rest/j_1")
    assert balances(one) == {OUTSIDE: -300, "deposit:ann": 50, "pending:n_a": 250}


def test_a_payout_that_failed_is_payable_again_and_cannot_be_paid_later() -> None:
    one = ledger(fee=0, deposits=False)
    one.credit(key(), "ann", "n_a", 70, at=0)
    one.mature(at=HOUR + WINDOW)
    one.begin_payout("p", "n_a", 50, at=WINDOW)
    with pytest.raises(LedgerError, match="payable:n_a has 20 micro-credits, 21 are needed"):
        one.begin_payout("q", "n_a", 21, at=WINDOW)
    one.end_payout("p", paid=False, at=WINDOW)
    with pytest.raises(LedgerError, match="already"):
        one.end_payout("p", paid=True, at=WINDOW)
    assert balances(one) == {PLATFORM: -70, "payable:n_a": 70}


@pytest.mark.parametrize(
    ("legs", "words"),
    [
        ((("a", 1), ("b", -2)), "sum to -1"),
        ((("a", 0),), "whole number"),
        ((("a", 1), ("a", -1)), "twice"),
        ((("a", 0.5), ("b", -0.5)), "whole number"),
        ((("a", True), ("b", -1)), "whole number"),
    ],
)
def test_a_transfer_that_is_none_cannot_be_made(legs: tuple[tuple[str, int], ...], words: str) -> None:
    with pytest.raises(LedgerError, match=words):
        Transfer(key="k", kind=Kind.DEPOSIT, legs=legs, at=0)


@pytest.mark.parametrize("fee", [-1, 1000])
def test_a_policy_that_cannot_be_is_refused(fee: int) -> None:
    with pytest.raises(LedgerError, match="expected 0 to 999"):
        Policy(fee_per_mille=fee)


def test_statements_sum_to_the_balance_and_are_the_same_in_both_forms() -> None:
    one = ledger(deposits=False, fee=10)
    for step in range(6):
        one.credit(key(step=step), "ann", "n_a", 1000 + step, at=step * accounts.DAY // 2, device=f"gpu{step % 2}")
    assert isinstance(one.books, MemoryLedger)
    all_of_them = one.books.transfers.values()
    for by, groups in ((By.DAY, 3), (By.JOB, 1), (By.DEVICE, 2)):
        found = lines(all_of_them, ["pending:n_a"], by)
        assert by is not By.DAY or [line.group for line in found] == ["1970-01-01", "1970-01-02", "1970-01-03"]
        assert len(found) == groups
        assert sum(line.micro for line in found) == balances(one)["pending:n_a"]
        table = list(csv.DictReader(io.StringIO(to_csv(found))))
        assert [int(row["micro"]) for row in table] == [row["micro"] for row in json.loads(to_json(found))]
    one.credit(key(job="=1+1"), "ann", "n_a", 5, at=0)
    assert "\npending:n_a,'=1+1,unit" in to_csv(lines(all_of_them, ["pending:n_a"], By.JOB))


STEPS, RANKS = st.integers(0, 3), st.integers(0, 1)
SMALL = st.integers(1, 3000)


class AnyOrder(RuleBasedStateMachine):
    """Every operation, whenever and however often; what the books refuse must leave them as they were."""

    def __init__(self) -> None:
        super().__init__()
        self.deposits = False
        self.books = MemoryLedger()
        self.first: dict[str, Transfer] = {}
        self.now = 4 * HOUR

    @property
    def ledger(self) -> Ledger:
        policy = Policy(deposits=self.deposits, fee_per_mille=123, challenge_seconds=WINDOW)
        return Ledger(books=self.books, policy=policy)

    def attempt(self, operation: str, *words: object, **more: object) -> None:
        before = dict(self.books.balances)
        known = set(self.books.transfers)
        try:
            done = getattr(self.ledger, operation)(*words, at=self.now, **more)
        except LedgerError:
            assert dict(self.books.balances) == before
            return
        if done is not None:
            assert self.first.setdefault(done.key, done) is done, "a key has two transfers"
            assert self.books.transfers.keys() - known <= {done.key}

    @rule(demand=st.booleans())
    def policy_changes(self, demand: bool) -> None:
        self.deposits = demand

    @rule(seconds=st.sampled_from([1, HOUR, -HOUR]))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    @rule(who=st.sampled_from(["ann", "bob"]), amount=SMALL, receipt=st.integers(0, 4))
    def deposit(self, who: str, amount: int, receipt: int) -> None:
        self.attempt("deposit", who, amount, receipt=str(receipt))

    @rule(job=st.sampled_from(JOBS), total=SMALL)
    def begin(self, job: str, total: int) -> None:
        self.attempt("begin_job", job, TRAINERS[job], total)

    @rule(job=st.sampled_from(JOBS), keep=st.sampled_from([0, 700]))
    def end(self, job: str, keep: int) -> None:
        self.attempt("end_job", job, keep=keep)

    @rule(job=st.sampled_from(JOBS), step=STEPS, rank=RANKS, amount=SMALL)
    def credit(self, job: str, step: int, rank: int, amount: int) -> None:
        self.attempt("credit", key(job, step, rank), TRAINERS[job], NODES[rank], amount)

    @rule(job=st.sampled_from(JOBS))
    def close(self, job: str) -> None:
        self.attempt("close_job", job)

    @rule()
    def mature(self) -> None:
        again = self.ledger.mature(at=self.now)
        assert {transfer.key for transfer in again} <= self.books.transfers.keys()
        assert self.ledger.mature(at=self.now) == ()

    @rule(job=st.sampled_from(JOBS), step=STEPS, rank=RANKS, node=st.sampled_from(NODES))
    def hold(self, job: str, step: int, rank: int, node: str) -> None:
        self.attempt("hold", key(job, step, rank), node)

    @rule(job=st.sampled_from(JOBS), step=STEPS, rank=RANKS, good=st.booleans())
    def decide(self, job: str, step: int, rank: int, good: bool) -> None:
        self.attempt("decide", key(job, step, rank), TRAINERS[job], NODES[rank], good=good)

    @rule(number=st.integers(0, 3), node=st.sampled_from(NODES), amount=SMALL)
    def pay(self, number: int, node: str, amount: int) -> None:
        self.attempt("begin_payout", str(number), node, amount)

    @rule(number=st.integers(0, 3), paid=st.booleans())
    def answer(self, number: int, paid: bool) -> None:
        self.attempt("end_payout", str(number), paid=paid)

    @invariant()
    def sums_hold(self) -> None:
        assert sum(self.books.balances.values()) == 0
        for account, amount in self.books.balances.items():
            assert type(amount) is int
            assert amount >= 0 or account in MAY_BE_NEGATIVE, account

    @invariant()
    def balances_are_those_of_the_transfers(self) -> None:
        again = MemoryLedger()
        for transfer in self.books.transfers.values():
            again.enter_transfers([transfer])
        assert again.balances == self.books.balances

    @invariant()
    def a_provider_has_what_its_units_brought(self) -> None:
        """Credited less voided is what is pending, held, payable, in clearing, or paid: each unit at most once."""
        of = self.books.transfers.values()
        voided = sum(-amount for one in of if one.kind is Kind.VOID for who, amount in one.legs if who[:5] == "held:")
        brought = sum(
            amount for one in of if one.kind is Kind.UNIT for who, amount in one.legs if who[:8] == "pending:"
        )
        paid = sum(amount for one in of if one.kind is Kind.PAID for who, amount in one.legs if who == OUTSIDE)
        there = sum(
            amount
            for account, amount in self.books.balances.items()
            if account.partition(":")[0] in ("pending", "held", "payable", "clearing")
        )
        assert brought == voided + there + paid


AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def test_the_machine_finds_a_planted_fault() -> None:
    """A ledger that forgets that a unit was credited is caught by the sums of the provider."""
    one = ledger(deposits=False)
    one.credit(key(), "ann", "n_a", 1000, at=0)
    machine = AnyOrder()
    machine.books = one.books  # type: ignore[assignment]
    machine.a_provider_has_what_its_units_brought()
    machine.books.balances["pending:n_a"] += 900
    with pytest.raises(AssertionError):
        machine.a_provider_has_what_its_units_brought()
    with pytest.raises(AssertionError):
        machine.sums_hold()


def test_posting_again_is_the_same_transfer_and_another_one_is_refused() -> None:
    books = MemoryLedger()
    first = Transfer(key="k", kind=Kind.DEPOSIT, legs=((OUTSIDE, -5), ("deposit:ann", 5)), at=1)
    later = Transfer(key="k", kind=Kind.DEPOSIT, legs=first.legs, at=2)
    other = Transfer(key="k", kind=Kind.DEPOSIT, legs=((OUTSIDE, -6), ("deposit:ann", 6)), at=1)
    assert post(books, first) is first
    assert post(books, later) is first
    with pytest.raises(LedgerError, match="already"):
        post(books, other)
    assert books.balance("deposit:ann") == 5
