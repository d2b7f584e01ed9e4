"""Keys and clicks: each a pure step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tui_fake as fake
from test_tui_screens import live, on, scene

from distensor_tui.actions import Action
from distensor_tui.dialogs import Prompt
from distensor_tui.finder import Palette, matching, score
from distensor_tui.frame import frame
from distensor_tui.keys import EVERYWHERE, HELP, NOTICES, PALETTE, WHY, actions, everything, paste, press
from distensor_tui.orders import DRAIN, HOUR_S, PAUSE, RESUME, RETRY, UNTIL, moment, not_a_moment
from distensor_tui.scene import Ask, Copy, Dialog, Effect, Place, Quit, Say, Scene, Screen, Ui
from distensor_tui.screens.table import SCREENS
from distensor_tui.text import Tone, line, plain
from distensor_tui.views.hits import key_at

NAMES = {"question_mark": "?", "slash": "/", "colon": ":", "space": " "}


def at(ui: Ui | None = None) -> Scene:
    return scene(live(), (100, 30), ui)


def steps(keys: str, ui: Ui | None = None) -> tuple[Ui, Effect]:
    """Press several keys; the last effect."""
    ui, effect = ui or Ui(), None
    for key in keys.split():
        ui, effect = press(at(ui), key, key if len(key) == 1 else NAMES.get(key))
    return ui, effect


@pytest.mark.parametrize("screen", list(Screen), ids=lambda screen: screen.title)
def test_a_digit_opens_its_screen(screen: Screen) -> None:
    assert steps(f"2 down {int(screen)}")[0] == on(screen)


@pytest.mark.parametrize(
    ("keys", "dialog", "effect"),
    [
        ("p", PAUSE, None),
        ("p 1", None, Ask(method="pause", done="Paused for one hour.", params={"seconds": HOUR_S}, undo=RESUME)),
        ("p 2", UNTIL, None),
        ("p 3", None, Ask(method="pause", done="Paused until you resume (r).", undo=RESUME)),
        ("p escape", None, None),
        ("p enter", None, None),
        ("p up enter", None, Ask(method="pause", done="Paused until you resume (r).", undo=RESUME)),
        ("p x", PAUSE, None),
        ("p y", PAUSE, None),
        ("p r", PAUSE, None),
        ("d", DRAIN, None),
        ("d y", None, Ask(method="drain", done="Draining: no new work is taken.", undo=RESUME)),
        ("d n", None, None),
        ("d enter", None, None),
        ("d 1", DRAIN, None),
        ("r", None, RESUME),
        ("b", None, Say("No worker is broken.")),
        ("w", WHY, None),
        ("w q", None, None),
        ("w w", None, None),
        ("n", NOTICES, None),
        ("question_mark", HELP, None),
        ("colon", PALETTE, None),
        ("ctrl+p", PALETTE, None),
        ("q", None, Quit()),
        ("ctrl+c", None, Quit()),
        ("p ctrl+c", PAUSE, Quit()),
        ("y", None, Say("No row is selected here.")),
        ("u", None, Say("There is nothing to take back.")),
    ],
)
def test_actions_and_their_confirmations(keys: str, dialog: Dialog | None, effect: Effect) -> None:
    ui, found = steps(keys)
    assert (ui.dialog, found) == (dialog, effect)


def test_a_broken_worker_gets_another_try() -> None:
    broken = scene(live(workers=[fake.worker(1), fake.worker(2, state="broken")]), (100, 30), None)
    assert press(broken, "b", "b") == (broken.ui, RETRY)


@pytest.mark.parametrize(
    ("keys", "cursor"),
    [("down", 1), ("down up up", 0), ("j j k", 1), ("pagedown", 5), ("end", 5), ("end down", 5), ("end home", 0)],
)
def test_the_cursor_stays_in_the_table(keys: str, cursor: int) -> None:
    assert steps(keys, on(Screen.LOG))[0].cursor == cursor


def test_without_rows_nothing_moves_and_nothing_opens() -> None:
    empty = scene(live(jobs=[]), (100, 30), on(Screen.JOBS))
    for key in ("down", "enter"):
        assert press(empty, key, None) == (empty.ui, None)


def test_enter_drills_down_and_escape_goes_back() -> None:
    ui, _ = steps("enter")
    assert ui.place == Place(screen=Screen.JOBS)
    ui, _ = steps("6 down enter")
    assert ui.place.path == ("cpu",)
    ui, _ = steps("escape escape 7 enter", ui)
    assert ui.dialog is not None
    assert ui.dialog.title == "Details"
    ui, _ = steps("escape escape", ui)
    assert ui == Ui()


@pytest.mark.parametrize("screen", list(Screen)[1:], ids=lambda screen: screen.title)
def test_every_list_can_be_filtered(screen: Screen) -> None:
    ui, effect = steps("slash q p backspace 1 enter", on(screen))
    assert (ui.screen, ui.filter, ui.typing, effect) == (screen, "q1", False, None)
    assert steps("escape", ui)[0] == replace(ui).at(filter="")
    assert steps("slash a escape", on(screen))[0].filter == ""


def test_the_filter_leaves_the_rows_that_contain_it() -> None:
    rows = [plain(row) for row in frame(at(on(Screen.DEVICES, filter="rtx")))]
    shown = "\n".join(rows)
    assert "gpu0" in shown
    assert "Ryzen" not in shown
    assert "filter: rtx  1 of 2" in shown
    nothing = "\n".join(plain(row) for row in frame(at(on(Screen.DEVICES, filter="[red]"))))
    assert "Nothing here contains '[red]'" in nothing


def test_on_home_the_filter_is_the_logs() -> None:
    assert steps("slash k i l l enter")[0].place == Place(screen=Screen.LOG, filter="kill")


def test_the_log_of_a_row_and_back_to_it() -> None:
    ui, _ = steps("6 down l")
    assert ui.place == Place(screen=Screen.LOG, filter="cpu")
    assert steps("escape", ui)[0].place == Place(screen=Screen.DEVICES, cursor=1)


def test_copy_takes_the_facts_of_the_row() -> None:
    _, effect = steps("6 y")
    assert isinstance(effect, Copy)
    assert "name: NVIDIA RTX 4090" in effect.text
    assert steps("6 enter y")[1] == effect


def test_undo_sends_the_opposite_once() -> None:
    ui, effect = steps("u", Ui(undo=RESUME))
    assert effect == RESUME
    assert steps("u", ui)[1] == Say("There is nothing to take back.")


# the table of actions


def all_actions() -> list[Action]:
    return [*EVERYWHERE, *(action for spec in SCREENS.values() for action in spec.actions)]


@pytest.mark.parametrize("screen", list(Screen), ids=lambda screen: screen.title)
@pytest.mark.parametrize("replay", [False, True])
def test_no_key_means_two_things_on_a_screen(screen: Screen, replay: bool) -> None:
    """Also where a recording is shown, which has keys of its own."""
    scene = at(on(screen))
    scene = replace(scene, view=replace(scene.view, feed=replace(scene.view.feed, replay=replay)))
    keys = [key for action in actions(scene) for key in action.keys]
    assert len(keys) == len(set(keys))


def test_every_action_has_a_key_and_a_line_of_help_without_function_keys() -> None:
    for action in all_actions():
        assert action.keys, action.name
        assert action.about, action.name
        assert not any(key.startswith("f") and key[1:].isdigit() for key in action.keys), action.name
        assert all("ctrl" not in key or key == "ctrl+p" for key in action.keys), action.name


@pytest.mark.parametrize("screen", list(Screen), ids=lambda screen: screen.title)
def test_help_lists_every_action_of_the_screen(screen: Screen) -> None:
    here = at(on(screen))
    rows = [plain(row) for row in HELP.content(here, 200)]
    for action in actions(here):
        assert any(action.key in row and action.about in row for row in rows), action.name


def test_the_palette_offers_the_actions_of_all_screens() -> None:
    names = [action.name for action in everything(at())]
    assert len(names) == len(set(names))
    for spec in SCREENS.values():
        for action in spec.actions:
            assert any(action.name in name for name in names), action.name


@pytest.mark.parametrize(
    ("letters", "first"),
    [
        ("pau", "Pause this node"),
        ("pn", "Pause this node"),
        ("res", "Resume work"),
        ("dev", "Open Devices"),
        ("qt", "Quit this view"),
    ],
)
def test_a_few_letters_find_an_action(letters: str, first: str) -> None:
    assert matching(letters, EVERYWHERE)[0].name == first


def test_letters_that_do_not_fit_find_nothing() -> None:
    assert score("zz", "Pause this node") is None
    assert matching("zzz", EVERYWHERE) == []
    ui, effect = steps("colon z z z enter")
    assert isinstance(ui.dialog, Palette)
    assert effect is None


def test_the_palette_does_what_it_found() -> None:
    assert steps("colon p a u enter")[0].dialog == PAUSE
    assert steps("colon o p e n j enter")[0] == on(Screen.JOBS)
    assert steps("colon q u i t enter")[1] == Quit()
    assert steps("colon u n d o enter")[1] == Say("There is nothing to take back.")
    assert steps("colon x backspace down up escape")[0] == Ui()


# a line to type


def prompt(**changes: object) -> Prompt:
    return replace(
        Prompt(title="t", text="say", label="x", submit=lambda scene, text: (scene.ui, Say(text)), check=_at_most_3),
        **changes,
    )


def _at_most_3(text: str) -> str:
    return "too long" if len(text) > 3 else ""


def test_a_prompt_takes_letters_and_edits_them() -> None:
    ui, effect = steps("a b space backspace left c home x end y backspace left delete enter", Ui(dialog=prompt()))
    assert (ui.dialog, effect) == (None, Say("xac"))


def test_a_prompt_says_what_is_wrong_and_stays() -> None:
    ui, effect = steps("a b c d enter", Ui(dialog=prompt()))
    assert effect is None
    assert "too long" in "\n".join(plain(row) for row in frame(at(ui)))
    assert steps("backspace enter", ui)[1] == Say("abc")


def test_a_secret_is_never_on_the_screen_nor_in_a_repr() -> None:
    ui = paste(at(Ui(dialog=prompt(secret=True))), "dt_p_geheim\n\x1b[31m")
    here = at(ui)
    assert "geheim" not in "\n".join(plain(row) for row in frame(here))
    assert "geheim" not in repr(here)
    assert "*" * len("dt_p_geheim[31m") in "\n".join(plain(row) for row in frame(here))
    assert "geheim" not in repr(Ask(method="auth_login", done="", params={"key": "geheim"}))


def test_pasting_goes_where_letters_go() -> None:
    typing = steps("7 slash")[0]
    assert paste(at(typing), "ki\nll").filter == "kill"
    assert paste(at(), "q") == Ui()
    assert paste(at(Ui(dialog=PAUSE)), "1").dialog == PAUSE


def test_a_long_box_scrolls() -> None:
    small = replace(at(Ui(dialog=HELP)), look=replace(at().look, height=15))
    before = "\n".join(plain(row) for row in frame(small))
    ui, _ = press(small, "end", None)
    after = "\n".join(plain(row) for row in frame(replace(small, ui=ui)))
    assert "what happened on this node" not in before
    assert "what happened on this node" in after
    end = replace(small, ui=ui)
    assert press(end, "down", None)[0] == ui
    up, _ = press(end, "up", None)
    assert frame(replace(small, ui=up)) != frame(end)
    assert press(end, "home", None)[0].dialog == HELP


# moments to pause until

NOON = 1_790_000_000.0 - (1_790_000_000 % 86400) + 12 * 3600


@pytest.mark.parametrize(
    ("text", "after"),
    [("18:00", 6 * 3600), ("9:30", 21.5 * 3600), ("12:00", 24 * 3600), ("90m", 5400), ("2h", 7200), ("1d", 86400)],
)
def test_a_moment_is_a_time_or_a_length(text: str, after: float) -> None:
    assert moment(text, NOON, at().look.zone) == NOON + after


@pytest.mark.parametrize("text", ["", "24:00", "12:60", "soon", "0h", "-1h", "18", "[/]"])
def test_what_is_no_moment_is_refused_by_its_words(text: str) -> None:
    assert not_a_moment(text) == f"'{text}' is neither a time such as 18:00 nor 90m, 2h or 1d"


def test_pause_until_sends_the_moment() -> None:
    ui, effect = steps("p 2 9 0 m enter")
    assert ui.dialog is None
    assert isinstance(effect, Ask)
    assert effect.params == {"until": at().look.now + 5400}
    assert effect.done == "Paused until 15:43."


@pytest.mark.parametrize(
    ("x", "key"), [(0, None), (1, "p"), (3, "p"), (9, None), (10, "question_mark"), (13, "question_mark"), (99, None)]
)
def test_a_click_is_the_key_it_shows(x: int, key: str | None) -> None:
    row = line(" ", ("p", Tone.KEY), (" pause", Tone.DIM), "  ", ("?", Tone.KEY), (" help", Tone.DIM))
    assert key_at(row, x) == key


def test_a_click_on_a_panels_title_opens_its_screen() -> None:
    row = line(("+-", Tone.BORDER), (" Jobs", Tone.TITLE), (" 2", Tone.KEY), ("----", Tone.BORDER))
    assert [key_at(row, x) for x in (0, 3, 8, 10)] == [None, "2", "2", None]
