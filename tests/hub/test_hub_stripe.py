"""Transfers at a service that loses, repeats and breaks things: a payout is paid at most once, and the books agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from distensor.core.control import UnitKey
from distensor.core.errors import ConfigError, LedgerError, PayoutError, StoreError
from distensor.core.ids import Epoch, JobId, Rank
from distensor.hub.ledger.accounts import Ledger, Policy, clearing
from distensor.hub.ledger.payouts import Payout, PayoutState
from distensor.hub.ledger.transfers import OUTSIDE
from distensor.hub.payouts.driving import PayoutDesk
from distensor.hub.payouts.http_api import HttpApi, UnansweredError
from distensor.hub.payouts.rate import Rate
from distensor.hub.payouts.secret import Secret, find_secret
from distensor.hub.payouts.stripe import API_VERSION, QUIET_SECONDS, StripeAdapter
from distensor.hub.payouts.webhooks import Event, WebhookRefusedError, Webhooks
from distensor.testing.clock import FakeClock
from distensor.testing.fake_stripe import KEY_SECONDS, Delivery, FakeStripe, Mishap
from distensor.testing.hub_ledger import MemoryLedger

T = TypeVar("T")
RATE = Rate(currency="eur", micro_per_minor=10_000, least_minor=1)
ACCOUNTS = {"n_a": "acct_a", "n_b": "acct_b"}
SOON = 900.0
"""What is on its way longer than that has come: less than the adapter's `quiet_seconds`."""


class Impatient(FakeClock):
    """Whoever sleeps finds the time gone by."""

    def sleep(self, seconds: float) -> None:
        self.advance(seconds)


def adapter(stripe: FakeStripe, clock: FakeClock, *, attempts: int = 4) -> StripeAdapter:
    api = HttpApi(stripe.base, Secret(stripe.secret), clock, version=API_VERSION, seconds=5.0)
    return StripeAdapter(api, RATE, ACCOUNTS.get, clock, attempts=attempts, uniform=lambda: 0.5)


def funded(micro: int = 10_000_000) -> Ledger:
    """Both nodes have so much that can be paid out."""
    ledger = Ledger(books=MemoryLedger(), policy=Policy(challenge_seconds=0))
    for rank, node in enumerate(sorted(ACCOUNTS)):
        key = UnitKey(job_id=JobId("j_1"), epoch=Epoch(1), step=0, rank=Rank(rank))
        ledger.credit(key, "ann", node, micro, at=0)
    ledger.mature(at=2 * 3600)
    return ledger


def order(payout_id: str = "p1", node: str = "n_a", minor: int = 7) -> Payout:
    return Payout(payout_id=payout_id, node_id=node, micro=minor * RATE.micro_per_minor)


@pytest.fixture
def clock() -> FakeClock:
    return Impatient()


@pytest.fixture
def stripe(clock: FakeClock) -> Iterator[FakeStripe]:
    with FakeStripe(clock=clock, enabled=set(ACCOUNTS.values())) as fake:
        yield fake


def test_a_payout_is_a_transfer_under_its_own_key(stripe: FakeStripe, clock: FakeClock) -> None:
    pays = adapter(stripe, clock)
    assert pays.ask("p1") is PayoutState.SENT
    assert [pays.send(order()) for _ in range(3)] == [PayoutState.PAID] * 3
    (made,) = stripe.transfers
    assert (made["amount"], made["currency"], made["destination"]) == (7, "eur", "acct_a")
    assert (made["transfer_group"], made["metadata"]) == ("p1", {"payout": "p1", "node": "n_a"})
    assert [key for method, key in stripe.requests if method == "POST"] == ["p1"]
    assert pays.ask("p1") is PayoutState.PAID
    assert pays.why("p1") == ""


@pytest.mark.parametrize("mishap", Mishap)
def test_whatever_becomes_of_the_first_request_the_payout_is_paid_once(
    mishap: Mishap, stripe: FakeStripe, clock: FakeClock
) -> None:
    pays = adapter(stripe, clock)
    stripe.mishaps.extend([Mishap.NONE, mishap])  # the look before it, and the order itself
    pays.send(order())
    stripe.arrive()
    state = pays.send(order())
    if mishap is Mishap.BROKEN_BEFORE:  # Stripe repeats its error for a day, whoever asks
        assert state is PayoutState.SENT
        assert pays.why("p1") == "Stripe: the transfer: status 500 (api_error)"
        clock.advance(KEY_SECONDS + 1)
        state = pays.send(order())
    assert state is PayoutState.PAID
    assert len(stripe.paid("p1")) == 1


def test_attempts_wait_longer_each_time_and_as_long_as_they_are_told(stripe: FakeStripe, clock: FakeClock) -> None:
    pays, began = adapter(stripe, clock), clock.monotonic()
    stripe.mishaps.extend([Mishap.BUSY, Mishap.BROKEN_AFTER, Mishap.BUSY, Mishap.BUSY])
    assert pays.send(order()) is PayoutState.SENT
    assert clock.monotonic() - began == pytest.approx(2 + 0.75 + 2)  # Retry-After, own waiting time, Retry-After
    assert (len(stripe.requests), stripe.transfers) == (4, [])
    assert pays.why("p1") == "Stripe: the list of transfers: status 429 (rate_limit_error, rate_limit)"


def test_an_account_that_is_not_enabled_fails_once_nothing_can_be_on_its_way(
    stripe: FakeStripe, clock: FakeClock
) -> None:
    pays = adapter(stripe, clock)
    stripe.enabled.clear()
    assert pays.send(order()) is PayoutState.SENT  # an earlier process may have sent something
    assert "insufficient_capabilities_for_transfer" in pays.why("p1")
    clock.advance(QUIET_SECONDS)
    assert pays.send(order()) is PayoutState.FAILED
    assert pays.send(order("p2", "n_nobody")) is PayoutState.FAILED
    assert pays.why("p2") == "node n_nobody has no connected account"
    assert stripe.transfers == []


def test_a_refusal_after_an_order_that_is_still_on_its_way_is_no_failure(stripe: FakeStripe, clock: FakeClock) -> None:
    pays = adapter(stripe, clock, attempts=1)
    clock.advance(QUIET_SECONDS)
    stripe.mishaps.extend([Mishap.NONE, Mishap.LATE])
    assert pays.send(order()) is PayoutState.SENT
    stripe.enabled.clear()
    assert pays.send(order()) is PayoutState.SENT  # refused, and yet
    stripe.enabled.add("acct_a")
    stripe.arrive()
    stripe.enabled.clear()
    assert pays.send(order()) is PayoutState.PAID


def test_a_platform_without_money_fails_and_the_next_payout_is_another_order(
    stripe: FakeStripe, clock: FakeClock
) -> None:
    pays, ledger = adapter(stripe, clock), funded()
    desk = PayoutDesk(lambda run: run(ledger), pays)
    stripe.balance = 3
    clock.advance(QUIET_SECONDS)
    assert desk.lead(order("p1"), at=1) is PayoutState.FAILED
    stripe.balance = 100
    assert desk.lead(order("p1"), at=2) is PayoutState.FAILED  # entered for good
    assert desk.lead(order("p2"), at=3) is PayoutState.PAID
    assert (ledger.books.balance("payable:n_a"), ledger.books.balance(OUTSIDE)) == (10_000_000 - 70_000, 70_000)


def test_our_own_key_is_nobodys_failure_and_is_shown_nowhere(stripe: FakeStripe, clock: FakeClock) -> None:
    secret = Secret("sk_live_wrong")
    api = HttpApi(stripe.base, secret, clock)
    pays = StripeAdapter(api, RATE, ACCOUNTS.get, clock, uniform=lambda: 0.5)
    clock.advance(2 * QUIET_SECONDS)
    assert pays.send(order()) is PayoutState.SENT
    assert pays.why("p1") == "Stripe: the list of transfers: status 401 (invalid_request_error)"
    assert "sk_live" not in f"{secret!r} {secret} {vars(api)} {vars(pays)}"


def test_a_service_that_is_not_there_leaves_the_payout_as_it_is(clock: FakeClock) -> None:
    with FakeStripe(clock=clock) as gone:
        pass
    api = HttpApi(gone.base, Secret("sk_x"), clock, seconds=5.0)
    with pytest.raises(UnansweredError, match=r"GET /v1/transfers at 127.0.0.1: no answer \(ConnectionRefusedError\)"):
        api.call("GET", "/v1/transfers", {})
    pays = StripeAdapter(api, RATE, ACCOUNTS.get, clock)
    clock.advance(QUIET_SECONDS)
    assert (pays.send(order()), pays.ask("p1")) == (PayoutState.SENT, PayoutState.SENT)


def test_another_payment_under_the_same_id_is_an_error_and_moves_nothing(stripe: FakeStripe, clock: FakeClock) -> None:
    pays = adapter(stripe, clock)
    pays.send(order())
    with pytest.raises(PayoutError, match=r"payout p1 of 8 eur .* to acct_a is transfer tr_1 of 7 eur to acct_a"):
        pays.send(order(minor=8))
    with pytest.raises(PayoutError, match="to acct_b is transfer tr_1"):
        pays.send(order(node="n_b"))
    stripe.transfers.append({**stripe.transfers[0], "id": "tr_2"})  # somebody paid by hand as well
    with pytest.raises(PayoutError, match=r"has 2 transfers at Stripe \(tr_1, tr_2\)"):
        pays.ask("p1")


def test_a_transfer_that_was_reversed_before_anybody_looked_is_a_failure(stripe: FakeStripe, clock: FakeClock) -> None:
    pays = adapter(stripe, clock, attempts=1)
    stripe.mishaps.extend([Mishap.NONE, Mishap.LOST_ANSWER])
    assert pays.send(order()) is PayoutState.SENT
    stripe.reverse("p1")
    assert pays.send(order()) is PayoutState.FAILED


@pytest.mark.parametrize("payout_id", ["", "a b", "x" * 201, "p\r\nAuthorization: x", "ä"])
def test_an_id_that_cannot_be_a_header_is_refused(payout_id: str, stripe: FakeStripe, clock: FakeClock) -> None:
    with pytest.raises(LedgerError, match="expected 1 to 200"):
        adapter(stripe, clock).send(order(payout_id))
    assert stripe.requests == []


def test_amounts_are_whole_units_of_money_and_the_rest_stays() -> None:
    rate = Rate(currency="eur", micro_per_minor=10_000, least_minor=100)
    assert [rate.payable_part(micro) for micro in (0, 999_999, 1_000_000, 1_009_999)] == [0, 0, 1_000_000, 1_000_000]
    assert rate.payable_part(10**15) == 99_999_999 * 10_000
    assert rate.minor(1_010_000) == 101
    for micro in (1_010_001, 0, -10_000, 10**12):
        with pytest.raises(LedgerError, match="is no amount in eur"):
            rate.minor(micro)
    for currency, per, least in (("EUR", 1, 1), ("eu", 1, 1), ("eur", 0, 1), ("eur", 1, 0), ("eur", True, 1)):
        with pytest.raises(ConfigError):
            Rate(currency=currency, micro_per_minor=per, least_minor=least)


@pytest.mark.parametrize("base", ["http://api.stripe.com", "ftp://x", "https://", "https://x/v1", "stripe"])
def test_the_key_goes_nowhere_in_the_clear(base: str, clock: FakeClock) -> None:
    with pytest.raises(ConfigError, match="payment service"):
        HttpApi(base, Secret("sk_x"), clock)


def test_a_key_comes_from_a_private_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("sk_file\n")
    file.chmod(0o640)
    with pytest.raises(StoreError, match="has mode 0640; expected 0600"):
        find_secret("V", {}, file)
    file.chmod(0o600)
    assert find_secret("V", {"V": "sk_environment"}, file).reveal() == "sk_file"
    assert find_secret("V", {"V": "sk_environment"}, None).reveal() == "sk_environment"
    for text in ("", "two words", "sk_\x00", "schlüssel"):
        with pytest.raises(ConfigError) as caught:
            find_secret("V", {"V": text}, None)
        assert not text or text not in str(caught.value)
    file.write_bytes(b"\xff")
    with pytest.raises(StoreError, match="UTF-8"):
        find_secret("V", {}, file)
    with pytest.raises(StoreError, match="No such file"):
        find_secret("V", {}, tmp_path / "none")


def refused(webhooks: Webhooks, payload: bytes, header: str) -> str:
    with pytest.raises(WebhookRefusedError) as caught:
        webhooks.read_event(payload, header)
    return str(caught.value)


def test_an_event_counts_once_and_only_with_the_right_signature_and_time(stripe: FakeStripe, clock: FakeClock) -> None:
    old = Secret("whsec_old")
    webhooks = Webhooks([old, stripe.webhook_secret], clock)
    adapter(stripe, clock).send(order())
    (one,) = stripe.deliveries
    assert "not made with the secret" in refused(webhooks, one.payload + b" ", one.header)
    assert "not made with the secret" in refused(webhooks, *_parts(stripe.signed(one.payload, Secret("whsec_other"))))
    later = one.header.replace(f"t={int(clock.now())}", f"t={int(clock.now()) + 1}")
    assert "not made with the secret" in refused(webhooks, one.payload, later)
    for header in ("", "t=1", "v1=00", "t=x,v1=00", "t=1,t=2,v1=00", "t=1," + "v1=00," * 17, "t=1,v1=ü"):
        assert "Stripe-Signature has" in refused(webhooks, one.payload, header)
    event = webhooks.read_event(one.payload, one.header)
    assert event == Event(event_id="evt_1", kind="transfer.created", payout_id="p1")
    assert webhooks.read_event(one.payload, one.header) is None
    webhooks.forget(event)
    assert webhooks.read_event(*_parts(stripe.signed(one.payload, old))) == event
    clock.advance(301)
    assert "more than 300 s ago" in refused(webhooks, one.payload, one.header)
    assert webhooks.read_event(*_parts(stripe.signed(one.payload))) is None  # Stripe signs anew when it sends again
    clock.jump_wall(-302)
    assert "in the future" in refused(webhooks, *_parts(_at(stripe, one.payload, clock.now() + 301)))


@pytest.mark.parametrize(
    ("payload", "payout_id"),
    [
        (b'{"id": "e", "type": "transfer.created", "data": {"object": {"transfer_group": "p9"}}}', "p9"),
        (b'{"id": "e", "type": "payout.paid", "data": {"object": {"transfer_group": "p9"}}}', None),
        (b'{"id": "e", "type": "transfer.created", "data": {"object": {"transfer_group": null}}}', None),
        (b'{"id": "e", "type": "transfer.created", "data": []}', None),
    ],
)
def test_an_event_names_its_payout_or_none(
    payload: bytes, payout_id: str | None, stripe: FakeStripe, clock: FakeClock
) -> None:
    event = Webhooks([stripe.webhook_secret], clock).read_event(*_parts(stripe.signed(payload)))
    assert event is not None
    assert event.payout_id == payout_id


@pytest.mark.parametrize("payload", [b"", b"[]", b"{}", b'{"id": 1, "type": "x"}', b"[" * 100_000, b" " * (2 << 20)])
def test_what_is_no_event_is_refused(payload: bytes, stripe: FakeStripe, clock: FakeClock) -> None:
    refused(Webhooks([stripe.webhook_secret], clock), *_parts(stripe.signed(payload)))


def _parts(delivery: Delivery) -> tuple[bytes, str]:
    return delivery.payload, delivery.header


def _at(stripe: FakeStripe, payload: bytes, now: float) -> Delivery:
    clock, stripe.clock = stripe.clock, FakeClock(now=now)
    delivery, stripe.clock = stripe.signed(payload), clock
    return delivery


class KilledError(Exception):
    """The hub ends here."""


ORDERS = [order(f"p{number}", node, minor) for number, (node, minor) in enumerate([("n_a", 5), ("n_b", 9), ("n_a", 1)])]


class Payouts(RuleBasedStateMachine):
    """A hub that is killed anywhere, a service that fails anywhere, events that come or do not."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Impatient()
        self.stripe = FakeStripe(clock=self.clock, enabled=set(ACCOUNTS.values()))
        self.stripe.__enter__()
        self.ledger = funded()
        self.killed_at = 0
        self.start_again()

    def teardown(self) -> None:
        try:
            self.calm()
        finally:
            self.stripe.__exit__(None, None, None)

    def enter(self, run: Callable[[Ledger], T]) -> T:
        """A commit that does not come to be, where the rule said so."""
        self.killed_at -= 1
        if self.killed_at == 0:
            raise KilledError
        return run(self.ledger)

    @rule()
    def start_again(self) -> None:
        self.desk = PayoutDesk(self.enter, adapter(self.stripe, self.clock, attempts=2))
        self.webhooks = Webhooks([self.stripe.webhook_secret], self.clock)

    @rule(
        which=st.sampled_from(ORDERS),
        mishaps=st.lists(st.sampled_from(Mishap), max_size=4),
        killed_at=st.integers(0, 3),
    )
    def lead(self, which: Payout, mishaps: list[Mishap], killed_at: int) -> None:
        self.stripe.mishaps.extend(mishaps)
        self.killed_at = killed_at
        try:
            self.desk.lead(which, at=int(self.clock.now()))
        except KilledError:
            self.start_again()
        self.killed_at = 0
        self.stripe.mishaps.clear()

    @rule()
    def arrive(self) -> None:
        self.stripe.arrive()

    @rule(seconds=st.sampled_from([SOON, QUIET_SECONDS, KEY_SECONDS + 1]))
    def wait(self, seconds: float) -> None:
        self.stripe.arrive()
        self.clock.advance(seconds)

    @rule(account=st.sampled_from(sorted(ACCOUNTS.values())))
    def enable_or_disable(self, account: str) -> None:
        self.stripe.enabled ^= {account}

    @rule(balance=st.sampled_from([0, 5, 1000]))
    def fill(self, balance: int) -> None:
        self.stripe.balance = balance

    @precondition(lambda self: self.stripe.deliveries)
    @rule(number=st.integers(0, 20), again=st.booleans(), mishap=st.sampled_from(Mishap))
    def deliver(self, number: int, again: bool, mishap: Mishap) -> None:
        """In any order; once more; and one that is not Stripe's."""
        one = self.stripe.deliveries[number % len(self.stripe.deliveries)]
        refused(self.webhooks, *_parts(self.stripe.signed(one.payload, Secret("whsec_forged"))))
        for _ in range(1 + again):
            event = self.webhooks.read_event(*_parts(self.stripe.signed(one.payload)))
            if event is not None and event.payout_id is not None:
                self.stripe.mishaps.append(mishap)
                self.desk.hear(event.payout_id, at=int(self.clock.now()))
                self.stripe.mishaps.clear()

    @invariant()
    def each_payout_is_one_transfer_at_most_and_the_books_say_what_is_so(self) -> None:
        books = self.ledger.books
        assert isinstance(books, MemoryLedger)
        assert sum(books.balances.values()) == 0
        for one in ORDERS:
            made = len(self.stripe.paid(one.payout_id))
            ended = books.find_transfer(f"payout-end/{one.payout_id}")
            assert made <= 1
            if ended is not None:
                assert made == (ended.kind.value == "paid"), one

    def calm(self) -> None:
        """No more faults: everything that was begun ends, and nothing is left on its way."""
        self.stripe.arrive()
        self.stripe.enabled |= set(ACCOUNTS.values())
        self.stripe.balance = 10_000
        self.start_again()
        self.clock.advance(KEY_SECONDS + QUIET_SECONDS)
        for one in ORDERS:
            assert self.desk.lead(one, at=int(self.clock.now())) is not PayoutState.SENT, one
        self.each_payout_is_one_transfer_at_most_and_the_books_say_what_is_so()
        books = self.ledger.books
        assert [books.balance(clearing(one.payout_id)) for one in ORDERS] == [0, 0, 0]
        paid = sum(made["amount"] for made in self.stripe.transfers) * RATE.micro_per_minor
        assert books.balance(OUTSIDE) == paid


TestPayouts = Payouts.TestCase
TestPayouts.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


class LongPayouts(Payouts):
    pass


TestLongPayouts = pytest.mark.slow(LongPayouts.TestCase)
TestLongPayouts.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


class Trusting(StripeAdapter):
    """One that relies on the keys alone, which are forgotten after a day."""

    def _find(self, payout_id: str) -> None:
        return None


class TrustingPayouts(Payouts):
    @rule()
    def start_again(self) -> None:
        api = HttpApi(self.stripe.base, Secret(self.stripe.secret), self.clock)
        trusting = Trusting(api, RATE, ACCOUNTS.get, self.clock, attempts=1)
        self.desk = PayoutDesk(self.enter, trusting)
        self.webhooks = Webhooks([self.stripe.webhook_secret], self.clock)


def test_a_planted_fault_is_found() -> None:
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            TrustingPayouts,
            settings=settings(
                max_examples=300,
                stateful_step_count=30,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            ),
        )
