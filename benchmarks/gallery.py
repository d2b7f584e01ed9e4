"""Pictures of the dashboard in docs/gallery: a real job on two real nodes, and the states around it.

    make gallery     or     python benchmarks/gallery.py [--write docs/gallery] [--recording FILE]

A hub, two supervisors and four workers run on this machine as `distensor demo` starts them, while `distensor record`
keeps what the first node's supervisor says. All screens are drawn from one moment of that recording. What is broken in
the pictures was broken for them: the hub is killed while the job trains and started again, a worker of a second job is
killed until it is given up, and the node is paused. Where nobody answers, the pictures say what was set.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC
from pathlib import Path

from distensor.comm import new_key_and_csr
from distensor.core.clock import SYSTEM_CLOCK
from distensor.core.control import JobSpec, JobState
from distensor.core.ids import JobId, Rank
from distensor.demo.run import DemoSettings, run_on_mesh, two_modules
from distensor.training.local import LocalCluster
from distensor.training.sessions import Session, session
from distensor_tui import absence
from distensor_tui.frame import frame
from distensor_tui.history import History, remember
from distensor_tui.model import HubState, NodeState, Snapshot
from distensor_tui.once import converse
from distensor_tui.recording import Moment, load
from distensor_tui.scene import Feed, Link, Look, Scene, Screen, Ui, View
from distensor_tui.sections import apply
from distensor_tui.svg import picture
from distensor_tui.text import Line, plain
from distensor_tui.wire import Hello, Update

SIZES = ((80, 24), (120, 40), (200, 60))
SECONDS = 900.0
HUB_GONE_AT, HUB_BACK_AT, STEPS = 55, 75, 100
"""Steps of the job."""
KILLS_WITH_HUB = 3
PATIENCE_S = 120.0
SEEN_S = 2.5
"""So long a state stays before the next one: the recording has it for certain."""
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
    pictured: bool = False
    """Also at 120x40, as a picture."""


def record(target: Path) -> None:
    """The stream of the first of two nodes: before the job, the job without its hub for a while, and what breaks."""
    settings = replace(DemoSettings(), steps=STEPS)
    module, _ = two_modules(settings)
    with session("local", workers=settings.workers, nodes=2, node_names=settings.nodes) as opened:
        cluster = opened.cluster
        assert cluster is not None
        socket = cluster.nodes[0].socket
        command = [sys.executable, "-m", "distensor_tui", "record", str(target), "--seconds", str(SECONDS)]
        recorder = subprocess.Popen([*command, "--socket", str(socket)])
        try:
            SYSTEM_CLOCK.sleep(SEEN_S)
            run_on_mesh(opened, module, settings, progress=False, on_step=lambda step: _pull_hub(cluster, step.step))
            with converse(socket) as asked:
                for job in asked.snapshot()[0].live_jobs:  # the trainer would keep its workers until the session ends
                    opened.client.end_job(JobId(job.id), JobState.FINISHED)
            SYSTEM_CLOCK.sleep(2 * SEEN_S)
            break_a_worker(opened, settings, socket)
            with converse(socket) as owner:
                owner.ask("pause", {"seconds": 3600})
                SYSTEM_CLOCK.sleep(SEEN_S)
        finally:
            recorder.terminate()
            recorder.wait(20)


def _pull_hub(cluster: LocalCluster, step: int) -> None:
    if step == HUB_GONE_AT:
        os.kill(cluster.hub.pid, signal.SIGKILL)
    elif step == HUB_BACK_AT:
        cluster.restart_hub()


def break_a_worker(opened: Session, settings: DemoSettings, socket: Path) -> None:
    """Kill the first worker of a new job of this node again and again, until the supervisor gives it up.

    The hub would end a job whose worker cannot be started, and the worker with it: it is killed too, after a while.
    """
    assert opened.cluster is not None
    _, csr_pem = new_key_and_csr(JobId("new"), None, Rank(-1))
    spec = JobSpec(submission="gallery", name="crash-test", parallel=settings.parallel, csr_pem=csr_pem)
    job, _ = opened.client.submit_job(spec)
    killed: set[int] = set()
    deadline = SYSTEM_CLOCK.monotonic() + PATIENCE_S
    while SYSTEM_CLOCK.monotonic() < deadline:
        with converse(socket) as asked:
            found = [worker for worker in asked.snapshot()[0].workers or () if worker.job == job]
        if any(worker.state == "broken" for worker in found):
            break
        if found and found[0].pid not in (None, *killed):
            assert found[0].pid is not None
            os.kill(found[0].pid, signal.SIGKILL)
            killed.add(found[0].pid)
            if len(killed) == KILLS_WITH_HUB:
                SYSTEM_CLOCK.sleep(0.5)
                os.kill(opened.cluster.hub.pid, signal.SIGKILL)
        SYSTEM_CLOCK.sleep(0.2)
    SYSTEM_CLOCK.sleep(SEEN_S)
    opened.cluster.restart_hub()
    opened.client.end_job(job, JobState.FAILED, "a worker was killed on purpose")
    SYSTEM_CLOCK.sleep(2 * SEEN_S)


def seen(moments: Sequence[Moment], until: int) -> tuple[Snapshot, History]:
    """What a dashboard knows after the first `until` moments."""
    snapshot, history = Snapshot(), History()
    for moment in moments[:until]:
        if isinstance(moment.message, Update):
            snapshot = apply(snapshot, moment.message.data, full=moment.message.full)
            history = remember(history, snapshot, moment.at)
    return snapshot, history


def moment_in(moments: Sequence[Moment], fits: Callable[[Snapshot], bool], share: float) -> int:
    """How many moments to take to be that share into the time that the snapshot fitted."""
    found, snapshot = [], Snapshot()
    for number, moment in enumerate(moments, 1):
        if isinstance(moment.message, Update):
            snapshot = apply(snapshot, moment.message.data, full=moment.message.full)
        if snapshot.node is not None and fits(snapshot):
            found.append(number)
    assert found, "the recording has no such moment"
    return found[int(share * (len(found) - 1))]


def view_at(moments: Sequence[Moment], fits: Callable[[Snapshot], bool], share: float) -> tuple[View, float]:
    until = moment_in(moments, fits, share)
    snapshot, history = seen(moments, until)
    return View(feed=Feed(link=Link.LIVE), snapshot=snapshot, history=history), moments[until - 1].at


def is_in(state: NodeState) -> Callable[[Snapshot], bool]:
    return lambda snapshot: snapshot.node is not None and snapshot.node.state is state


def trains(snapshot: Snapshot) -> bool:
    """Works with its hub."""
    connected = snapshot.hub is not None and snapshot.hub.state is HubState.CONNECTED
    return connected and is_in(NodeState.EARNING)(snapshot)


def without_hub(snapshot: Snapshot) -> bool:
    """Works, and its hub is away."""
    away = snapshot.hub is not None and snapshot.hub.state is HubState.OFFLINE
    return away and any(worker.state == "running" for worker in snapshot.workers or ())


def has_broken(snapshot: Snapshot) -> bool:
    return any(worker.state == "broken" for worker in snapshot.workers or ())


def restarting(snapshot: Snapshot) -> bool:
    connected = snapshot.hub is not None and snapshot.hub.state is HubState.CONNECTED
    return connected and any(worker.state == "backoff" for worker in snapshot.workers or ())


def states(moments: Sequence[Moment]) -> list[State]:
    earning, now = view_at(moments, trains, 0.5)
    idle, before = view_at(moments, is_in(NodeState.IDLE), 0.0)
    other = Hello(schema_version=9, server_version="9.0.0", node="atlas", pid=1)

    def real(name: str, caption: str, fits: Callable[[Snapshot], bool], share: float = 0.7) -> State:
        view, at = view_at(moments, fits, share)
        return State(name=name, caption=caption, view=view, now=at, pictured=True)

    def lost(why: absence.Absence, of: View | None = None) -> View:
        feed = Feed(link=Link.LOST, absence=why, last_at=now - 38 if of else None, retry_at=now + 2, source=str(SOCKET))
        return replace(of or View(), feed=feed)

    return [
        State(name="loading", caption="the supervisor has not answered yet", view=View(feed=Feed()), now=now),
        State(name="empty", caption="before the first job: what happens now", view=idle, now=before),
        real("hub offline", "the hub was killed; work goes on, the next try is named", without_hub),
        real("degraded", "a worker was killed, and waits to be started again", restarting, 0.0),
        real("error", "a worker killed five times and given up, and the hub too: code, cause, fix and log", has_broken),
        real("paused", "by the owner", is_in(NodeState.PAUSED)),
        State(name="stale", caption="the supervisor went away 38 s ago; the last picture stays",
              view=lost(absence.not_running(SOCKET, left_over=True), earning), now=now, real=False),
        State(name="not running", caption="no supervisor", view=lost(absence.not_running(SOCKET)), now=now, real=False),
        State(name="not permitted", caption="somebody else's supervisor",
              view=lost(absence.not_permitted(SOCKET, "ann")), now=now, real=False),
        State(name="other version", caption="a supervisor of another version",
              view=lost(absence.other_version(other)), now=now, real=False),
        State(name="too small", caption="50x12", view=earning, now=now, size=(50, 12)),
    ]  # fmt: skip


def drawn(view: View, now: float, size: tuple[int, int], screen: Screen = Screen.HOME) -> list[Line]:
    look = Look(width=size[0], height=size[1], now=now, zone=UTC)
    return frame(Scene(view=view, look=look, ui=Ui().at(screen=screen)))


def as_text(lines: Sequence[Line]) -> str:
    return "\n".join(plain(row).rstrip() for row in lines)


def write(folder: Path, moments: Sequence[Moment]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    view, now = view_at(moments, trains, 0.5)
    parts = ["# The dashboard\n\n", INTRODUCTION]
    for screen in Screen:
        name = screen.name.lower()
        (folder / f"{name}.svg").write_text(picture(drawn(view, now, (120, 40), screen), "distensor - atlas"))
        parts.append(f"\n## {screen.name.capitalize()}\n![{screen.name.capitalize()} at 120x40]({name}.svg)\n")
        parts += [_block(f"{w}x{h}", drawn(view, now, (w, h), screen)) for w, h in SIZES if (w, h) != (120, 40)]
    parts.append("\n## States\n")
    for state in states(moments):
        how = "" if state.real else " (the state of the connection was set for the picture)"
        if state.pictured:
            file = f"{state.name.replace(' ', '-')}.svg"
            (folder / file).write_text(picture(drawn(state.view, state.now, (120, 40)), "distensor - atlas"))
            parts.append(f"\n### {state.name.capitalize()}\n![{state.caption}]({file})\n")
        parts.append(_block(f"{state.name}: {state.caption}{how}", drawn(state.view, state.now, state.size)))
    (folder / "README.md").write_text("".join(parts))


INTRODUCTION = """Made by `make gallery`: a job of four workers (data parallel 2 x pipeline parallel 2) on two real
nodes of one machine, drawn from one moment of what the first node's supervisor said. 120x40 as pictures, the other
sizes as text. For the states below, the hub was killed in the middle of the job, a worker of a second job again and
again, and the node was paused.
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
