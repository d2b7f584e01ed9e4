"""The Limits screen: what holds, what the gates read, and a change whose consequence is said before it is made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tui_fake as fake
from test_tui_screens import VIEWS, compare, live, on, scene, text

from distensor_tui.dialogs import Choose, Prompt
from distensor_tui.keys import press
from distensor_tui.limits import editor
from distensor_tui.model import Setting
from distensor_tui.scene import Ask, Scene, Screen
from distensor_tui.screens.limits import GATE_OF
from distensor_tui.settings import consequence_of, read_limits, source
from distensor_tui.wire import Answer

SIZES = [(80, 24), (120, 40), (200, 60)]
GATES = [
    fake.gate("temperature", reading="71 C", limit="80 C"),
    fake.gate("schedule", is_open=False, reading="outside mon-fri 18:00-08:00", at=fake.NOW + 3600),
    fake.gate("hub", reading="connected", limit="connected"),
]


def here(cursor: int = 0, **sections: Any) -> Scene:
    view = live(node=fake.node(why=GATES), **sections)
    return scene(view, (120, 40), on(Screen.LIMITS, cursor=cursor))


def typed(start: Scene, *keys: str) -> tuple[Scene, Any]:
    """The scene after the keys, and the effect of the last one."""
    effect = None
    for key in keys:
        ui, effect = press(start, key, key if len(key) == 1 else None)
        start = replace(start, ui=ui)
    return start, effect


def setting(key: str = "temperature_max_c") -> Setting:
    return next(row for row in read_limits(fake.limits(), []).rows if row.key == key)


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def test_the_screen(size: tuple[int, int]) -> None:
    view = live(node=fake.node(why=GATES))
    compare(f"limits-{size[0]}x{size[1]}", text(view, size, on(Screen.LIMITS)))


def test_every_text_is_read_as_an_owner_would_type_it() -> None:
    problems: list[str] = []
    rows = {row.key: row for row in read_limits(fake.limits(), problems).rows}
    assert problems == []
    assert rows["only_when_idle"].value == "false"
    assert rows["temperature_max_c"].value == "80"
    assert rows["strict"].value == "battery, disk"
    assert [source(rows[key]) for key in ("schedule", "temperature_max_c", "cpu_workers")] == ["default", "you", "file"]


@pytest.mark.parametrize("raw", [None, 3, {"rows": 5}, {"rows": [None]}, {"rows": [{"key": 7, "value": {}}]}])
def test_nonsense_is_named_and_breaks_nothing(raw: Any) -> None:
    view = live(limits=raw)
    assert "Limits" in text(view, (80, 24), on(Screen.LIMITS))


def test_a_change_says_first_what_comes_of_it_and_can_be_undone() -> None:
    start, _ = typed(here(cursor=2), "e")
    assert isinstance(start.ui.dialog, Prompt)
    asked, ask = typed(start, "backspace", "backspace", "7", "0", "enter")
    assert isinstance(ask, Ask)
    assert (ask.method, dict(ask.params)) == (
        "limits_set",
        {"key": "temperature_max_c", "value": "70", "check": True},
    )
    assert ask.then is not None
    result = {
        "closes": [{"gate": "temperature", "device": "gpu0", "reading": "71 C"}],
        "ends_workers": ["rank 1 of llama-1b"],
        "note": None,
    }
    told = replace(asked, ui=ask.then(asked, Answer(id="1", ok=True, result=result)))
    assert isinstance(told.ui.dialog, Choose)
    words = told.ui.dialog.text(told)
    assert words == (
        "This closes temperature (71 C): you earn nothing until it opens again. "
        "Running work is drained: rank 1 of llama-1b."
    )
    _, change = typed(told, "y")
    assert isinstance(change, Ask)
    assert dict(change.params) == {"key": "temperature_max_c", "value": "70"}
    assert change.undo is not None
    assert dict(change.undo.params) == {"key": "temperature_max_c", "value": "80"}
    _, nothing = typed(told, "escape")
    assert nothing is None


def test_a_wrong_value_comes_back_with_what_would_be_right() -> None:
    start, _ = typed(here(cursor=2), "e")
    asked, ask = typed(start, "x", "enter")
    assert isinstance(ask, Ask)
    assert ask.then is not None
    ui = ask.then(asked, Answer(id="1", ok=False, message="temperature_max_c = '80x': expected a number"))
    assert isinstance(ui.dialog, Prompt)
    assert (ui.dialog.value, ui.dialog.note) == ("80x", "temperature_max_c = '80x': expected a number")


def test_back_to_the_default_says_what_comes_of_it_too() -> None:
    asked, ask = typed(here(cursor=2), "x")
    assert isinstance(ask, Ask)
    assert (ask.method, dict(ask.params)) == ("limits_unset", {"key": "temperature_max_c", "check": True})
    assert ask.then is not None
    closes = [{"gate": "schedule", "device": None, "reading": "outside sat,sun"}]
    after = {**fake.limits()["rows"][2], "value": 70.0, "source": "file /etc/distensor/s.toml", "closes": closes}
    told = replace(asked, ui=ask.then(asked, Answer(id="1", ok=True, result=after)))
    assert isinstance(told.ui.dialog, Choose)
    assert told.ui.dialog.title == "temperature_max_c: 80 C becomes 70 C"
    assert "This closes schedule (outside sat,sun)" in told.ui.dialog.text(told)
    _, change = typed(told, "y")
    assert (change.method, change.done) == ("limits_unset", "temperature_max_c is 70 C now, from the file.")
    assert dict(change.undo.params) == {"key": "temperature_max_c", "value": "80"}


def test_only_what_the_owner_changed_goes_back() -> None:
    _, refused = typed(here(cursor=4), "x")
    assert not isinstance(refused, Ask)


def test_each_device_has_its_own_reading() -> None:
    hot = [{**fake.gate("temperature", reading=f"{c} C"), "device": f"gpu{i}"} for i, c in enumerate((71, 83))]
    shown = text(live(node=fake.node(why=hot)), (120, 40), on(Screen.LIMITS))
    assert "gpu0: 71 C; gpu1: 83 C" in shown
    own = [replace_row(fake.limits()["rows"][2], device="gpu1")]
    shown = text(live(node=fake.node(why=hot), limits={"file": "f", "rows": own}), (120, 40), on(Screen.LIMITS))
    assert "83 C" in shown
    assert "gpu0: 71 C" not in shown


def replace_row(row: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**row, **changes}


def test_undo_of_a_first_change_forgets_it() -> None:
    start, _ = typed(here(cursor=3), "e")
    asked, ask = typed(start, "9", "enter")
    assert isinstance(ask, Ask)
    assert ask.then is not None
    told = replace(asked, ui=ask.then(asked, Answer(id="1", ok=True, result={})))
    _, change = typed(told, "y")
    assert change.undo.method == "limits_unset"


def test_a_limit_of_one_device_is_changed_for_that_device() -> None:
    row = replace(setting(), device="GPU-7")
    prompt = editor(row)
    assert prompt.title == "Change temperature_max_c of GPU-7"
    _, ask = prompt.submit(here(), "75")
    assert isinstance(ask, Ask)
    assert dict(ask.params) == {"key": "temperature_max_c", "device": "GPU-7", "value": "75", "check": True}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({}, "No gate closes and no running work ends."),
        ({"closes": "x", "ends_workers": 3, "note": ["y"]}, "No gate closes and no running work ends."),
        ({"note": "it is kept, but the command line says 1 and wins"}, "Mind: it is kept"),
        (
            {"unread": [{"gate": "temperature", "device": "cpu", "reading": "cannot be read: no sensor"}]},
            "This limit has no effect on cpu: cannot be read: no sensor. `distensor limits set strict temperature` "
            "would stop work instead.",
        ),
        ({"unread": [{"gate": "metered", "device": None, "reading": "x"}, 3]}, "no effect on this machine: x."),
    ],
)
def test_consequences(result: dict[str, Any], words: str) -> None:
    assert words in consequence_of(result)


@pytest.mark.parametrize("name", ["loading", "no-sections", "not-running"])
def test_without_limits_the_screen_still_stands(name: str) -> None:
    assert text(VIEWS[name](), (80, 24), on(Screen.LIMITS))


CAPPED = [
    replace_row(fake.limits()["rows"][2], value=80.0),
    fake.setting("power_max_w", 350.0, "", unit="W", per_device=True),
    fake.setting("temperature_max_c", 0.0, "", device="gpu1"),
    fake.setting("vram_reserve_gib", 2.5, ""),
    fake.setting("only_when_idle", True, ""),
    fake.setting("run_on_metered", True, ""),
    fake.setting("schedule", "mon-fri 18:00-08:00; sat,sun", ""),
    fake.setting("upload_max_mb_s", 4.0, ""),
    fake.setting("bytes_month_gb", 200.0, ""),
    fake.setting("bytes_day_gb", 3.5, ""),
]


def home(size: tuple[int, int] = (120, 40), **sections: Any) -> list[str]:
    """The rows of the panel Limits on Home, without what stands beside it."""
    rows = text(live(**sections), size).splitlines()
    start = next(i for i, row in enumerate(rows) if "Limits 5" in row)
    inside = [row[2:].split("│")[0].rstrip() for row in rows[start + 1 :]]
    return inside[: next(i for i, row in enumerate(inside) if row.startswith("──"))]


def test_home_shows_what_is_allowed_beside_what_is_used() -> None:
    shown = home(limits={"file": "f", "rows": CAPPED}, usage=fake.usage(duty={"gpu0": 0.74, "cpu": 1.0}))
    assert shown == [
        "work     allowed",
        "caps     temp <= 80 C  power <= 350 W",
        "         no temperature_max_c on gpu1",
        "         vram 2.5 GiB kept  only when idle",
        "         mon-fri 18:00-08:00; sat,sun",
        "traffic  up 3.7/4 MB/s  down 3.4 MB/s",
        "moved    day 3.24/3.5 GB  month 41/200 GB",
        "slowed   gpu0 works 74% of its time",
    ]


def test_home_says_which_gate_is_closed_and_which_closes_next() -> None:
    assert home(node=fake.node(why=GATES))[:2] == ["✖ schedule: outside mon-fri 18:00-08:00,", "  opens 15:13"]
    first = fake.gate("schedule", reading="inside a window", at=fake.NOW + 7200)
    later = fake.gate("bytes_day", reading="1 GB today", at=fake.NOW + 9999)
    assert home(node=fake.node(why=[later, first]))[0] == "work     allowed  may close 16:13 (schedule)"
    assert home(node=fake.node(why=[]))[0] == "The supervisor names no gates."
    assert home(limits={"file": "f", "rows": []}, usage=None)[1:] == [
        "caps     none set; 5, then e, sets one",
        "traffic  up 3.7 MB/s  down 3.4 MB/s",
    ]


def test_a_device_that_is_slowed_down_is_a_notice_with_its_reason() -> None:
    hot = {**fake.gate("temperature", reading="81 C, slowed to 74%", limit="80 C"), "device": "gpu1"}
    view = live(node=fake.node(why=[hot]), usage=fake.usage(duty={"gpu1": 0.74}))
    assert "▲ gpu1 slowed to 74%: temperature 81 C, limit 80 C" in text(view, (80, 24))


@pytest.mark.parametrize("raw", [3, {"duty": 5}, {"duty": {"x": "y"}, "bytes_day": []}, {"bytes_month": "z"}])
def test_a_strange_usage_is_named_and_breaks_nothing(raw: Any) -> None:
    view = live(usage=raw)
    assert home(usage=raw)
    assert any(problem.startswith("usage") for problem in view.snapshot.problems)


def test_rates_stand_beside_the_limits_of_rates() -> None:
    shown = text(live(limits={"file": "f", "rows": CAPPED}), (120, 40), on(Screen.LIMITS))
    assert next(row for row in shown.splitlines() if "upload_max_mb_s" in row).split()[-3:] == ["3.7", "MB/s", "│"]


def test_the_gates_beside_limits_are_named_as_the_supervisor_names_them() -> None:
    """The names are the contract between two wheels that import nothing of each other."""
    from distensor_server.policy.table import BY_NAME
    from distensor_server.policy.table import GATES as NAMES

    assert set(GATE_OF.values()) <= set(NAMES)
    assert GATE_OF.keys() <= BY_NAME.keys()


def test_the_command_lists_and_changes_them() -> None:
    from distensor_tui.commands import limits

    listed = limits._listed(fake.limits())
    assert "temperature_max_c  80 C           you      above it work slows down" in listed
    assert listed.endswith(f"your changes are kept in {fake.OWNERS_FILE}")
    one = limits._listed({"rows": [fake.limits()["rows"][2]]})
    assert one.startswith("temperature_max_c = 80 C\n")
    assert "may be: 0 to 120 C; default: 0" in one
    changed = limits._changed({**fake.limits()["rows"][2], "before": 0.0, "closes": [], "ends_workers": []})
    assert changed == "temperature_max_c: no limit -> 80 C\n  No gate closes and no running work ends."


# the first value of one device


DEVICES = [fake.gpu(), fake.device("GPU-99aa1f00-1111", kind="cuda", name="RTX 3060"), fake.device("cpu")]


def test_a_device_gets_its_first_own_value_and_taking_it_back_leaves_none() -> None:
    asked, _ = typed(here(cursor=2, devices=DEVICES), "o")
    assert isinstance(asked.ui.dialog, Choose)
    assert [option.words(asked) for option in asked.ui.dialog.options] == [
        "NVIDIA RTX 4090 (gpu0): 80 C",
        "RTX 3060 (GPU-99aa1f00): 80 C",
        "AMD Ryzen 9 7950X (cpu): 80 C",
    ]
    chosen, _ = typed(asked, "2")
    assert isinstance(chosen.ui.dialog, Prompt)
    assert chosen.ui.dialog.title == "Change temperature_max_c of GPU-99aa1f00"
    tried, ask = typed(chosen, "backspace", "backspace", "7", "5", "enter")
    assert dict(ask.params) == {
        "key": "temperature_max_c",
        "device": "GPU-99aa1f00-1111",
        "value": "75",
        "check": True,
    }
    told = replace(tried, ui=ask.then(tried, Answer(id="1", ok=True, result={})))
    assert isinstance(told.ui.dialog, Choose)
    assert told.ui.dialog.title == "temperature_max_c of GPU-99aa1f00: 80 becomes 75"
    _, change = typed(told, "y")
    assert dict(change.params) == {"key": "temperature_max_c", "device": "GPU-99aa1f00-1111", "value": "75"}
    assert change.undo.method == "limits_unset", "though the value of the machine is the owner's"
    assert dict(change.undo.params) == {"key": "temperature_max_c", "device": "GPU-99aa1f00-1111"}


def test_a_device_with_a_value_of_its_own_goes_on_from_that() -> None:
    rows = fake.limits()["rows"]
    own = replace_row(rows[2], device="gpu0", value=70.0)
    given = {"file": fake.OWNERS_FILE, "rows": [*rows, own]}
    start = here(cursor=2, devices=DEVICES, limits=given)
    shown = [row for row in text(start.view, (120, 40), start.ui).splitlines() if "temperature_max_c" in row]
    assert [row.split()[1:4] for row in shown[1:2]] == [["temperature_max_c", "[gpu0]", "70"]], "below that of all"
    asked, _ = typed(start, "o")
    chosen, _ = typed(asked, "1")
    assert isinstance(chosen.ui.dialog, Prompt)
    assert chosen.ui.dialog.value == "70"


@pytest.mark.parametrize(("cursor", "words"), [(1, "holds for the whole machine"), (4, "holds for the whole machine")])
def test_what_holds_for_the_machine_is_not_changed_for_a_device(cursor: int, words: str) -> None:
    _, said = typed(here(cursor=cursor, devices=DEVICES), "o")
    assert words in said.text


def test_a_limit_of_gpus_is_not_offered_for_the_cpu() -> None:
    rows = [fake.setting("vram_reserve_gib", 0.0, "GPU memory that stays free for you; 0: none", per_device=True)]
    asked, _ = typed(here(devices=DEVICES, limits={"file": "f", "rows": rows}), "o")
    assert isinstance(asked.ui.dialog, Choose)
    assert len(asked.ui.dialog.options) == 2
    _, said = typed(here(devices=[fake.device("cpu")], limits={"file": "f", "rows": rows}), "o")
    assert said.text == "There is no device that it could be for."
