"""Which commands carry out what, with stand-ins for all that computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from distensor.core.errors import ProgramRejectedError
from distensor.node.commands import Commands
from distensor.testing.clock import FakeClock
from distensor.transport.driver import Command


class Fetches:
    begun = 0

    def begin(self) -> None:
        self.begun += 1


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setattr(Commands, "_answer", lambda _self, _engine, _hand, report: {"report": report})
    nothing = cast("Any", None)
    return Commands(
        assignment=nothing, emitter=nothing, clock=FakeClock(), progress=nothing, meter=nothing, reach=nothing
    )


def engine(committed: int, report: object) -> Any:
    return SimpleNamespace(
        require_load=lambda: None,
        decided=SimpleNamespace(number=committed, report=report),
        resolve=lambda number, _sums: f"resolved {number}",
    )


def test_what_is_asked_for_is_fetched_after_the_command_in_which_it_was_copied(commands: Commands) -> None:
    fetches = Fetches()
    commands._fetcher = cast("Any", fetches)
    commands.run(engine(4, None), Command.PASS, 1, {}, {})
    assert fetches.begun == 0, "the sources are at their copies only now"
    commands._in_hand = cast("Any", SimpleNamespace(order=SimpleNamespace(step=5)))
    commands.run(engine(5, "r"), Command.RESOLVE, 2, {"step": 5, "sums": None}, {})
    assert fetches.begun == 1


SUMS = {"loss": 1.0, "weight": 2.0, "norm": 3.0}


def test_a_step_is_resolved_without_sums_only_where_it_is_committed(commands: Commands) -> None:
    commands._in_hand = cast("Any", SimpleNamespace(order=SimpleNamespace(step=5)))

    def resolved(committed: int, sums: object) -> object:
        answer, _ = commands.run(engine(committed, "done"), Command.RESOLVE, 1, {"step": 5, "sums": sums}, {})
        return answer["report"]

    assert resolved(5, None) == "done"
    assert resolved(5, SUMS) == "done"
    assert resolved(4, SUMS) == "resolved 5"
    with pytest.raises(ProgramRejectedError, match="without sums"):
        resolved(4, None)
    with pytest.raises(ProgramRejectedError, match="sums="):
        resolved(4, {"loss": "much"})
