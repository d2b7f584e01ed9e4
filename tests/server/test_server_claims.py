"""Claims wait where there is room, are read again from the receipts, and none is lost or made up."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distensor.comm import LinkState
from distensor.core.control import Unit, UnitKey
from distensor.core.errors import StoreError
from distensor.core.ids import Epoch, JobId, Rank
from distensor.testing.clock import FakeClock
from distensor_server import claims
from distensor_server.books import Books
from distensor_server.claims import ClaimBacklog
from distensor_server.picture import Picture
from distensor_server.statedir import StateDirectory


class Link:
    """A hub that answers when it is told to."""

    def __init__(self) -> None:
        self.waiting: dict[UnitKey, Unit] = {}
        self.at_the_hub: set[UnitKey] = set()
        self.connected = True
        self.most = 0

    @property
    def unanswered_claims(self) -> int:
        return len(self.waiting)

    def claim(self, unit: Unit) -> None:
        self.waiting.setdefault(unit.key, unit)
        self.most = max(self.most, len(self.waiting))

    def answer(self) -> None:
        self.at_the_hub |= self.waiting.keys()
        self.waiting.clear()


class Node:
    """A life of the supervisor in `root`: as much of a node as claims touch."""

    def __init__(self, root: Path, clock: FakeClock) -> None:
        self.clock = clock
        self.link = Link()
        self.events: list[str] = []
        self.state = StateDirectory(root)
        self.state.receipts.mkdir(parents=True, exist_ok=True)
        self.books = Books(self.state, clock)
        self.journal = SimpleNamespace(
            guarded=self._guarded, add=lambda _severity, _source, text: self.events.append(text)
        )
        self.backlog = ClaimBacklog(cast(Any, self))
        self.backlog.open()

    def _guarded(self, write: Any) -> bool:
        try:
            write()
        except StoreError as error:
            self.events.append(str(error))
            return False
        return True

    def work(self, steps: range) -> None:
        for step in steps:
            unit = unit_of(step)
            kept = self._guarded(lambda unit=unit: self.books.claimed(unit))
            self.backlog.admit(unit, kept=kept)

    def tick(self, seconds: float = 2.0) -> None:
        self.clock.advance(seconds)
        state = LinkState.CONNECTED if self.link.connected else LinkState.OFFLINE
        picture = SimpleNamespace(now=self.clock.now(), link=SimpleNamespace(state=state))
        if self.link.connected:
            self.link.answer()
        self.backlog.on_tick(cast(Picture, picture))


def unit_of(step: int) -> Unit:
    return Unit(key=UnitKey(job_id=JobId("j"), epoch=Epoch(1), step=step, rank=Rank(0)), micro_batches=2)


def keys(steps: range) -> set[UnitKey]:
    return {unit_of(step).key for step in steps}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "MOST", 20)
    monkeypatch.setattr(claims, "BATCH", 7)


@pytest.mark.usefixtures("small")
def test_a_hub_that_is_away_for_long_fills_no_memory_and_gets_everything_in_the_end(tmp_path: Path) -> None:
    node = Node(tmp_path, FakeClock())
    node.link.connected = False
    for start in range(0, 500, 10):
        node.work(range(start, start + 10))
        node.tick(600)
    assert node.link.most == 20
    assert node.events == ["20 claims wait for the hub: more wait in the receipts"]
    node.link.connected = True
    for _ in range(120):
        node.tick()
    assert node.link.at_the_hub == keys(range(500))
    assert node.link.most == 20
    node.work(range(500, 510))
    assert node.link.unanswered_claims == 10, "there is room again"


@pytest.mark.parametrize("away", [600, 7200, 5 * 86400])
def test_a_new_start_claims_what_the_hub_never_got(tmp_path: Path, away: float) -> None:
    clock = FakeClock()
    node = Node(tmp_path, clock)
    node.work(range(5))
    for _ in range(40):
        node.tick()
    node.link.connected = False
    node.work(range(5, 9))
    node.tick(away)
    # kill -9: nothing is closed
    again = Node(tmp_path, clock)
    again.tick()
    assert keys(range(5, 9)) <= again.link.at_the_hub
    for _ in range(40):
        again.tick()
    again.backlog.close()
    third = Node(tmp_path, clock)
    third.tick()
    assert third.link.at_the_hub == set(), "known to be there"


def test_a_full_disk_loses_no_claim(tmp_path: Path, small: None) -> None:
    node = Node(tmp_path, FakeClock())
    node.link.connected = False
    node.work(range(30))
    node.books.close()
    node.state.receipts.rename(tmp_path / "gone")
    node.clock.advance(86400)  # the next day's file cannot be made
    node.work(range(30, 35))
    assert keys(range(30, 35)) <= node.link.waiting.keys()


@pytest.mark.parametrize("content", ["", "[]", '{"clear_at": "x"}', '{"clear_at": 9e18}', '{"clear_at": -1}'])
def test_without_a_usable_memory_everything_is_claimed_again(tmp_path: Path, content: str) -> None:
    clock = FakeClock()
    node = Node(tmp_path, clock)
    node.work(range(5))
    for _ in range(40):
        node.tick()
    node.books.close()
    (tmp_path / "claims.json").write_text(content)
    again = Node(tmp_path, clock)
    assert again.link.waiting.keys() == keys(range(5))


def test_a_clock_that_is_set_back_hides_no_claim(tmp_path: Path) -> None:
    clock = FakeClock()
    node = Node(tmp_path, clock)
    for _ in range(40):
        node.tick()
    clock.jump_wall(-7200)
    node.backlog.on_clock_set(-7200)
    node.link.connected = False
    node.work(range(3))
    node.tick(70)
    node.books.close()
    again = Node(tmp_path, clock)
    assert again.link.waiting.keys() == keys(range(3))


def test_the_memory_is_written_rarely(tmp_path: Path) -> None:
    node = Node(tmp_path, FakeClock())
    written: set[str] = set()
    for _ in range(100):
        node.tick()
        path = tmp_path / "claims.json"
        written.add(path.read_text() if path.exists() else "")
    assert 3 <= len(written) <= 6, "200 seconds"
    assert json.loads(max(written))["clear_at"] > 0


STEPS = st.lists(st.sampled_from(["work", "tick", "away", "back", "kill"]), max_size=40)


@given(STEPS)
def test_whatever_happens_each_unit_reaches_the_hub_and_nothing_else(happenings: list[str]) -> None:
    import tempfile

    before = claims.MOST, claims.BATCH
    claims.MOST, claims.BATCH = 6, 3
    try:
        with tempfile.TemporaryDirectory() as directory:
            _walk(Path(directory), happenings)
    finally:
        claims.MOST, claims.BATCH = before


def _walk(root: Path, happenings: list[str]) -> None:
    clock, done, there = FakeClock(), 0, set[UnitKey]()
    node = Node(root, clock)
    for happening in happenings:
        if happening == "work":
            node.work(range(done, done + 4))
            done += 4
        elif happening == "tick":
            node.tick(31)
        elif happening == "kill":
            there |= node.link.at_the_hub
            node.books.close()
            node = Node(root, clock)
        else:
            node.link.connected = happening == "back"
        assert node.link.most <= claims.MOST
    node.link.connected = True
    for _ in range(2 * done + 4):
        node.tick()
    assert there | node.link.at_the_hub == keys(range(done))
    node.books.close()
