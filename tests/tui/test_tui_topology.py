"""The mesh on the screen: this node always in sight, links with round trip and rate, drill-down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tui_fake as fake
from test_tui_income import pressed
from test_tui_screens import live, on, scene, text

from distensor_tui import format as fmt
from distensor_tui.model import Snapshot
from distensor_tui.scene import Screen, Ui
from distensor_tui.sections import apply
from distensor_tui.views.links import slowest
from distensor_tui.views.topology import grid_rows

TOPOLOGY = on(Screen.TOPOLOGY)


def mesh(dp: int, tp: int, pp: int, *, mine: tuple[int, ...], links: bool = True) -> dict[str, Any]:
    """A job of dp x tp x pp ranks in the default order (tp fastest, then pp, then dp)."""
    ranks = dp * tp * pp
    members = [
        fake.member(r, f"home-{r}", dp=r // (tp * pp), tp=r % tp, pp=r // tp % pp, mine=r in mine) for r in range(ranks)
    ]
    wires = [fake.link(r, peer, 1e5, 1e5, 1.0 + peer / 10) for r in mine for peer in range(ranks) if peer != r]
    parallel = {"dp": dp, "tp": tp, "pp": pp, "cp": 1, "order": "tp-cp-pp-dp"}
    return fake.job(members=members, links=wires if links else [], parallel=parallel)


@pytest.mark.parametrize(("dp", "tp", "pp", "mine"), [(4, 1, 4, 13), (8, 2, 4, 61), (64, 1, 8, 509), (4, 2, 64, 511)])
@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
def test_this_node_is_in_sight_however_large_the_mesh(
    dp: int, tp: int, pp: int, mine: int, size: tuple[int, int]
) -> None:
    view = live(jobs=[mesh(dp, tp, pp, mine=(mine,))])
    shown = text(view, size, TOPOLOGY)
    assert f"{mine}]" in shown, "in brackets"
    assert "slowest" in shown
    assert f"{mine}]" in text(view, size), "on Home too"


def test_few_rows_keep_their_order_and_many_begin_with_this_nodes() -> None:
    few, many = (apply(Snapshot(), {"jobs": [mesh(dp, 1, 2, mine=(2 * dp - 1,))]}, full=True) for dp in (2, 9))
    assert few.jobs is not None
    assert many.jobs is not None
    assert grid_rows(few.jobs[0]) == [(0, 0, 0), (1, 0, 0)]
    assert grid_rows(many.jobs[0])[:3] == [(8, 0, 0), (0, 0, 0), (1, 0, 0)]


def test_stages_that_do_not_fit_are_counted() -> None:
    shown = text(live(jobs=[mesh(1, 1, 40, mine=(20,))]), (80, 24), TOPOLOGY)
    assert " of 40" in shown
    assert "s20" in shown
    assert "s0 " not in shown


def test_an_edge_shows_round_trip_and_rate_where_they_fit() -> None:
    shown = text(live(), (120, 40), TOPOLOGY)
    assert "3.2 ms  2.1 MB/s" in shown
    narrow = text(live(jobs=[mesh(2, 1, 4, mine=(1,))]), (80, 24), TOPOLOGY)
    assert " 1.2 ms " in narrow or "1.2 ms" in narrow


def test_the_slowest_link_is_named_with_the_age_of_its_round_trip() -> None:
    shown = text(live(), (120, 40), TOPOLOGY)
    assert "slowest     rank 2 ─ 3 kite-2  41 ms (40 s old), sent 420 kB/s, received 390 kB/s" in shown


def test_links_that_were_not_measured_are_not_the_slowest() -> None:
    unknown = [fake.link(1, 0, rtt_ms=None, age=None), fake.link(1, 3), fake.link(1, -1, rtt_ms=900.0)]
    jobs = apply(Snapshot(), {"jobs": [fake.job(links=unknown)]}, full=True).jobs
    assert jobs is not None
    assert slowest(jobs[0]) is None, "one link between ranks is not the slowest of anything"
    shown = text(live(jobs=[fake.job(links=unknown)]), (120, 40), TOPOLOGY)
    assert "slowest" not in shown
    older = [{k: v for k, v in fake.link(1, 0).items() if not k.startswith("rtt")}]
    assert "rank 1 ─ 0 bolt-1        -" in text(live(jobs=[fake.job(links=older)]), (120, 40), TOPOLOGY)


def test_the_way_to_a_peer_is_said_and_a_relay_stands_out() -> None:
    told = [
        {**fake.link(1, 0), "path": "lan", "line_rate": 1.25e6},
        {**fake.link(1, 3, rtt_ms=45.0), "path": "relay", "line_rate": None},
        fake.link(1, -1),
    ]
    shown = text(live(jobs=[fake.job(links=told)]), (120, 40), TOPOLOGY)
    assert "slowest     rank 1 ─ 3 kite-2  relay, 45 ms, sent" in shown
    rows = {
        line.split("─")[1].split()[0]: line for line in shown.splitlines() if "rank 1 ─ " in line and "slow" not in line
    }
    assert "local network" in rows["0"]
    assert "relay" in rows["3"]
    assert rows["trainer"].rstrip(" │").endswith("147 MiB"), "an older supervisor says nothing of it"


def test_step_loss_and_the_split_of_the_round_stand_below() -> None:
    shown = text(live(), (120, 40), TOPOLOGY)
    for fact in ("18,204/20,000", "loss 2.4131", "4,812 tok/s", "compute 0.41 s", "sync 0.12 s", "wait 50 ms"):
        assert fact in shown, fact


def test_enter_opens_a_row_and_then_a_rank() -> None:
    at = scene(live(), (120, 40), TOPOLOGY)
    at, _ = pressed(at, "down", "down", "down", "enter")
    assert at.ui.place.path == ("job-1", "1 0 0")
    shown = text(at.view, (120, 40), at.ui)
    assert "this node" in shown
    assert "kite-2" in shown
    assert "bolt-1" not in shown.split("node")[-1]
    at, _ = pressed(at, "enter")
    shown = text(at.view, (120, 40), at.ui)
    assert "rank: 2 on this node" in shown or "2 on this node" in shown
    assert "w-2, running, on cpu" in shown
    assert "41 ms (40 s old), sent 420 kB/s" in shown


def test_the_name_of_a_job_opens_all_of_its_ranks() -> None:
    at = scene(live(jobs=[mesh(64, 1, 8, mine=(509, 3))]), (120, 40), TOPOLOGY)
    at, _ = pressed(at, "enter")
    shown = text(at.view, (120, 40), at.ui)
    rows = [row for row in shown.splitlines() if "this node" in row and "home-" in row]
    assert len(rows) == 2, "this node's ranks come first"
    filtered = text(at.view, (120, 40), at.ui.at(filter="home-77"))
    assert "home-77" in filtered
    assert "1 of 512" in filtered


def test_a_job_that_is_gone_says_so() -> None:
    assert "The job j-9 is gone" in text(live(), (120, 40), on(Screen.TOPOLOGY, path=("j-9",)))
    assert "No rank is placed here" in text(live(), (120, 40), on(Screen.TOPOLOGY, path=("job-1", "9 9 9")))


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "-"), (0.414, "0.41 ms"), (3.24, "3.2 ms"), (41.4, "41 ms"), (1240.0, "1.2 s")]
)
def test_a_round_trip_as_people_read_it(value: float | None, shown: str) -> None:
    assert fmt.milliseconds(value) == shown


@pytest.mark.parametrize("ranks", [16, 64, 512])
@pytest.mark.parametrize("size", [(60, 15), (80, 24)])
def test_every_row_of_a_large_mesh_can_be_reached(ranks: int, size: tuple[int, int]) -> None:
    view = live(jobs=[mesh(ranks // 8, 1, 8, mine=(ranks - 1,))])
    last = text(view, size, replace(Ui(), place=on(Screen.TOPOLOGY, cursor=10_000).place))
    assert f"dp{ranks // 8 - 2}" in last
