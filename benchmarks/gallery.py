"""Pictures of the dashboard in docs/gallery: a real job on two real nodes, and the states around it.

    make gallery     or     python benchmarks/gallery.py [--write docs/gallery] [--recording FILE]

A hub, two supervisors and four workers run on this machine as `distensor demo` starts them, while `distensor record`
keeps what the first node's supervisor says. All screens are drawn from one moment of that recording; states that
would need something to be broken are the same moment with another state of the connection, and say so.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC
from pathlib import Path

from distensor.core.clock import SYSTEM_CLOCK
from distensor.demo.run import DemoSettings, run_on_mesh, two_modules
from distensor.training.sessions import session
from distensor_tui import absence
from distensor_tui.frame import frame
from distensor_tui.history import History, remember
from distensor_tui.model import HubState, NodeState, Problem, Snapshot
from distensor_tui.recording import Moment, load
from distensor_tui.scene import Feed, Link, Look, Scene, Screen, Ui, View
from distensor_tui.sections import apply
from distensor_tui.svg import picture
from distensor_tui.text import Line, plain
from distensor_tui.wire import Hello, Update

SIZES = ((80, 24), (120, 40), (200, 60))
SECONDS = 75.0
SOCKET = Path("/run/user/1000/distensor/supervisor.sock")


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """One view with what it shows; `real`: every word of the supervisor is from the recording."""

    name: str
    caption: str
    view: View
    now: float
    size: tuple[int, int] = (80, 24)
    real: bool = True


def record(target: Path) -> None:
    """The stream of the first of two nodes, from before the job until after it."""
    settings = replace(DemoSettings(), steps=100)
    module, _ = two_modules(settings)
    with session("local", workers=settings.workers, nodes=2, node_names=settings.nodes) as opened:
        assert opened.cluster is not None
        command = [sys.executable, "-m", "distensor_tui", "record", str(target), "--seconds", str(SECONDS)]
        recorder = subprocess.Popen([*command, "--socket", str(opened.cluster.nodes[0].socket)])
        SYSTEM_CLOCK.sleep(3.0)
        run_on_mesh(opened, module, settings, progress=False, on_step=lambda _step: None)
        recorder.wait(2 * SECONDS)


def seen(moments: Sequence[Moment], until: int) -> tuple[Snapshot, History]:
    """What a dashboard knows after the first `until` moments."""
    snapshot, history = Snapshot(), History()
    for moment in moments[:until]:
        if isinstance(moment.message, Update):
            snapshot = apply(snapshot, moment.message.data, full=moment.message.full)
            history = remember(history, snapshot, moment.at)
    return snapshot, history


def moment_in(moments: Sequence[Moment], state: NodeState, share: float) -> int:
    """How many moments to take to be that share into the time that the node was in `state`."""
    found, snapshot = [], Snapshot()
    for number, moment in enumerate(moments, 1):
        if isinstance(moment.message, Update):
            snapshot = apply(snapshot, moment.message.data, full=moment.message.full)
        if snapshot.node is not None and snapshot.node.state is state:
            found.append(number)
    assert found, f"the node was never {state}"
    return found[int(share * (len(found) - 1))]


def view_at(moments: Sequence[Moment], state: NodeState, share: float) -> tuple[View, float]:
    until = moment_in(moments, state, share)
    snapshot, history = seen(moments, until)
    return View(feed=Feed(link=Link.LIVE), snapshot=snapshot, history=history), moments[until - 1].at


def states(moments: Sequence[Moment]) -> list[State]:
    earning, now = view_at(moments, NodeState.EARNING, 0.5)
    idle, before = view_at(moments, NodeState.IDLE, 0.0)
    node, hub = earning.snapshot.node, earning.snapshot.hub
    assert node is not None
    assert hub is not None
    gone = Problem(code="hub_unreachable", message="connection refused", fix="does the hub run, is its address right?")
    offline = replace(hub, state=HubState.OFFLINE, since=now - 90, next_retry_at=now + 8, error=gone)
    other = Hello(schema_version=9, server_version="9.0.0", node="atlas", pid=1)

    def lost(why: absence.Absence, of: View | None = None) -> View:
        feed = Feed(link=Link.LOST, absence=why, last_at=now - 38 if of else None, retry_at=now + 2, source=str(SOCKET))
        return replace(of or View(), feed=feed)

    def hubless(view: View) -> View:
        changed = replace(view.snapshot, hub=offline, node=replace(node, state=NodeState.DEGRADED))
        return replace(view, snapshot=changed)

    paused = replace(idle.snapshot, node=replace(node, state=NodeState.PAUSED))
    return [
        State(name="loading", caption="the supervisor has not answered yet", view=View(feed=Feed()), now=now),
        State(name="empty", caption="before the first job: what happens now", view=idle, now=before),
        State(name="stale", caption="the supervisor went away 38 s ago; the last picture stays",
              view=lost(absence.not_running(SOCKET, left_over=True), earning), now=now, real=False),
        State(name="not running", caption="no supervisor", view=lost(absence.not_running(SOCKET)), now=now, real=False),
        State(name="not permitted", caption="somebody else's supervisor",
              view=lost(absence.not_permitted(SOCKET, "ann")), now=now, real=False),
        State(name="other version", caption="a supervisor of another version",
              view=lost(absence.other_version(other)), now=now, real=False),
        State(name="hub offline", caption="work goes on, the next try is named",
              view=hubless(earning), now=now, real=False),
        State(name="paused", caption="by the owner", view=replace(idle, snapshot=paused), now=before, real=False),
        State(name="too small", caption="50x12", view=earning, now=now, size=(50, 12)),
    ]  # fmt: skip


def drawn(view: View, now: float, size: tuple[int, int], screen: Screen = Screen.HOME) -> list[Line]:
    look = Look(width=size[0], height=size[1], now=now, zone=UTC)
    return frame(Scene(view=view, look=look, ui=Ui().at(screen=screen)))


def as_text(lines: Sequence[Line]) -> str:
    return "\n".join(plain(row).rstrip() for row in lines)


def write(folder: Path, moments: Sequence[Moment]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    view, now = view_at(moments, NodeState.EARNING, 0.5)
    parts = ["# The dashboard\n\n", INTRODUCTION]
    for screen in Screen:
        name = screen.name.lower()
        (folder / f"{name}.svg").write_text(picture(drawn(view, now, (120, 40), screen), "distensor - atlas"))
        parts.append(f"\n## {screen.name.capitalize()}\n![{screen.name.capitalize()} at 120x40]({name}.svg)\n")
        parts += [_block(f"{w}x{h}", drawn(view, now, (w, h), screen)) for w, h in SIZES if (w, h) != (120, 40)]
    parts.append("\n## States\n")
    for state in states(moments):
        how = "" if state.real else " (the state of the connection or node was set for the picture)"
        parts.append(_block(f"{state.name}: {state.caption}{how}", drawn(state.view, state.now, state.size)))
    (folder / "README.md").write_text("".join(parts))


INTRODUCTION = """Made by `make gallery`: a job of four workers (data parallel 2 x pipeline parallel 2) on two real
nodes of one machine, drawn from one moment of what the first node's supervisor said. 120x40 as pictures, the other
sizes as text.
"""


def _block(title: str, lines: Sequence[Line]) -> str:
    return f"\n{title}\n```text\n{as_text(lines)}\n```\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, default=Path("docs/gallery"))
    parser.add_argument("--recording", type=Path, help="draw from this one instead of making one; it is kept if new")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        recording = arguments.recording or Path(folder) / "job.jsonl"
        if not recording.exists():
            record(recording)
        write(arguments.write, load(recording))
    return 0


if __name__ == "__main__":
    sys.exit(main())
