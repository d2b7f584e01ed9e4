"""The log: events, newest first, or a file as it was written. The cursor starts at what just happened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from distensor_tui import logfile
from distensor_tui.actions import Action
from distensor_tui.dialogs import Choose, Option
from distensor_tui.logfile import SUPERVISOR
from distensor_tui.model import Event, Severity
from distensor_tui.scene import Ask, Place, Scene, Screen, Step
from distensor_tui.screens.page import Page, Row, ScreenSpec, selected_panel
from distensor_tui.text import Line, Tone, line
from distensor_tui.views import events, lines
from distensor_tui.views.draw import paragraph

SEVERITY = "log.severity"
_LEVELS = ("all", "warnings and errors", "errors")
_RANK = {Severity.INFO: 0, Severity.WARNING: 1, Severity.ERROR: 2}
_TONES = {Tone.WARN: 1, Tone.BAD: 2}
MOST_FILES = 9


def page(scene: Scene) -> Page:
    return _file(scene, scene.ui.place.path[0]) if scene.ui.place.path else _events(scene)


def _level(scene: Scene) -> int:
    return _LEVELS.index(scene.ui.own.get(SEVERITY, _LEVELS[0]))


def _head(scene: Scene, what: str) -> list[Line]:
    level = _level(scene)
    shown = (f"   {_LEVELS[level]} only", Tone.WARN) if level else ("", Tone.DIM)
    return [line((what, Tone.DIM), shown)]


def _events(scene: Scene) -> Page:
    look, level = scene.look, _level(scene)
    known = scene.view.snapshot.events or ()
    rows = [_event_row(event, scene) for event in known[::-1] if _RANK[event.severity] >= level]
    text = f"No {_LEVELS[level]} among {len(known)} events; s shows the others." if known else _nothing(scene)
    below = selected_panel(rows, scene, look.width - 6)
    return Page("Log", _head(scene, "newest first"), rows, paragraph(text, look.width - 6, Tone.DIM), below)


def _nothing(scene: Scene) -> str:
    if scene.view.snapshot.events is None:
        return "Waiting for the supervisor's events..."
    return "Nothing has happened yet. Events come when a job, a worker or the hub does something."


def _event_row(event: Event, scene: Scene) -> Row:
    return Row(
        cells=events.row(event, scene.look),
        facts=partial(events.detail, event, scene.look),
        words=str(event.severity),
        key=f"{event.at} {event.source} {event.text}",
    )


def _file(scene: Scene, name: str) -> Page:
    """The last lines of a worker's log file, or of the supervisor's own."""
    return Page(
        f"Log of {name}", _head(scene, "newest last"), file_rows(scene, name), file_empty(scene, name), tail=True
    )


def file_rows(scene: Scene, name: str) -> Sequence[Row]:
    found = logfile.lines(scene.ui, name) or ()
    level = _level(scene)
    return [
        Row(cells=lines.row(text, scene.look.glyphs), facts=partial(_line_facts, text), key=text)
        for text in found
        if _TONES.get(lines.tone_of(text), 0) >= level
    ]


def _line_facts(text: str) -> list[tuple[str, str]]:
    return [("line", text)]


def file_empty(scene: Scene, name: str) -> list[Line]:
    size = scene.look.width - 6
    if found := logfile.problem(scene.ui, name):
        return paragraph(f"Not available: {found}", size, Tone.WARN)
    if logfile.lines(scene.ui, name) is None:
        return paragraph("Reading the file...", size, Tone.DIM)
    return paragraph("No line to show: the file is empty, or s hides what it has.", size, Tone.DIM)


def poll(scene: Scene) -> Ask | None:
    return logfile.ask(scene.ui.place.path[0]) if scene.ui.place.path else None


def _next_level(scene: Scene) -> Step:
    level = _LEVELS[(_level(scene) + 1) % len(_LEVELS)]
    return scene.ui.remembers(SEVERITY, level).at(cursor=0), None


def _newest(scene: Scene) -> Step:
    return scene.ui.at(cursor=0), None


def _choose_file(scene: Scene) -> Step:
    names = [SUPERVISOR, *(worker.id for worker in scene.view.snapshot.workers or ())][:MOST_FILES]
    options = [Option(key="0", label="events of this node", step=_opener(()))]
    options += [Option(key=str(i), label=f"file of {name}", step=_opener((name,))) for i, name in enumerate(names, 1)]
    text = "Events are what the supervisor noticed; files hold what a program printed."
    dialog = Choose(title="Which log?", text=lambda _scene: text, options=tuple(options), refuse="stay here")
    return scene.ui.shows(dialog), None


def _opener(path: tuple[str, ...]) -> Callable[[Scene], Step]:
    def step(scene: Scene) -> Step:
        return scene.ui.go(Place(screen=Screen.LOG, path=path)), None

    return step


SPEC = ScreenSpec(
    screen=Screen.LOG,
    about="what happened on this node, and the log files",
    page=page,
    poll=poll,
    actions=(
        Action(
            name="Show other severities",
            keys=("s",),
            about="all, warnings and errors, or errors only",
            footer="severity",
            do=_next_level,
        ),
        Action(
            name="Open a log file",
            keys=("f",),
            about="the log file of the supervisor or of a worker",
            footer="files",
            do=_choose_file,
        ),
        Action(
            name="Follow the newest",
            keys=("g",),
            about="back to the newest line and stay there; elsewhere the cursor keeps its line",
            do=_newest,
        ),
    ),
)
