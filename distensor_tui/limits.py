"""Changing one of the owner's limits: a line to type, the consequence, and the way back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distensor_tui.dialogs import Prompt, confirm
from distensor_tui.model import Setting
from distensor_tui.scene import Ask, Scene, Step, Ui
from distensor_tui.settings import consequence_of, read_limits, source, with_unit
from distensor_tui.wire import Answer


def _named(setting: Setting) -> dict[str, object]:
    return {"key": setting.key, **({"device": setting.device} if setting.device else {})}


def editor(setting: Setting) -> Prompt:
    """The line in which a limit is changed. Enter asks the supervisor first what would come of it."""
    where = f" of {setting.device}" if setting.device else ""
    return Prompt(
        title=f"Change {setting.key}{where}",
        text=f"{setting.help}. Expected: {setting.expected}. Now: {with_unit(setting)}.",
        label=setting.key,
        submit=lambda scene, text: _try(setting, text, scene),
        value=setting.value,
        cursor=len(setting.value),
    )


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
        done=f"{setting.key} is {text} now.",
        params={**_named(setting), "value": text},
        undo=_undo(setting),
    )
    consequence = consequence_of(result)
    return confirm(
        f"{setting.key}: {setting.value or '-'} becomes {text}",
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
        done=f"{setting.key} is {with_unit(setting)} again.",
        params={**_named(setting), "value": setting.value},
    )
    ask = Ask(
        method="limits_unset",
        done=f"{setting.key} is {with_unit(after)} now, from the {source(after)}.",
        params=_named(setting),
        undo=back,
    )
    consequence = consequence_of(result)
    return confirm(
        f"{setting.key}: {with_unit(setting)} becomes {with_unit(after)}",
        lambda _scene: consequence,
        "forget my change",
        lambda scene: (scene.ui, ask),
        no="leave it as it is",
    )


def _undo(setting: Setting) -> Ask:
    done = f"{setting.key} is {setting.value or '-'} again."
    if source(setting) == "you":
        return Ask(method="limits_set", done=done, params={**_named(setting), "value": setting.value})
    return Ask(method="limits_unset", done=done, params=_named(setting))
