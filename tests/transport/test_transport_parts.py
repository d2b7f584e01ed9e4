"""The pure parts: mailbox, vigil, reduction, cutting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distensor.core.errors import ConfigError, PeerLostError, TransportTimeoutError
from distensor.core.ids import DRIVER_RANK
from distensor.testing.clock import FakeClock
from distensor.transport import Channel, LinkStats, Message, Tag, Timeouts
from distensor.transport.exchange import group_slot
from distensor.transport.flat import Target, even_pieces, flat_source, split_rows
from distensor.transport.keeper import Keeper, Vigil
from distensor.transport.mailbox import Mailbox
from distensor.transport.reduction import Reduction, check_reducible, reduce_into

ONE, TWO = Tag(Channel.CONTROL, 1), Tag(Channel.CONTROL, 2)


def word(text: str) -> Message:
    return Message(text.encode(), b"")


# -- mailbox ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([ONE, TWO]))))
def test_every_message_is_taken_once_and_in_order(arrivals: list[tuple[int, Tag]]) -> None:
    mailbox = Mailbox(queued_limit=1 << 20)
    for index, (peer, tag) in enumerate(arrivals):
        mailbox.put(peer, tag, word(str(index)))
    for key in sorted(set(arrivals)):
        expected = [str(index).encode() for index, arrival in enumerate(arrivals) if arrival == key]
        assert [mailbox.get(*key, 0).header for _ in expected] == expected
        assert mailbox.poll(*key) is None
        assert not mailbox.has(*key)


def test_the_oldest_queue_of_a_channel_comes_first() -> None:
    mailbox = Mailbox(queued_limit=1 << 20)
    mailbox.put(0, Tag(Channel.META), word("other"))
    mailbox.put(2, TWO, word("a"))
    mailbox.put(1, ONE, word("b"))
    assert mailbox.get_any(Channel.CONTROL, 0, None)[:2] == (2, TWO)
    assert mailbox.get_any(Channel.CONTROL, 0, None)[:2] == (1, ONE)
    with pytest.raises(TransportTimeoutError):
        mailbox.get_any(Channel.CONTROL, 0, None)


def test_who_takes_any_reads_only_where_nothing_is_there_and_gets_what_he_has_read() -> None:
    mailbox = Mailbox(queued_limit=1 << 20)
    read: list[bool] = []

    def bring(over: Callable[[], bool], _timeout: float | None) -> None:
        read.append(over())
        assert mailbox.waited_for(2)
        mailbox.put(2, TWO, word("read"))
        read.append(over())

    mailbox.put(1, ONE, word("there"))
    assert mailbox.get_any(Channel.CONTROL, 0, None, bring)[2].header == b"there"
    assert read == []
    assert mailbox.get_any(Channel.CONTROL, 0, None, bring) == (2, TWO, word("read"))
    assert read == [False, True]


def test_reading_for_oneself_is_part_of_the_time_that_one_waits() -> None:
    clock = FakeClock()
    mailbox = Mailbox(queued_limit=1 << 20, clock=clock)

    def fruitless(_over: Callable[[], bool], timeout: float | None) -> None:
        assert timeout == 30.0
        clock.advance(30.0)

    with ThreadPoolExecutor(1) as pool, pytest.raises(TransportTimeoutError, match="waited 30 s"):
        pool.submit(mailbox.get, 0, ONE, 30.0, (), fruitless).result(20.0)
    with ThreadPoolExecutor(1) as pool, pytest.raises(TransportTimeoutError, match="waited 30 s"):
        pool.submit(mailbox.get_any, Channel.CONTROL, 30.0, None, fruitless).result(20.0)


def test_who_floods_has_to_wait_until_somebody_reads() -> None:
    mailbox = Mailbox(queued_limit=10)
    mailbox.put(1, ONE, word("12345678"))
    flood = [threading.Thread(target=mailbox.put, args=(1, ONE, word("123")))]
    flood[0].start()
    wait_until(lambda: mailbox.holds(1))
    mailbox.put(2, ONE, word("others are not held up"))
    assert mailbox.get(1, ONE, 0).header == b"12345678"
    flood[0].join(10)
    assert not mailbox.holds(1)
    assert mailbox.get(1, ONE, 0).header == b"123"


def test_the_message_that_is_waited_for_passes_a_full_queue() -> None:
    mailbox = Mailbox(queued_limit=10)
    mailbox.put(1, ONE, word("12345678"))
    held = threading.Thread(target=mailbox.put, args=(1, TWO, word("wanted")))
    held.start()
    wait_until(lambda: mailbox.holds(1))
    assert mailbox.get(1, TWO, 10).header == b"wanted"
    held.join(10)
    assert mailbox.get_any(Channel.CONTROL, 0, None)[2].header == b"12345678"


def test_a_loss_ends_the_waiting_of_who_floods() -> None:
    mailbox = Mailbox(queued_limit=10)
    mailbox.put(1, ONE, word("12345678"))
    held = threading.Thread(target=mailbox.put, args=(1, ONE, word("1234")))
    held.start()
    wait_until(lambda: mailbox.holds(1))
    mailbox.fail(1, "gone")
    held.join(10)
    assert not held.is_alive()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_what_came_before_the_loss_can_still_be_read() -> None:
    mailbox = Mailbox(queued_limit=100)
    mailbox.put(1, ONE, word("last"))
    assert mailbox.fail(1, "gone")
    assert not mailbox.fail(1, "gone again")
    assert mailbox.get(1, ONE, 0).header == b"last"
    for call in (lambda: mailbox.get(1, ONE, 0), lambda: mailbox.get_any(Channel.CONTROL, 0, None)):
        with pytest.raises(PeerLostError, match=r"lost peer rank 1: gone$"):
            call()
    with pytest.raises(PeerLostError):
        mailbox.get(2, ONE, 0, needed=[1])
    with pytest.raises(TransportTimeoutError):
        mailbox.get_any(Channel.CONTROL, 0, [2])
    mailbox.check(2)


def test_a_loss_wakes_exactly_who_needs_the_peer() -> None:
    mailbox = Mailbox(queued_limit=100)
    waits: dict[str, Any] = {
        "of it": lambda: mailbox.get(1, ONE, 20),
        "of another, through it": lambda: mailbox.get(2, ONE, 20, needed=[1]),
        "of all": lambda: mailbox.get_any(Channel.META, 20, None),
        "of another": lambda: mailbox.get(2, TWO, 20),
        "of others": lambda: mailbox.get_any(Channel.CONTROL, 20, [2, 3]),
    }
    outcomes: dict[str, str] = {}

    def wait(name: str) -> None:
        try:
            waits[name]()
            outcomes[name] = "message"
        except PeerLostError as error:
            outcomes[name] = f"lost {error.rank}"

    threads = [threading.Thread(target=wait, args=(name,)) for name in waits]
    for thread in threads:
        thread.start()
    mailbox.fail(1, "gone")
    for thread in threads[:3]:
        thread.join(10)
    assert outcomes == dict.fromkeys(list(waits)[:3], "lost 1")
    mailbox.put(2, TWO, word("x"))
    mailbox.put(3, ONE, word("y"))
    for thread in threads:
        thread.join(10)
    assert outcomes["of another"] == outcomes["of others"] == "message"


def test_several_waiters_on_one_queue_get_one_message_each() -> None:
    mailbox = Mailbox(queued_limit=100)
    got: list[bytes] = []
    threads = [threading.Thread(target=lambda: got.append(mailbox.get(1, ONE, 20).header)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for index in range(5):
        mailbox.put(1, ONE, word(str(index)))
    for thread in threads:
        thread.join(10)
    assert sorted(got) == [b"0", b"1", b"2", b"3", b"4"]


# -- vigil -----------------------------------------------------------------------------------------------------------


ROUNDS, STUCK_ROUNDS = 3, 30


def vigil() -> Vigil:
    return Vigil(quiet_rounds=ROUNDS, stuck_rounds=STUCK_ROUNDS)


def test_silence_counts_only_while_nothing_comes() -> None:
    watch = vigil()
    received = 0
    for round_ in range(20):
        received += round_ % ROUNDS == 0
        assert watch.look(1, received=received, sent=0, sending=False) is None
    losses = [watch.look(1, received=received, sent=0, sending=False) for _ in range(ROUNDS)]
    assert losses[-1] == ("not a byte came from it", ROUNDS)


def test_silence_does_not_count_while_we_do_not_read() -> None:
    watch = vigil()
    for _ in range(5 * ROUNDS):
        assert watch.look(1, received=7, sent=0, sending=False, holding=True) is None


def test_a_peer_that_takes_nothing_is_stuck_though_it_talks() -> None:
    watch = vigil()
    found = [watch.look(1, received=round_, sent=5, sending=True) for round_ in range(STUCK_ROUNDS + 1)]
    assert found == [None] * STUCK_ROUNDS + [("it took not a byte of what we send", STUCK_ROUNDS)]
    assert vigil().look(1, received=0, sent=5, sending=False) is None


class _SilentLink:
    """A link from which nothing comes."""

    sending = holding = False
    stats = LinkStats(bytes_sent=0, bytes_received=7, messages_sent=0, messages_received=0)

    def __init__(self) -> None:
        self.keep_alives = 0

    def keep_alive(self) -> None:
        self.keep_alives += 1


class _Rounds(threading.Event):
    """Counts the rounds of a keeper instead of waiting, and ends them with the last one."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.waited: list[float] = []
        self._most = most

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waited.append(timeout)
        return len(self.waited) > self._most


@pytest.mark.parametrize(("rank", "least", "most"), [(0, 2.0, 3.0), (DRIVER_RANK, 29.0, 30.5)])
def test_a_silent_rank_is_lost_within_three_seconds_and_the_driver_later(rank: int, least: float, most: float) -> None:
    link, rounds = _SilentLink(), _Rounds(100)
    lost: list[tuple[float, str]] = []
    links: Any = {rank: link}
    Keeper(
        lambda: links, Timeouts(), lambda _rank, reason, _bye: lost.append((sum(rounds.waited), reason)), rounds
    ).run()
    seconds, reason = lost[0]
    # Its last byte came at the earliest just before the first look.
    assert least <= seconds - rounds.waited[0] <= most - rounds.waited[1]
    assert reason == f"not a byte came from it for {seconds - rounds.waited[0]:g} s"
    assert link.keep_alives / sum(rounds.waited) == pytest.approx(1.0, rel=0.1), "about one each second"


# -- reduction and cutting -------------------------------------------------------------------------------------------


def test_low_precision_is_added_up_in_float32() -> None:
    parts = [torch.tensor([1.0], dtype=torch.bfloat16)] + [torch.tensor([2.0**-9], dtype=torch.bfloat16)] * 4
    out = torch.empty(1, dtype=torch.bfloat16)
    reduce_into(out, parts, Reduction.SUM, 5)
    assert out.item() == 1 + 4 * 2.0**-9, "one by one in bfloat16 it would stay at 1.0"


def test_a_mean_of_many_bfloat16_gradients_is_right_to_the_last_bit() -> None:
    """Sixteen ranks: rounded once, not sixteen times."""
    parts = [torch.tensor([1.0 + 2.0**-7 * rank], dtype=torch.bfloat16) for rank in range(16)]
    out = torch.empty(1, dtype=torch.bfloat16)
    reduce_into(out, parts, Reduction.AVG, 16)
    exact = torch.stack(parts).double().mean()
    assert abs(float(out) - float(exact)) <= 2.0**-7, "one unit in the last place of a bfloat16 near 1"


@pytest.mark.parametrize("own", [0, 1, 2])
@pytest.mark.parametrize("op", list(Reduction)[:5])
def test_the_order_is_that_of_the_ranks_and_the_parts_stay_as_they_are(own: int, op: Reduction) -> None:
    parts = [torch.randn(100, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    expected = torch.empty(100)
    reduce_into(expected, [part.clone() for part in parts], op, 3)
    copies = [part.clone() for part in parts]
    reduce_into(copies[own], copies, op, 3)
    assert torch.equal(copies[own], expected)
    for rank in {0, 1, 2} - {own}:
        assert torch.equal(copies[rank], parts[rank])


@pytest.mark.parametrize(("dtype", "op"), [(torch.int32, Reduction.AVG), (torch.float32, Reduction.BOR),
                                           (torch.complex64, Reduction.MIN)])  # fmt: skip
def test_reductions_that_do_not_exist(dtype: torch.dtype, op: Reduction) -> None:
    with pytest.raises(ConfigError, match=f"reduce op {op} of {dtype} is not defined"):
        check_reducible(dtype, op)


def test_targets_write_through_whatever_the_layout() -> None:
    base = torch.zeros(4, 6)
    for view in (base, base[1:3], base[:, ::2], base.t(), base[1, 2]):
        target = Target(view, load=True)
        assert torch.equal(target.flat.view(view.shape), view)
        target.flat.copy_(torch.arange(float(view.numel())))
        target.store()
        assert torch.equal(flat_source(view), torch.arange(float(view.numel())))


def test_pieces_that_do_not_fit_are_named() -> None:
    with pytest.raises(ConfigError, match="7 elements cannot be cut into 3 equal pieces"):
        even_pieces(torch.zeros(7), 3, "all_gather")
    with pytest.raises(ConfigError, match=r"split sizes \[1, 1\] do not cut 3 rows into 2 pieces"):
        split_rows(torch.zeros(3, 2), torch.zeros(6), [1, 1], 2, "all_to_all")
    assert [len(piece) for piece in split_rows(torch.zeros(3, 2), torch.zeros(6), [1, 2], 2, "x")] == [2, 4]
    assert [len(piece) for piece in even_pieces(torch.zeros(0), 2, "x")] == [0, 0]


def test_groups_have_numbers_of_their_own() -> None:
    slots = {group_slot(name, ranks) for name in ("0", "1") for ranks in ((0, 1), (1, 0), (0, 11), (0, 1, 1))}
    assert len(slots) == 8
    assert all(0 <= slot < 1 << 64 for slot in slots)
