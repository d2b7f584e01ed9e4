"""Giving this machine its key: paste it, try it with the hub, keep it. The key is shown nowhere, not even in a repr."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from distensor_tui.actions import Action
from distensor_tui.dialogs import Choose, Info, Option, Prompt
from distensor_tui.fields import clean
from distensor_tui.model import AuthState
from distensor_tui.scene import Ask, Scene, Step, Ui
from distensor_tui.text import EMPTY, Line, Tone, line, wrap
from distensor_tui.views.header import Notice
from distensor_tui.wire import Answer

TEST_WITHIN_S = 30.0
"""A hub that is far away, or whose name does not resolve, takes its time."""
SHORTEST_KEY = 20
KINDS = ("dtj_",)


def complaint(key: str) -> str:
    """What is wrong with a text as a key, without repeating it."""
    if not key:
        return "Paste the key here."
    if not key.startswith(KINDS):
        return f"A key begins with {' or '.join(KINDS)}; this text does not."
    if any(character.isspace() for character in key):
        return "A key has no blanks or line breaks in it; this text has."
    return "" if len(key) >= SHORTEST_KEY else f"This key has only {len(key)} characters: a part of it is missing."


def ask_for_key(scene: Scene) -> Step:
    return scene.ui.shows(KEY), None


def _test(scene: Scene, key: str) -> Step:
    def tested(later: Scene, answer: Answer) -> Ui:
        if later.ui.dialog is None or later.ui.dialog.title != TESTING.title:
            return later.ui  # closed meanwhile: the key is dropped
        if not answer.ok:
            return later.ui.shows(_again(key, answer))
        return later.ui.shows(_keep(key, clean(str(answer.result.get("hub", ""))), answer))

    ask = Ask(method="auth_test", done="", params={"key": key}, then=tested, within=TEST_WITHIN_S)
    return scene.ui.shows(TESTING), ask


def _again(key: str, answer: Answer) -> Prompt:
    """The same line with what went wrong, so that a slip can be mended."""
    fix = f" {clean(answer.fix)}" if answer.fix else ""
    note = f"{clean(answer.message) or clean(answer.code) or 'It did not work, and no reason was given'}.{fix}"
    return replace(KEY, value=key, cursor=len(key), note=note)


def _keep(key: str, hub: str, answer: Answer) -> Choose:
    fingerprint = clean(str(answer.result.get("fingerprint", "")))[:16]
    proof = f" (its certificate begins with {fingerprint})" if fingerprint else ""

    def text(_scene: Scene) -> str:
        return (
            f"The hub {hub} answers{proof} and the key is well-formed. Keep it? This machine then joins that hub "
            "and takes work from it. The key goes into the system's keyring, or a file that only you can read."
        )

    return Choose(
        title="Keep this key?",
        text=text,
        options=(Option(key="y", label="keep it and join", step=lambda scene: _log_in(scene, key)),),
        refuse="forget it",
        cursor=0,
    )


def _log_in(scene: Scene, key: str) -> Step:
    def kept(later: Scene, answer: Answer) -> Ui:
        return later.ui.shows(_done(answer) if answer.ok else _again(key, answer))

    params = {"key": key, "test": False}
    return scene.ui.shows(KEEPING), Ask(method="auth_login", done="", params=params, then=kept, within=TEST_WITHIN_S)


def _done(answer: Answer) -> Info:
    where = clean(str(answer.result.get("where", ""))) or "the place for keys"
    return Info(title="This machine has its key", content=_says(f"Kept in {where}.", *NEXT))


NEXT = (
    "It joins the hub now; the line below the header says when that is done or what is in the way.",
    "No job yet? The hub gives work as soon as a trainer asks for machines like this one. Nothing else is to be done.",
    "Close this view whenever you like (q): the supervisor goes on working. p pauses it, 5 shows its limits.",
)


def _says(*texts: str) -> Callable[[Scene, int], list[Line]]:
    def content(_scene: Scene, size: int) -> list[Line]:
        return [row for text in texts for row in [*(line(part) for part in wrap(text, size)), EMPTY]][:-1]

    return content


KEY = Prompt(
    title="Give this machine its key",
    text="Paste the key that the hub's operator gave you. It is shown as stars, tried with the hub, then kept.",
    label="key",
    check=complaint,
    submit=_test,
    secret=True,
)
TESTING = Info(title="Trying the key", content=_says("Asking the hub... Esc gives up and forgets the key."))
KEEPING = Info(title="Keeping the key", content=_says("The supervisor stores it and joins the hub..."))


def notices(scene: Scene) -> list[Notice]:
    auth = scene.view.snapshot.auth
    if auth is None or auth.state is not AuthState.REJECTED:
        return []
    why = f": {auth.problem}" if auth.problem else ""
    return [(Tone.BAD, f"The hub refuses this machine's key{why}; press a to give another one")]


def needs_key(scene: Scene) -> bool:
    auth = scene.view.snapshot.auth
    return auth is not None and auth.state is AuthState.MISSING


def _has_no_auth(scene: Scene) -> str:
    return "" if scene.view.snapshot.auth else "This supervisor takes its key at its start only."


ACTION = Action(
    name="Give this machine its key",
    keys=("a",),
    about="paste a key; it is tried with the hub, then kept",
    do=ask_for_key,
    unless=_has_no_auth,
)
