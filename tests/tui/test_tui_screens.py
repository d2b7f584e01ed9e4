"""What the screens say, compared with golden text files.

`UPDATE_GOLDEN=1 pytest tests/tui/test_tui_screens.py` writes them anew; look at the difference before committing it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tui_fake as fake

from distensor_tui import absence
from distensor_tui.frame import dialog, frame
from distensor_tui.glyphs import ASCII, UNICODE, Glyphs
from distensor_tui.history import History, remember
from distensor_tui.keys import HELP, NOTICES, PALETTE, WHY
from distensor_tui.model import NodeState, Snapshot
from distensor_tui.orders import DRAIN, PAUSE, UNTIL
from distensor_tui.plain import jobs as jobs_as_text
from distensor_tui.scene import Dialog, Feed, Link, Look, Scene, Screen, Toast, Ui, View
from distensor_tui.screens.page import details
from distensor_tui.screens.table import SCREENS
from distensor_tui.sections import apply
from distensor_tui.text import Tone, plain, width
from distensor_tui.wire import Hello

DIALOGS: dict[str, Dialog] = {
    "help": HELP,
    "pause": PAUSE,
    "until": UNTIL,
    "drain": DRAIN,
    "why": WHY,
    "notices": NOTICES,
    "palette": PALETTE,
    "detail": details(SCREENS[Screen.DEVICES]),
}
GOLDEN = Path(__file__).parent / "golden"
SIZES = [(80, 24), (120, 40), (200, 60)]
SOCKET = Path("/run/user/1000/distensor/supervisor.sock")


@cache
def trained(steps: int = 60) -> History:
    """A history of a loss that falls and a speed that sways."""
    history = History()
    for i in range(steps):
        loss = 2.4131 + 2 * (math.exp(-i / 15) - math.exp((1 - steps) / 15))
        job = fake.job(
            step=18204 - steps + 1 + i, loss=loss, tokens_per_second=4812 + 200 * math.sin((i + 1 - steps) / 5)
        )
        history = remember(history, apply(Snapshot(), {"jobs": [job]}, full=True), fake.NOW - steps + 1 + i)
    return history


def live(**sections: Any) -> View:
    snapshot = apply(Snapshot(), fake.snapshot(**sections), full=True)
    return View(feed=Feed(link=Link.LIVE), snapshot=snapshot, history=trained())


def lost(why: absence.Absence, view: View | None = None, ago: float = 38) -> View:
    feed = Feed(link=Link.LOST, absence=why, last_at=fake.NOW - ago if view else None, retry_at=fake.NOW + 2)
    return replace(view or View(), feed=replace(feed, source=str(SOCKET)))


def idle(**sections: Any) -> View:
    quiet: dict[str, Any] = {"jobs": [], "workers": [], "events": [], "node": fake.node("IDLE")}
    empty = fake.earnings(confirmed_micro=0, confirmed_units=0, pending_units=0, today_micro=0, confirmed_at=None)
    nothing: dict[str, Any] = {name: fake.income_sum() for name in ("today", "week", "month", "total")}
    nothing |= {"hours": [0] * 48, "days": [], "jobs": [], "devices": [], "projection": None, "no_power": {}}
    nothing["ledger"] = fake.ledger(matched=fake.standing(), unconfirmed=fake.standing(), own_micro=0, hub_micro=0)
    books = {"earnings": empty, "income": fake.income(**nothing)}
    return replace(live(**(books | quiet | sections)), history=History())


def paused() -> View:
    gate = fake.gate("user_pause", is_open=False, reading="paused by the owner, for a time", at=fake.NOW + 1800)
    return idle(node=fake.node("PAUSED", why=[gate, fake.gate("hub", reading="connected")]), earnings=fake.earnings())


def degraded() -> View:
    broken = fake.worker(2, state="broken", restarts=5, last_exit="out of memory (exit 137)")
    bad = fake.device("gpu1", usable=False, reason="driver 470 is too old, 525 is needed")
    gate = fake.gate("workers", is_open=False, reading="w-2 broken (out of memory)")
    return live(
        node=fake.node("DEGRADED", why=[gate]),
        workers=[fake.worker(1), broken],
        devices=[fake.gpu(), bad],
        faults=[fake.CRASH_LOOP],
    )


def error() -> View:
    """All that can be broken beside a job that goes on."""
    lost_gpu = fake.device("gpu1", name="NVIDIA RTX 4090", usable=False, fault=True, reason="it fell off the bus")
    return replace(
        degraded(),
        snapshot=live(
            node=fake.node("DEGRADED"),
            workers=[fake.worker(1), fake.worker(2, state="broken", restarts=5, last_exit="out of memory (exit 137)")],
            devices=[fake.gpu(), lost_gpu],
            faults=[fake.DISK_FULL, fake.DEVICE_LOST, fake.CRASH_LOOP],
        ).snapshot,
    )


def refused() -> View:
    """The hub does not take this node, and no job runs."""
    problem = {"code": "authentication", "message": "the hub does not know this node", "fix": "distensor auth login"}
    return idle(node=fake.node("OFFLINE"), hub=fake.hub("rejected", error=problem), faults=[fake.REFUSED])


def hub_offline() -> View:
    error = {"code": "hub_unreachable", "message": "connection refused", "fix": "check the hub's address"}
    hub = fake.hub("offline", since=fake.NOW - 600, next_retry_at=fake.NOW + 9, error=error)
    return live(hub=hub, node=fake.node("DEGRADED"))


def crowd() -> View:
    """DP 8 x TP 2 x PP 6: more than any grid can show at 80 columns."""
    members = [
        fake.member(r, f"node-with-a-long-name-{r}", dp=r // 12, tp=r % 2, pp=r // 2 % 6, mine=r == 7)
        for r in range(96)
    ]
    return live(jobs=[fake.job(members=members, parallel={"dp": 8, "tp": 2, "pp": 6, "cp": 1, "order": "x"})])


VIEWS: dict[str, Callable[[], View]] = {
    "earning": live,
    "idle": idle,
    "paused": paused,
    "degraded": degraded,
    "error": error,
    "refused": refused,
    "hub-offline": hub_offline,
    "crowd": crowd,
    "hostile": lambda: replace(live(), snapshot=apply(Snapshot(), fake.hostile(), full=True)),
    "starting": lambda: live(jobs=[fake.job(state="starting", step=None, loss=None, members=[], links=[])]),
    "loading": lambda: View(feed=Feed(source=str(SOCKET))),
    "no-sections": lambda: View(
        feed=Feed(link=Link.LIVE), snapshot=apply(Snapshot(), {"node": fake.node("STARTING", why=[])}, full=True)
    ),
    "not-running": lambda: lost(absence.not_running(SOCKET)),
    "not-permitted": lambda: lost(absence.not_permitted(SOCKET, "ann")),
    "other-version": lambda: lost(
        absence.other_version(Hello(schema_version=2, server_version="0.9.0", node="atlas-3"))
    ),
    "not-a-supervisor": lambda: lost(absence.not_a_supervisor(SOCKET, "not JSON: 'HTTP/1.1 400'")),
    "path-too-long": lambda: lost(absence.path_too_long(Path("/tmp/" + "x" * 120))),
    "stale": lambda: lost(absence.not_running(SOCKET, left_over=True), live()),
    "recording": lambda: replace(live(), feed=Feed(link=Link.LIVE, replay=True, replay_ended=True)),
}


def look(size: tuple[int, int], glyphs: Glyphs = UNICODE) -> Look:
    return Look(width=size[0], height=size[1], now=fake.NOW, zone=UTC, glyphs=glyphs)


def scene(view: View, size: tuple[int, int], ui: Ui | None = None, glyphs: Glyphs = UNICODE) -> Scene:
    return Scene(view=view, look=look(size, glyphs), ui=ui or Ui())


def on(screen: Screen, **changes: Any) -> Ui:
    return Ui().at(screen=screen, **changes)


def text(view: View, size: tuple[int, int], ui: Ui | None = None, glyphs: Glyphs = UNICODE) -> str:
    lines = frame(scene(view, size, ui, glyphs))
    assert len(lines) == size[1]
    assert {width(row) for row in lines} <= {size[0]}
    return "\n".join(plain(row).rstrip() for row in lines) + "\n"


def compare(name: str, shown: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8"), f"{name} differs; UPDATE_GOLDEN=1 writes it anew"


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", VIEWS)
def test_home(name: str, size: tuple[int, int]) -> None:
    compare(f"home-{name}-{size[0]}x{size[1]}", text(VIEWS[name](), size))


@pytest.mark.parametrize("screen", list(Screen)[1:], ids=lambda screen: screen.title)
@pytest.mark.parametrize("name", ["earning", "idle", "crowd"])
def test_other_screens(name: str, screen: Screen) -> None:
    compare(f"{screen.title.lower()}-{name}-100x30", text(VIEWS[name](), (100, 30), on(screen)))


@pytest.mark.parametrize("name", DIALOGS)
def test_boxes_over_the_screen(name: str) -> None:
    compare(f"box-{name}-80x24", text(live(), (80, 24), on(Screen.DEVICES).shows(DIALOGS[name])))


def test_without_utf8_nothing_but_ascii() -> None:
    shown = text(live(), (120, 40), glyphs=ASCII)
    assert shown.isascii()
    compare("home-ascii-120x40", shown)


# what the small screen must answer


@pytest.mark.parametrize("size", [(80, 24), (60, 15)])
def test_one_page_answers_the_four_questions(size: tuple[int, int]) -> None:
    shown = text(live(), size)
    for fact in ("EARNING", "today 1.840 cr", "gpu0", "94%", "18,204", "min left", "hub ● 23 ms"):
        assert fact in shown, fact


def test_this_nodes_ranks_are_marked() -> None:
    shown = text(live(), (80, 24))
    assert "[atlas-3:1]" in shown
    assert " bolt-1:0 " in shown
    assert "2.1 MB/s" in shown


@pytest.mark.parametrize("workers", range(1, 9))
@pytest.mark.parametrize("events", [0, 40])
def test_both_replicas_show_however_many_workers_the_node_has(workers: int, events: int) -> None:
    happened = [fake.event(index, "worker w-1 ended") for index in range(events)]
    shown = text(live(workers=[fake.worker(rank) for rank in range(workers)], events=happened), (80, 24))
    for fact in ("dp 2 x tp 1", "dp0", "dp1", "today 1.840 cr", "18,204"):
        assert fact.lower() in shown.lower(), fact


def test_a_killed_worker_shows_its_exit_reason() -> None:
    assert "last exit: killed by signal 9 (SIGKILL) (1 restart)" in text(live(), (80, 24))


def test_workers_of_a_job_that_came_to_its_end_raise_no_alarm() -> None:
    done = {"state": "exited", "last_exit": "released: finished", "pid": None}
    for ended, words in (("released: finished", "finished"), ("released: rank 3 was lost", "rank 3 was lost")):
        view = live(workers=[fake.worker(1, **{**done, "last_exit": ended})], jobs=[fake.job(state="ended")])
        shown = text(view, (120, 40), on(Screen.JOBS))
        assert words in shown
        assert ("last exit" in shown) == (words != "finished")
        assert ("Worker of rank 1" in shown) == (words != "finished")
        assert ("last exit" in jobs_as_text(view.snapshot, fake.NOW)) == (words != "finished")


def test_the_pause_box_says_the_consequence() -> None:
    lid = dialog(scene(live(), (80, 24), Ui(dialog=PAUSE)))
    shown = " ".join("".join(plain(row) for row in lid).replace("│", " ").split())
    assert "2 running workers of llama-1b are drained within 10 s" in shown
    assert "You earn nothing until this node works again" in shown
    assert "for one hour, until 15:13" in shown


def test_a_toast_takes_the_place_of_the_notice() -> None:
    ui = Ui(toast=Toast(text="pause failed: [red]", tone=Tone.BAD, until=1))
    assert "pause failed: [red]" in text(live(), (80, 24), ui)


def test_a_stale_screen_says_as_of_and_is_grey() -> None:
    lines = frame(scene(VIEWS["stale"](), (120, 40)))
    shown = "\n".join(plain(row) for row in lines)
    assert "as of 14:12, 38 s ago" in shown
    assert "[atlas-3:1]" in shown
    assert {span.tone for row in lines[2:-1] for span in row if span.text.strip()} == {Tone.FAINT}


def test_hostile_text_is_shown_as_it_is() -> None:
    shown = text(VIEWS["hostile"](), (120, 40))
    for literal in ("[00] x", "[red]", "[/]", "[b"):
        assert literal in shown, literal


@pytest.mark.parametrize("state", list(NodeState), ids=str)
@pytest.mark.parametrize("glyphs", [UNICODE, ASCII], ids=["unicode", "ascii"])
def test_every_state_is_a_word_and_a_glyph(state: NodeState, glyphs: Glyphs) -> None:
    word = state.value if state is not NodeState.UNKNOWN else "NEW-STATE"
    assert f"{glyphs.states[state]} {state.value} " in text(live(node=fake.node(word)), (80, 24), glyphs=glyphs)


ODD_SIZES = [(1, 1), (2, 3), (10, 3), (40, 10), (59, 15), (60, 14), (60, 15), (61, 30), (99, 31), (100, 30), (300, 90)]


@pytest.mark.parametrize(
    "ui",
    [*(on(screen, cursor=99) for screen in Screen), *(on(Screen.DEVICES).shows(lid) for lid in DIALOGS.values())],
    ids=lambda ui: f"{ui.screen.title}-{ui.dialog.title if ui.dialog else ''}",
)
def test_every_size_can_be_drawn(ui: Ui) -> None:
    for size in ODD_SIZES:
        for name in ("earning", "loading", "not-running", "crowd"):
            text(VIEWS[name](), size, ui)


@pytest.mark.parametrize(
    ("size", "says"), [((40, 10), "● EARNING  too small: 40x10"), ((10, 3), "● EARNING"), ((1, 1), "…")]
)
def test_too_small_says_so(size: tuple[int, int], says: str) -> None:
    assert text(live(), size).startswith(says)
