"""What a feature can plug into the supervisor, shown by one that uses everything."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from server_fakes import AsyncClient, Running, assignment, events, eventually, start_job, state_of, supervisor_running

from distensor.core.control import Assignment, Earnings, Unit
from distensor.core.errors import StoreError
from distensor_server import feature as feature_module
from distensor_server.config import Limits
from distensor_server.feature import Feature, Features
from distensor_server.localserver import Method, RequestError
from distensor_server.node import Node
from distensor_server.picture import Gate, LoggedEvent, Picture
from distensor_server.sections import Section


class Everything(Feature):
    """Closes its gate by the method `close_gate`."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.told: list[str] = []
        self.closed = False

    def sections(self) -> Mapping[str, Any]:
        return {"extra": self._section}

    def _section(self, picture: Picture) -> Section:
        return {"closed": self.closed, "name": picture.name}

    def methods(self) -> Mapping[str, Method]:
        return {"close_gate": self._close_gate, "slow": self._slow, "bug": self._bug}

    def _close_gate(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        self.closed = True
        self.node.reconsider()
        return {}

    async def _slow(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        await asyncio.sleep(0)
        if params:
            raise RequestError(code="bad_params", message="slow takes none")
        return {"done": True}

    async def _bug(self, _params: Mapping[str, Any]) -> Mapping[str, Any]:
        raise ZeroDivisionError("a bug")

    def background(self) -> Sequence[Coroutine[Any, Any, None]]:
        return (self._wait(),)

    async def _wait(self) -> None:
        self.told.append("background")
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self.told.append("cancelled")

    def open(self) -> None:
        self.told.append("open")

    def close(self) -> None:
        self.told.append("close")

    def refusal(self, assignment: Assignment | None) -> str | None:
        if assignment is not None and assignment.rank == 9:
            return "rank 9 is not for us"
        return "the gate is closed" if self.closed else None

    def gates(self) -> Sequence[Gate]:
        return (Gate(gate="extra", open=not self.closed, reading="as told"),)

    def on_tick(self, picture: Picture) -> None:
        self.told.append("tick")

    def on_event(self, event: LoggedEvent) -> None:
        self.told.append(f"event {event.source}")

    def on_limits(self, limits: Limits) -> None:
        self.told.append(f"limits {limits.cpu_workers}")

    def on_claim(self, assignment: Assignment, unit: Unit) -> None:
        self.told.append(f"claim {unit.key.step}")

    def on_earnings(self, earnings: Earnings) -> None:
        self.told.append(f"earnings {earnings.confirmed_micro}")


def the_feature(running: Running) -> Everything:
    return next(feature for feature in running.supervisor.node.features if isinstance(feature, Everything))


@pytest.mark.asyncio
async def test_a_feature_hears_and_says_what_it_overrides(short_dir: Path) -> None:
    async with supervisor_running(short_dir, features=[Everything]) as running:
        feature = the_feature(running)
        assert running.sections()["extra"] == {"closed": False, "name": "atlas-3"}
        await start_job(running, 0)
        running.link.handler.on_earnings(Earnings(confirmed_micro=7))
        running.supervisor.reload()
        await eventually(lambda: {"tick", "claim 2"} <= set(feature.told), "all is told")
        assert feature.told[0] == "open"
        assert {"background", "event hub", "earnings 7", "limits 2"} <= set(feature.told)
        running.link.handler.on_assignment(assignment(9))
        assert running.link.changes(9)[0].reason == "refused: rank 9 is not for us"
    assert feature.told[-2:] == ["cancelled", "close"]


@pytest.mark.asyncio
async def test_a_feature_answers_requests_and_closes_its_gate(short_dir: Path) -> None:
    async with supervisor_running(short_dir, features=[Everything]) as running:
        client = await AsyncClient.connect(short_dir / "s.sock")
        assert (await client.request("slow"))["result"] == {"done": True}
        assert (await client.request("slow", now=1))["error"]["message"] == "slow takes none"
        assert (await client.request("bug"))["error"]["code"] == "internal"
        assert running.link.accepting
        assert (await client.request("close_gate"))["ok"]
        await client.close()
        assert not running.link.accepting
        assert state_of(running) == "WAITING"
        assert ("extra", False) in [(gate["gate"], gate["open"]) for gate in running.sections()["node"]["why"]]
        running.assign(0)
        assert running.link.changes(0)[0].reason == "refused: the gate is closed"
        assert any("the gate is closed" in text for text in events(running))


class Buggy(Feature):
    """Fails wherever it is asked, once `armed`."""

    armed = False

    def __init__(self, node: Node) -> None:
        self.starts = 0

    def fail(self, *_given: Any) -> Any:
        if self.armed:
            raise ZeroDivisionError("a bug")

    on_tick = on_event = on_claim = on_earnings = on_limits = on_woken = on_process_started = fail
    close = fail

    def sections(self) -> Mapping[str, Any]:
        return {"buggy": self.fail}

    def refusal(self, assignment: Assignment | None) -> str | None:
        self.fail()
        return None

    def gates(self) -> Sequence[Gate]:
        self.fail()
        return ()

    def background(self) -> Sequence[Coroutine[Any, Any, None]]:
        self.starts += 1
        return (self._run(),)

    async def _run(self) -> None:
        await asyncio.sleep(0.05)
        raise ValueError(f"run {self.starts}")


@pytest.mark.asyncio
async def test_a_bug_in_a_feature_is_told_and_costs_no_worker(
    short_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(feature_module, "AGAIN_SECONDS", 0.1)
    async with supervisor_running(short_dir, features=[Buggy, Everything], may_have_bugs=True) as running:
        await start_job(running, 0)
        monkeypatch.setattr(Buggy, "armed", True)
        running.supervisor.tick()
        running.supervisor.reload()
        running.supervisor.node.woke()
        running.link.handler.on_earnings(Earnings(confirmed_micro=7))
        words = "Buggy failed in on_tick: ZeroDivisionError: a bug"
        assert words in events(running)
        assert "tick" in the_feature(running).told, "the others are told all the same"
        assert running.sections()["buggy"] == {"error": "Buggy failed in sections: ZeroDivisionError: a bug"}
        assert state_of(running) == "EARNING"
        why = running.sections()["node"]["why"]
        assert [gate["open"] for gate in why if gate["gate"] == "buggy"] == [False]
        running.supervisor.node.reconsider()
        assert not running.link.accepting, "what decides over new work fails closed"
        running.assign(1)
        assert running.link.changes(1)[0].reason.startswith("refused: Buggy failed in refusal")
        await eventually(lambda: any("ValueError: run 2" in text for text in events(running)), "tried again")
    assert sum("ZeroDivisionError: a bug" in record.getMessage() for record in caplog.records) >= 3
    assert any(record.exc_info for record in caplog.records), "with its traceback"


@pytest.mark.asyncio
async def test_a_feature_may_refuse_to_start(short_dir: Path) -> None:
    class Refuses(Feature):
        def __init__(self, node: Node) -> None:
            pass

        def open(self) -> None:
            raise StoreError("no")

    with pytest.raises(StoreError, match="no"):
        async with supervisor_running(short_dir, features=[Refuses], connect=False) as running:
            await asyncio.wait({running.task}, timeout=10)


def test_two_features_with_one_name_are_a_mistake() -> None:
    features = Features(lambda _words: None)
    for _ in range(2):
        feature = Feature()
        feature.methods = lambda: {"same": lambda _params: {}}  # type: ignore[method-assign]
        features.add(feature)
    with pytest.raises(AssertionError, match="two features give same"):
        features.all_methods()
