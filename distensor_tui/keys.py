"""What a key does: a pure step from one place in the dashboard to the next, with an effect or none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from distensor_tui import format as fmt
from distensor_tui import onboarding, orders
from distensor_tui.actions import Action, find, perform
from distensor_tui.dialogs import Info
from distensor_tui.finder import Palette
from distensor_tui.scene import Copy, Place, Play, Playing, Quit, Say, Scene, Screen, Step, Suspend, Ui
from distensor_tui.screens.page import facts_text, open_row, reads_down, selected, shown_rows
from distensor_tui.screens.table import SCREENS, notices, spec
from distensor_tui.text import EMPTY, Line, Tone, fill, line, wrap
from distensor_tui.views import gates
from distensor_tui.views.draw import paragraph

PAGE = 10
LONGEST_FILTER = 60
KEY_CELLS = 10


def press(scene: Scene, key: str, character: str | None) -> Step:
    """The step for one key."""
    if key == "ctrl+c":
        return scene.ui, Quit()
    if key == "ctrl+z":
        return scene.ui, Suspend()
    if scene.ui.dialog is not None:
        return scene.ui.dialog.press(scene, key, character)
    if scene.ui.typing:
        return _type(scene.ui, key, character), None
    if key in MOVES:
        return MOVES[key](scene)
    action = find(actions(scene), key)
    return perform(action, scene) if action else (scene.ui, None)


def paste(scene: Scene, text: str) -> Ui:
    """Text from the clipboard goes where letters go."""
    if scene.ui.dialog is not None:
        return scene.ui.dialog.paste(scene, text)
    if not scene.ui.typing:
        return scene.ui
    added = "".join(character for character in text if character.isprintable())
    return scene.ui.at(filter=(scene.ui.filter + added)[:LONGEST_FILTER], cursor=0)


def actions(scene: Scene) -> tuple[Action, ...]:
    """All that can be done here: the screen's own actions, then those of every screen."""
    return (*spec(scene).actions, *(REPLAY if scene.view.feed.replay else ()), *EVERYWHERE)


def everything(scene: Scene) -> tuple[Action, ...]:
    """What the palette offers: what can be done here, then what other screens can do, which it opens first."""
    others = [s for s in SCREENS.values() if s.screen is not scene.ui.screen]
    return (*actions(scene), *(_elsewhere(s.screen, action) for s in others for action in s.actions))


def _elsewhere(screen: Screen, action: Action) -> Action:
    def do(scene: Scene) -> Step:
        return perform(action, replace(scene, ui=_open(scene.ui, screen)))

    return replace(action, name=f"{screen.title}: {action.name}", keys=(str(int(screen)),), do=do, unless=_never)


def _never(_scene: Scene) -> str:
    return ""


# the filter line


def _type(ui: Ui, key: str, character: str | None) -> Ui:
    if key == "enter":
        return replace(ui, typing=False)
    if key == "escape":
        return replace(ui, typing=False).at(filter="")
    if key == "backspace":
        return ui.at(filter=ui.filter[:-1], cursor=0)
    if character and character.isprintable():
        return ui.at(filter=(ui.filter + character)[:LONGEST_FILTER], cursor=0)
    return ui


def _filter(scene: Scene) -> Step:
    """On Home, which has no list, it is the log's."""
    ui = scene.ui if scene.ui.screen is not Screen.HOME else _open(scene.ui, Screen.LOG)
    return replace(ui, typing=True).at(cursor=0), None


# moving


def _open(ui: Ui, screen: Screen) -> Ui:
    return replace(ui, place=Place(screen=screen), back=(), typing=False)


def _move(by: int) -> Callable[[Scene], Step]:
    def step(scene: Scene) -> Step:
        last = len(shown_rows(spec(scene), scene)) - 1
        way = -by if reads_down(spec(scene), scene) else by
        return (scene.ui.at(cursor=min(max(0, scene.ui.cursor + way), last)) if last >= 0 else scene.ui), None

    return step


ALL = 1_000_000
MOVES = {
    "up": _move(-1),
    "k": _move(-1),
    "down": _move(1),
    "j": _move(1),
    "pageup": _move(-PAGE),
    "pagedown": _move(PAGE),
    "home": _move(-ALL),
    "end": _move(ALL),
}


def _enter(scene: Scene) -> Step:
    if scene.ui.screen is Screen.HOME and onboarding.needs_key(scene):
        return onboarding.ask_for_key(scene)
    if scene.ui.screen is Screen.HOME:
        return scene.ui.go(Place(screen=Screen.JOBS)), None
    return open_row(spec(scene), scene)


def _escape(scene: Scene) -> Step:
    ui = scene.ui
    if ui.filter and not ui.back:
        return ui.at(filter="", cursor=0), None
    if ui.back:
        return replace(ui, place=ui.back[-1], back=ui.back[:-1]), None
    return _open(ui, Screen.HOME), None


def _log_of_row(scene: Scene) -> Step:
    row = selected(spec(scene), scene)
    if row is not None and row.file:
        return scene.ui.go(Place(screen=Screen.LOG, path=(row.file,))), None
    return scene.ui.go(Place(screen=Screen.LOG, filter=row.log if row else "")), None


def _no_row(scene: Scene) -> str:
    return "" if selected(spec(scene), scene) else "No row is selected here."


def _copy(scene: Scene) -> Step:
    row = selected(spec(scene), scene)
    return scene.ui, Copy(facts_text(row.facts())) if row else Say("No row is selected here.")


def _undo(scene: Scene) -> Step:
    return replace(scene.ui, undo=None), scene.ui.undo


# what can be read


def _why_rows(scene: Scene, size: int) -> list[Line]:
    node, look = scene.view.snapshot.node, scene.look
    if node is None:
        return [line(("The supervisor has not said anything yet.", Tone.DIM))]
    since = f" since {fmt.hour(node.state_since, look.zone)}" if node.state_since is not None else ""
    head = line((f"{look.glyphs.states[node.state]} {node.state}", Tone.STRONG), (since, Tone.DIM))
    rows = gates.page(scene.view, size, look) if node.why else [line(("The supervisor names no gates.", Tone.DIM))]
    return [head, EMPTY, *rows, EMPTY, *paragraph("Work comes while all gates are open.", size, Tone.DIM)]


def _notice_rows(scene: Scene, size: int) -> list[Line]:
    found = notices(scene)
    if not found:
        return [line(("Nothing needs your attention.", Tone.DIM))]
    mark = {Tone.BAD: scene.look.glyphs.no, Tone.WARN: scene.look.glyphs.warn}
    rows: list[Line] = []
    for tone, text in found:
        first, *others = wrap(text, size - 2)
        rows.append(line((f"{mark.get(tone, scene.look.glyphs.info)} ", tone), (first, tone)))
        rows += [line(("  " + other, tone)) for other in others]
    return rows


def _help_rows(scene: Scene, size: int) -> list[Line]:
    """The table of actions, as it is here."""
    here = spec(scene).actions
    rows = [row for action in here for row in _help_row(action.key, action.about, size)]
    own = [line((f"On this screen, {scene.ui.screen.title}", Tone.TITLE)), *rows, EMPTY] if rows else []
    if scene.view.feed.replay:
        played = [row for action in REPLAY for row in _help_row(action.key, action.about, size)]
        own = [line(("This is a recording", Tone.TITLE)), *played, EMPTY, *own]
    moves = _help_row("Up Down", "move in a list; PgUp PgDn Home End and j k too", size)
    common = [row for action in COMMON for row in _help_row(action.key, action.about, size)]
    screens = [row for action in TO_SCREENS for row in _help_row(action.key, action.about, size)]
    return [
        *own,
        line(("Everywhere", Tone.TITLE)),
        *moves,
        *common,
        EMPTY,
        line(("Screens", Tone.TITLE)),
        *screens,
    ]


def _help_row(key: str, about: str, size: int) -> list[Line]:
    first, *others = wrap(about, size - KEY_CELLS)
    return [line((fill(key, KEY_CELLS), Tone.KEY), first), *(line(" " * KEY_CELLS + other) for other in others)]


HELP = Info(title="Keys", content=_help_rows, key="question_mark")
WHY = Info(title="Why", content=_why_rows, key="w")
NOTICES = Info(title="Notices", content=_notice_rows, key="n")
PALETTE = Palette(actions=everything)


def _shows(dialog: Info | Palette) -> Callable[[Scene], Step]:
    return lambda scene: (scene.ui.shows(dialog), None)


def _screen_action(screen: Screen) -> Action:
    return Action(
        name=f"Open {screen.title}",
        keys=(str(int(screen)),),
        about=f"{screen.title}: {SCREENS[screen].about}",
        do=lambda scene: (_open(scene.ui, screen), None),
    )


def _play(what: Playing) -> Callable[[Scene], Step]:
    return lambda scene: (scene.ui, Play(what))


REPLAY = (
    Action(name="Hold the recording", keys=("space",), about="hold the recording, or go on", do=_play(Playing.HOLD)),
    Action(name="Play faster", keys=("plus", "equals_sign"), about="play twice as fast", do=_play(Playing.FASTER)),
    Action(name="Play slower", keys=("minus",), about="play half as fast", do=_play(Playing.SLOWER)),
    Action(name="Play again", keys=("backspace",), about="play from the beginning", do=_play(Playing.AGAIN)),
)
"""Only where a recording is shown."""
TO_SCREENS = tuple(_screen_action(screen) for screen in Screen)
COMMON = (
    Action(name="Open the row", keys=("enter",), about="open the selected row; on Home: the jobs", do=_enter),
    Action(
        name="Go back",
        keys=("escape",),
        about="back: close the box, drop the filter, leave what Enter opened",
        do=_escape,
        palette=False,
    ),
    Action(name="Filter this list", keys=("slash",), about="show only rows with these letters", do=_filter),
    *orders.ACTIONS,
    Action(
        name="Why it works or not", keys=("w",), about="why: every gate, open or closed", footer="why", do=_shows(WHY)
    ),
    Action(name="Notices", keys=("n",), about="all that needs your attention", do=_shows(NOTICES)),
    Action(name="Log of the row", keys=("l",), about="the log of the selected row", do=_log_of_row, unless=_no_row),
    Action(name="Copy the row", keys=("y",), about="copy the selected row", do=_copy, unless=_no_row),
    Action(
        name="Undo",
        keys=("u",),
        about="take back the last change, where that is possible",
        do=_undo,
        unless=lambda scene: "" if scene.ui.undo else "There is nothing to take back.",
    ),
    Action(
        name="Find an action",
        keys=("colon", "ctrl+p"),
        about="the palette: find anything by a few letters of its name; ^p too",
        do=_shows(PALETTE),
        palette=False,
    ),
    Action(name="Help", keys=("question_mark",), about="this help", footer="help", do=_shows(HELP)),
    Action(
        name="Quit this view",
        keys=("q",),
        about="quit this view; the supervisor goes on working",
        footer="quit view",
        do=lambda scene: (scene.ui, Quit()),
    ),
)
EVERYWHERE = (*COMMON, *TO_SCREENS)


def footer_keys(scene: Scene) -> list[tuple[str, str]]:
    """Key and word of what the footer shows, besides the screens."""
    return [(action.key, action.footer) for action in actions(scene) if action.footer]
