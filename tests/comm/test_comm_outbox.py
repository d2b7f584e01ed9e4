"""What a node still has to tell: nothing is lost, nothing that is settled is told again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distensor.comm.backoff import Backoff
from distensor.comm.outbox import ClaimBook, ReportBoard
from distensor.core.control import Unit, UnitKey, WorkerChange, WorkerReady, WorkerState
from distensor.core.ids import Epoch, JobId, Rank

JOB = JobId("j_1")


def ready(rank: int = 0, epoch: int = 1, port: int = 5000) -> WorkerReady:
    return WorkerReady(job_id=JOB, epoch=Epoch(epoch), rank=Rank(rank), port=port, csr_pem="csr")


def change(state: WorkerState, rank: int = 0, epoch: int = 1, restarts: int = 0) -> WorkerChange:
    return WorkerChange(job_id=JOB, epoch=Epoch(epoch), rank=Rank(rank), state=state, restarts=restarts)


def unit(step: int, micro_batches: int = 1) -> Unit:
    key = UnitKey(job_id=JOB, epoch=Epoch(1), step=step, rank=Rank(0))
    return Unit(key=key, micro_batches=micro_batches)


def test_the_board_tells_the_latest_in_the_order_in_which_it_happened() -> None:
    board = ReportBoard()
    for report in (change(WorkerState.STARTING), ready(), change(WorkerState.RUNNING)):
        board.put(report)
    assert board.all() == [ready(), change(WorkerState.RUNNING)]


def test_a_worker_that_went_down_is_no_longer_ready() -> None:
    board = ReportBoard()
    board.put(ready(port=5000))
    board.put(change(WorkerState.EXITED))
    assert board.all() == [change(WorkerState.EXITED)]
    board.put(change(WorkerState.STARTING, restarts=1))
    board.put(ready(port=5001))
    assert board.all() == [change(WorkerState.STARTING, restarts=1), ready(port=5001)]


def test_a_release_forgets_its_own_membership_only() -> None:
    board = ReportBoard()
    board.put(ready(0, epoch=1))
    board.put(ready(1, epoch=1))
    board.put(ready(0, epoch=2))
    board.release(JOB, Epoch(1))
    assert board.all() == [ready(0, epoch=2)]


def test_one_batch_at_a_time_and_the_rest_after_its_answer() -> None:
    book = ClaimBook(largest=2)
    for step in range(3):
        book.add(unit(step))
    first = book.next_batch()
    assert first is not None
    assert first.units == (unit(0), unit(1))
    assert book.next_batch() is None
    book.answered(first.batch)
    second = book.next_batch()
    assert second is not None
    assert second.units == (unit(2),)


def test_a_claim_that_comes_while_a_batch_is_away_is_kept() -> None:
    book = ClaimBook(largest=10)
    book.add(unit(0))
    batch = book.next_batch()
    book.add(unit(1))
    assert batch is not None
    book.answered(batch.batch)
    assert len(book) == 1


def test_the_first_claim_of_a_unit_counts() -> None:
    book = ClaimBook(largest=10)
    book.add(unit(0, micro_batches=4))
    book.add(unit(0, micro_batches=9))
    batch = book.next_batch()
    assert batch is not None
    assert batch.units == (unit(0, micro_batches=4),)


ACTIONS = st.lists(st.sampled_from(["add", "send", "answer", "late answer", "lost"]), max_size=60)


@given(ACTIONS)
def test_every_claim_is_sent_until_it_is_answered(actions: list[str]) -> None:
    """A model of a hub that books what arrives, over a connection that breaks at any time."""
    book, booked, added, batch = ClaimBook(largest=3), set(), 0, None
    for action in actions:
        if action == "add":
            book.add(unit(added))
            added += 1
        elif action == "send":
            sent = book.next_batch()
            if sent is not None:
                batch = sent
                booked |= {one.key.step for one in sent.units}
        elif action == "answer" and batch is not None:
            book.answered(batch.batch)
        elif action == "late answer" and batch is not None:
            book.answered(batch.batch - 1)
        elif action == "lost":
            book.connection_lost()
    book.connection_lost()
    while (rest := book.next_batch()) is not None:
        booked |= {one.key.step for one in rest.units}
        book.answered(rest.batch)
    assert booked == set(range(added))
    assert len(book) == 0


def test_delays_double_from_a_fast_first_one_to_the_cap() -> None:
    backoff = Backoff(uniform=lambda: 1.0)
    assert [round(backoff.next_delay(), 3) for _ in range(9)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 15, 15]
    backoff.reset()
    assert backoff.next_delay() == 0.2


@given(st.floats(min_value=0, max_value=1, exclude_max=True), st.integers(min_value=0, max_value=2000))
def test_jitter_takes_away_half_at_most(draw: float, attempts: int) -> None:
    backoff = Backoff(uniform=lambda: draw)
    for _ in range(attempts):
        backoff.next_delay()
    whole = min(15.0, 0.2 * 2.0 ** min(attempts, 32))
    assert whole / 2 <= backoff.next_delay() <= whole
