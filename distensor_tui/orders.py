"""What the owner may order of the node: pause, drain, resume. Each says its consequence first."""

from __future__ import annotations

from distensor_tui import format as fmt
from distensor_tui.actions import Action
from distensor_tui.dialogs import Choose, Option, Prompt, confirm
from distensor_tui.moments import moment
from distensor_tui.scene import Ask, Scene, Step

PAUSE_ENDS_WITHIN_S = 10
"""How long the supervisor lets running workers finish their step."""
RESUME = Ask(method="resume", done="Resumed.")
RETRY = Ask(method="reset_breaker", done="Broken workers are started again.")
HOUR_S = 3600


def _running(scene: Scene) -> str:
    """'2 running workers of llama-1b'; empty when none runs."""
    workers = [worker for worker in scene.view.snapshot.workers or () if worker.state != "exited"]
    names = sorted({worker.job_name or worker.job for worker in workers})
    return f"{fmt.plural(len(workers), 'running worker')} of {', '.join(names)}" if workers else ""


def pause_text(scene: Scene) -> str:
    running = _running(scene)
    if not running:
        return "No worker runs now, so no job is hurt. You earn nothing until this node works again."
    verb = "is" if running.startswith("1 ") else "are"
    return (
        f"Pause now: {running} {verb} drained within {PAUSE_ENDS_WITHIN_S} s, and the job lacks a rank. "
        "Credits earned so far stay yours. You earn nothing until this node works again."
    )


def drain_text(scene: Scene) -> str:
    running = _running(scene)
    ends = "ends" if running.startswith("1 ") else "end"
    now = f"{running} may finish the step at hand, then {ends}." if running else "No worker runs now."
    return f"Drain: no new work is taken. {now} Afterwards you earn nothing until you resume (r)."


def _for_one_hour(scene: Scene) -> Step:
    return scene.ui, Ask(method="pause", done="Paused for one hour.", params={"seconds": HOUR_S}, undo=RESUME)


def _until_resumed(scene: Scene) -> Step:
    return scene.ui, Ask(method="pause", done="Paused until you resume (r).", undo=RESUME)


def _ask_until_when(scene: Scene) -> Step:
    return scene.ui.shows(UNTIL), None


def not_a_moment(text: str) -> str:
    """The complaint about a text that `moment` does not take."""
    return "" if moment(text, 0.0, None) is not None else f"'{text}' is neither a time such as 18:00 nor 90m, 2h or 1d"


def _until(scene: Scene, text: str) -> Step:
    at = moment(text, scene.look.now, scene.look.zone)
    assert at is not None, "the prompt has checked it"
    done = f"Paused until {fmt.hour(at, scene.look.zone)}."
    return scene.ui, Ask(method="pause", done=done, params={"until": at}, undo=RESUME)


UNTIL = Prompt(
    title="Pause until",
    text="A time of today or tomorrow (18:00), or a length (90m, 2h, 1d).",
    label="until",
    check=not_a_moment,
    submit=_until,
)
PAUSE = Choose(
    title="Pause this node?",
    text=pause_text,
    options=(
        Option(
            key="1",
            label=lambda scene: f"for one hour, until {fmt.hour(scene.look.now + HOUR_S, scene.look.zone)}",
            step=_for_one_hour,
        ),
        Option(key="2", label="until a time that you name", step=_ask_until_when),
        Option(key="3", label="until you resume (r)", step=_until_resumed),
    ),
    refuse="do not pause",
)
DRAIN = confirm(
    "Drain this node?",
    drain_text,
    "drain",
    lambda scene: (scene.ui, Ask(method="drain", done="Draining: no new work is taken.", undo=RESUME)),
    no="do not drain",
)


def _none_broken(scene: Scene) -> str:
    broken = any(worker.state == "broken" for worker in scene.view.snapshot.workers or ())
    return "" if broken else "No worker is broken."


ACTIONS = (
    Action(
        name="Pause this node",
        keys=("p",),
        about="stop work and earnings: for an hour, until a time, until resumed",
        footer="pause",
        do=lambda scene: (scene.ui.shows(PAUSE), None),
    ),
    Action(
        name="Resume work",
        keys=("r",),
        about="work again after a pause or a drain",
        footer="resume",
        do=lambda scene: (scene.ui, RESUME),
    ),
    Action(
        name="Drain this node",
        keys=("d",),
        about="finish the step at hand, take no more work",
        footer="drain",
        do=lambda scene: (scene.ui.shows(DRAIN), None),
    ),
    Action(
        name="Start broken workers again",
        keys=("b",),
        about="try workers again that failed five times in a row",
        unless=_none_broken,
        do=lambda scene: (scene.ui, RETRY),
    ),
)
