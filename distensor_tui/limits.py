"""Changing one of the owner's limits: a line to type, the consequence, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from distensor_tui.dialogs import Choose, Option, Prompt, confirm
from distensor_tui.model import Device, Setting, Snapshot
from distensor_tui.scene import Ask, Scene, Step, Ui
from distensor_tui.settings import consequence_of, read_limits, source, with_unit
from distensor_tui.views.devices import short_id
from distensor_tui.wire import Answer


def _named(setting: Setting) -> dict[str, object]:
    return {"key": setting.key, **({"device": setting.device} if setting.device else {})}


def _name(setting: Setting) -> str:
    """'temperature_max_c of gpu1'."""
    return f"{setting.key} of {short_id(setting.device)}" if setting.device else setting.key


def editor(setting: Setting) -> Prompt:
    """The line in which a limit is changed. Enter asks the supervisor first what would come of it."""
    return Prompt(
        title=f"Change {_name(setting)}",
        text=f"{setting.help}. Expected: {setting.expected}. Now: {with_unit(setting)}.",
        label=setting.key,
        submit=lambda scene, text: _try(setting, text, scene),
        value=setting.value,
        cursor=len(setting.value),
    )


NOT_FOR_CPU = ("vram_", "yield_gpu")
"""Limits of GPUs begin so."""
MOST_DEVICES = 9


def limited_devices(setting: Setting, snapshot: Snapshot) -> list[Device]:
    """The devices that a limit may have a value of its own for."""
    gpus_only = setting.key.startswith(NOT_FOR_CPU)
    return [device for device in snapshot.devices or () if not (gpus_only and device.kind == "cpu")]


def for_device(setting: Setting, snapshot: Snapshot) -> Choose:
    """Asks for which device, then for the value; a device without one of its own begins with that of the machine."""
    rows = snapshot.limits.rows if snapshot.limits is not None else ()
    own = {row.device: row for row in rows if row.key == setting.key}
    whole = own.get(None, setting)
    options = [
        Option(
            key=str(number),
            label=f"{device.name or device.id} ({short_id(device.id)}): {with_unit(own.get(device.id, whole))}",
            # 'default': taking a first value of its own back leaves the device with that of the machine.
            step=_opener(own.get(device.id) or replace(whole, device=device.id, source="default")),
        )
        for number, device in enumerate(limited_devices(setting, snapshot)[:MOST_DEVICES], 1)
    ]
    text = f"{setting.key} is {with_unit(whole)} for the whole machine. A device may have a value of its own."
    return Choose(
        title=f"{setting.key} for which device?", text=lambda _scene: text, options=tuple(options), refuse="for none"
    )


def _opener(setting: Setting) -> Callable[[Scene], Step]:
    return lambda scene: (scene.ui.shows(editor(setting)), None)


def _try(setting: Setting, text: str, scene: Scene) -> Step:
    params: Mapping[str, object] = {**_named(setting), "value": text, "check": True}

    def tried(now: Scene, answer: Answer) -> Ui:
        if not answer.ok:
            again = replace(editor(setting), value=text, cursor=len(text), note=answer.message)
            return now.ui.shows(again)
        return now.ui.shows(_question(setting, text, answer.result))

    return scene.ui, Ask(method="limits_set", done="", params=params, then=tried)


def _question(setting: Setting, text: str, result: Mapping[str, Any]) -> Any:
    ask = Ask(
        method="limits_set",
        done=f"{_name(setting)} is {text} now.",
        params={**_named(setting), "value": text},
        undo=_undo(setting),
    )
    consequence = consequence_of(result)
    return confirm(
        f"{_name(setting)}: {setting.value or '-'} becomes {text}",
        lambda _scene: consequence,
        "change it",
        lambda scene: (scene.ui, ask),
        no="leave it as it is",
    )


def reset(setting: Setting, scene: Scene) -> Step:
    """Back to what the configuration file or the program says; what comes of that is asked and said first."""

    def tried(now: Scene, answer: Answer) -> Ui:
        if not answer.ok:
            return now.ui.shows(editor(setting))
        return now.ui.shows(_reset_question(setting, answer.result))

    params = {**_named(setting), "check": True}
    return scene.ui, Ask(method="limits_unset", done="", params=params, then=tried)


def _reset_question(setting: Setting, result: Mapping[str, Any]) -> Any:
    after = read_limits({"rows": [result]}, []).rows[0]
    back = Ask(
        method="limits_set",
        done=f"{_name(setting)} is {with_unit(setting)} again.",
        params={**_named(setting), "value": setting.value},
    )
    ask = Ask(
        method="limits_unset",
        done=f"{_name(setting)} is {with_unit(after)} now, from the {source(after)}.",
        params=_named(setting),
        undo=back,
    )
    consequence = consequence_of(result)
    return confirm(
        f"{_name(setting)}: {with_unit(setting)} becomes {with_unit(after)}",
        lambda _scene: consequence,
        "forget my change",
        lambda scene: (scene.ui, ask),
        no="leave it as it is",
    )


def _undo(setting: Setting) -> Ask:
    done = f"{_name(setting)} is {setting.value or '-'} again."
    if source(setting) == "you":
        return Ask(method="limits_set", done=done, params={**_named(setting), "value": setting.value})
    return Ask(method="limits_unset", done=done, params=_named(setting))
