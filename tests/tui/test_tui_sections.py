"""Sections become the model; what is wrong is named with its path and left out."""

from __future__ import annotations

from datetime import UTC
from typing import Any

import pytest
import tui_fake as fake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_tui_wire import JSON

from distensor_tui.fields import clean
from distensor_tui.frame import frame
from distensor_tui.model import HubState, NodeState, Severity, Snapshot
from distensor_tui.scene import Feed, Link, Look, Scene, Screen, Ui, View
from distensor_tui.sections import apply
from distensor_tui.text import width


def read(**sections: Any) -> Snapshot:
    return apply(Snapshot(), fake.snapshot(**sections), full=True)


def test_a_good_snapshot_has_no_problems() -> None:
    snapshot = read()
    assert snapshot.problems == ()
    assert snapshot.node is not None
    assert snapshot.hub is not None
    assert (snapshot.node.state, snapshot.hub.state) == (NodeState.EARNING, HubState.CONNECTED)
    assert [device.id for device in snapshot.devices or ()] == ["gpu0", "cpu"]
    assert [member.mine for member in snapshot.live_jobs[0].members] == [False, True, True, False]
    assert snapshot.events is not None
    assert snapshot.events[4].severity is Severity.WARNING


def test_a_delta_replaces_only_its_sections() -> None:
    before = read()
    after = apply(before, {"jobs": [fake.job(step=18205)]}, full=False)
    assert after.jobs is not None
    assert after.jobs[0].step == 18205
    assert (after.devices, after.earnings) == (before.devices, before.earnings)


def test_a_snapshot_forgets_what_it_does_not_have() -> None:
    after = apply(read(), {"node": fake.node()}, full=True)
    assert after.devices is None


def test_a_null_section_is_not_available_and_says_why() -> None:
    snapshot = apply(Snapshot(), {"devices": None, "unavailable": {"devices": "probe timed out"}}, full=True)
    assert snapshot.devices is None
    assert snapshot.unavailable["devices"] == "probe timed out"


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"devices": [fake.device(utilization="high")]}, "devices[0].utilization: a finite number"),
        ({"devices": [fake.device(), 7]}, "devices[1]: an object"),
        ({"devices": {"a": 1}}, "devices: a list"),
        ({"node": "x"}, "node: an object"),
        ({"node": fake.node("SLEEPY")}, "node.state: 'SLEEPY'"),
        ({"jobs": [fake.job(loss=float("nan"))]}, "jobs[0].loss: a finite number"),
        ({"jobs": [fake.job(members="all")]}, "jobs[0].members: a list"),
        ({"jobs": [fake.job(step=10**400)]}, "jobs[0].step"),
        ({"earnings": fake.earnings(today_micro=True)}, "earnings.today_micro"),
    ],
)
def test_a_wrong_value_is_named_and_the_rest_is_kept(sections: dict[str, Any], problem: str) -> None:
    snapshot = read(**sections)
    assert problem in snapshot.problems[0]
    assert snapshot.hub is not None


def test_a_problem_goes_away_with_the_next_good_section() -> None:
    bad = read(devices=[fake.device(utilization="high")])
    assert apply(bad, {"jobs": []}, full=False).problems == bad.problems
    assert apply(bad, {"devices": [fake.device()]}, full=False).problems == ()


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("[red]x[/]", "[red]x[/]"),
        ("a\x1b[31mb", "a␛[31mb"),
        ("two\nlines\tand tab", "two lines and tab"),
        ("abc\u202egnp.exe", "abcgnp.exe"),
        ("e\u0301", "e"),
        ("\ud800", "\ufffd"),
    ],
)
def test_foreign_text_cannot_move_the_cursor(raw: str, shown: str) -> None:
    assert clean(raw) == shown


SECTION = st.dictionaries(
    st.sampled_from(["node", "hub", "devices", "workers", "jobs", "earnings", "events", "unavailable"]), JSON
)


def _mutated(data: st.DataObject) -> dict[str, Any]:
    """A good snapshot with one field of one section replaced by anything."""
    snapshot = fake.snapshot()
    section = data.draw(st.sampled_from(sorted(snapshot)))
    target = snapshot[section][0] if isinstance(snapshot[section], list) else snapshot[section]
    target[data.draw(st.sampled_from(sorted(target)))] = data.draw(JSON)
    return snapshot


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data(), st.sampled_from(list(Screen)), st.sampled_from([(80, 24), (120, 40), (61, 16)]))
def test_whatever_comes_every_screen_can_be_drawn(data: st.DataObject, screen: Screen, size: tuple[int, int]) -> None:
    raw = data.draw(SECTION) if data.draw(st.booleans()) else _mutated(data)
    view = View(feed=Feed(link=Link.LIVE), snapshot=apply(Snapshot(), raw, full=True))
    look = Look(width=size[0], height=size[1], now=fake.NOW, zone=UTC)
    lines = frame(Scene(view=view, look=look, ui=Ui().at(screen=screen)))
    assert len(lines) == size[1]
    assert {width(row) for row in lines} == {size[0]}


def test_a_snapshot_that_says_nothing_about_reasons_has_none() -> None:
    assert read(unavailable=None).unavailable == {}
