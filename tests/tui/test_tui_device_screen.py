"""The Devices screen: a table that fits 80 columns, bars where there is room, one device in full, measuring it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tui_fake as fake
from test_tui_device_detail import BENCHMARK, FULL
from test_tui_screens import VIEWS, compare, live, look, on, scene, text

from distensor_tui.history import History
from distensor_tui.keys import press
from distensor_tui.model import Snapshot
from distensor_tui.scene import Ask, Feed, Link, Say, Screen, Ui, View
from distensor_tui.sections import apply
from distensor_tui.text import Tone
from distensor_tui.views.device import gauges
from distensor_tui.views.devices import short_id, state

CARD = "GPU-4b2c1a9f-8d3e-6f7a-b5c9-2e4d8a1f6c3b"
LOST = "NVML error 15: GPU is lost; the GPU has fallen off the bus: check power and cooling, then reboot"
NO_POWER = {"power_w": "only root may read the energy counters of this CPU (RAPL)"}


def rig(**sections: Any) -> View:
    """Two cards and the CPU; nothing runs."""
    card = fake.gpu(
        id=CARD, workers=[], **{**FULL, "uuid": CARD, "throttle": [], "benchmark": {**BENCHMARK, "at": fake.NOW - 7200}}
    )
    hot = fake.gpu(id="GPU-99aa1f00", throttle=["heat"], temperature_c=91.0, temperature_limit_c=93.0, workers=[])
    gone = fake.gpu(id="GPU-77bb2f00", usable=False, reason=LOST, fault=True, slots=0, utilization=None)
    cpu = fake.device(temperature_c=61.0, unified_memory=True, unavailable=NO_POWER)
    found = live(devices=[card, hot, gone, cpu], workers=[], jobs=[], **sections)
    return replace(found, history=History())


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_the_table(size: tuple[int, int]) -> None:
    compare(f"devices-rig-{size[0]}x{size[1]}", text(rig(), size, on(Screen.DEVICES)))


@pytest.mark.parametrize("size", [(80, 24), (120, 40)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_one_device(size: tuple[int, int]) -> None:
    compare(f"device-{size[0]}x{size[1]}", text(rig(), size, on(Screen.DEVICES, path=(CARD,))))


def test_a_device_that_is_gone_says_how_to_go_back() -> None:
    shown = text(rig(), (80, 24), on(Screen.DEVICES, path=("GPU-0",)))
    assert "The device GPU-0 is gone. Esc goes back." in shown


@pytest.mark.parametrize("name", ["loading", "no-sections", "stale", "not-running"])
def test_the_states_without_fresh_devices(name: str) -> None:
    shown = text(VIEWS[name](), (80, 24), on(Screen.DEVICES))
    words = {
        "loading": "Connecting",
        "no-sections": "Detecting devices...",
        "stale": "gpu0",
        "not-running": "not running",
    }
    assert words[name].lower() in shown.lower()


def test_no_device_at_all_says_where_to_look() -> None:
    view = View(feed=Feed(link=Link.LIVE), snapshot=apply(Snapshot(), fake.snapshot(devices=[]), full=True))
    assert "No device was found" in text(view, (80, 24), on(Screen.DEVICES))


def pressed(keys: str, view: View, ui: Ui) -> tuple[Ui, Any]:
    effect: Any = None
    for key in keys.split():
        ui, effect = press(scene(view, (100, 30), ui), key, key if len(key) == 1 else None)
    return ui, effect


def test_enter_opens_the_device_and_escape_leaves_it() -> None:
    ui, _ = pressed("down enter", rig(), on(Screen.DEVICES))
    assert ui.place.path == ("GPU-99aa1f00",)
    assert pressed("escape", rig(), ui)[0].place.path == ()


def test_m_measures_the_device_here() -> None:
    for ui in (on(Screen.DEVICES), on(Screen.DEVICES, path=(CARD,))):
        _, effect = pressed("m", rig(), ui)
        assert isinstance(effect, Ask)
        assert (effect.method, effect.params) == ("benchmark", {"device": CARD})
        assert effect.done.startswith("Measuring GPU-4b2c1a9f: about 15 s")


def test_m_says_why_it_does_not_measure() -> None:
    assert pressed("down down m", rig(), on(Screen.DEVICES))[1] == Say(
        "GPU-77bb2f00 is not used, so it cannot be measured."
    )
    assert pressed("m", live(), on(Screen.DEVICES))[1] == Say("A worker runs; measure when no job runs.")
    assert pressed("m", rig(), on(Screen.DEVICES, path=("GPU-0",)))[1] == Say("There is no device here to measure.")


def test_the_state_is_word_glyph_and_colour() -> None:
    found = rig().snapshot.devices or ()
    states = [state(device, look((80, 24))) for device in found]
    assert [span.text.split()[1] for span in states] == ["ready", "slowed", "NVML", "ready"]
    assert [span.tone for span in states] == [Tone.GOOD, Tone.WARN, Tone.BAD, Tone.GOOD]
    assert len({span.text[0] for span in states}) == 3


def test_gauges_are_there_for_readings_with_a_limit_only() -> None:
    card, hot, gone, cpu = rig().snapshot.devices or ()
    names = [[row[0].text.strip() for row in gauges(device, 70, look((80, 24)))] for device in (card, gone, cpu)]
    assert names[0] == ["state", "load", "memory", "temperature", "power", "clock"]
    assert names[2] == ["state", "load", "memory"]
    (heat,) = [row for row in gauges(hot, 70, look((80, 24))) if row[0].text.startswith("temperature")]
    assert heat[1].tone is Tone.WARN


def test_only_uuids_are_shortened() -> None:
    assert short_id(CARD) == "GPU-4b2c1a9f"
    assert short_id("rocm:0000:08:00.0") == "rocm:0000:08:00.0"
