"""The edge to Textual: a canvas that shows lines, keys that become steps, a feed that becomes a view."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from datetime import tzinfo
from typing import Protocol

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import App, ComposeResult
from textual.driver import Driver
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from distensor_tui.absence import Absence, Reason
from distensor_tui.clock import Now
from distensor_tui.fields import clean
from distensor_tui.frame import frame
from distensor_tui.glyphs import UNICODE, Glyphs
from distensor_tui.history import remember
from distensor_tui.keys import paste, press
from distensor_tui.lastseen import LastSeen
from distensor_tui.palette import BACKGROUND, plain_styles, styles
from distensor_tui.scene import (
    Ask,
    Copy,
    Effect,
    Feed,
    Link,
    Look,
    Place,
    Play,
    Playing,
    Quit,
    Say,
    Scene,
    Screen,
    Suspend,
    Toast,
    Ui,
    View,
)
from distensor_tui.screens.page import held
from distensor_tui.screens.table import spec
from distensor_tui.sections import apply
from distensor_tui.text import Line, Tone, changed_cells, merged, plain
from distensor_tui.views.hits import key_at
from distensor_tui.wire import Answer, Hello, Update

PAINT_EVERY_S = 0.5
"""Updates that come faster than this share one paint."""
AGES_EVERY_S = 10.0
LOADING_AFTER_S = 0.2
NEVER = float("-inf")
TOAST_S = 6.0
POLL_EVERY_S = 2.0
LONGEST_COPY = 50_000
"""Terminals drop a longer OSC 52 sequence, or hang on it."""


class Source(Protocol):
    """A supervisor or a recording."""

    async def run(self) -> None: ...
    async def ask(self, method: str, params: Mapping[str, object] | None = None, within: float = 5.0) -> Answer: ...


class Recorded(Source, Protocol):
    """A recording: it can be held, and played at another speed."""

    @property
    def speed(self) -> float: ...
    def control(self, what: Playing) -> bool: ...


class Canvas(Widget):
    """Shows lines; repaints those that changed."""

    DEFAULT_CSS = f"""
    Canvas {{ width: 100%; height: 100%; background: {BACKGROUND}; }}
    Canvas:nocolor {{ background: ansi_default; }}
    """

    def __init__(self, resized: Callable[[], None], styles_of: Mapping[Tone, Style]) -> None:
        super().__init__()
        self._resized = resized
        self._styles_of = styles_of
        self._lines: list[Line] = []
        self._strips: list[Strip] = []

    @property
    def lines(self) -> list[Line]:
        return self._lines

    def show(self, lines: list[Line]) -> None:
        """Take the new lines; a frame of another height is painted whole."""
        if len(lines) != len(self._lines):
            self._lines, self._strips = lines, [self._strip(row) for row in lines]
            self.refresh()
            return
        regions = []
        for y, row in enumerate(lines):
            if row != self._lines[y]:
                start, stop = changed_cells(self._lines[y], row)
                regions.append(Region(start, y, stop - start, 1))
                self._lines[y], self._strips[y] = row, self._strip(row)
        if regions:
            self.refresh(*regions)

    def on_resize(self) -> None:
        self._resized()

    def _strip(self, row: Line) -> Strip:
        return Strip([Segment(span.text, self._styles_of[span.tone]) for span in merged(row)])

    def render_line(self, y: int) -> Strip:
        if y < len(self._strips):
            return self._strips[y]
        return Strip.blank(self.size.width, self._styles_of[Tone.TEXT])


class Dashboard(App[int], inherit_bindings=False):
    """The view. Owns no state of the machine: quitting it stops nothing."""

    CSS = f"""
    Screen {{ background: {BACKGROUND}; }}
    Screen:nocolor {{ background: ansi_default; }}
    """
    ENABLE_COMMAND_PALETTE = False
    ALLOW_SELECT = False
    TITLE = "disTensor"

    def __init__(
        self,
        *,
        name: str,
        now: Now,
        monotonic: Callable[[], float],
        zone: tzinfo | None = None,
        glyphs: Glyphs = UNICODE,
        screen: Screen = Screen.HOME,
        colours: bool = True,
        driver_class: type[Driver] | None = None,
        last_seen: Callable[[], LastSeen | None] = lambda: None,
    ) -> None:
        super().__init__(driver_class=driver_class, ansi_color=None if colours else True)
        self._now, self._monotonic, self._zone, self._glyphs = now, monotonic, zone, glyphs
        self._last_seen = last_seen
        self._source: Source | None = None
        self._player: Recorded | None = None
        self._view = View(feed=Feed(source=name))
        self._ui = Ui(place=Place(screen=screen))
        self._canvas = Canvas(self._resized, styles() if colours else plain_styles())
        self._painted_at = NEVER
        self._data_shown = False
        self._paint_due = False
        self._poll_at = NEVER
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def view(self) -> View:
        return self._view

    @property
    def shown(self) -> list[Line]:
        """What is on the screen; after the end, what was."""
        return self._canvas.lines

    def follow(self, source: Source) -> None:
        """Use this source once the app runs."""
        self._source = source

    def replay(self, player: Recorded) -> None:
        """Use a recording."""
        self._source = self._player = player
        self._view = replace(self._view, feed=replace(self._view.feed, replay=True))

    def compose(self) -> ComposeResult:
        yield self._canvas

    def on_mount(self) -> None:
        self.set_interval(1.0, self._tick)
        if self._source is not None:
            self._start(self._source.run())

    async def on_unmount(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # what the source says

    def on_hello(self, hello: Hello) -> None:
        feed = replace(self._view.feed, hello=hello, link=Link.LIVE, absence=None, retry_at=None, last_at=self._now())
        self._view = replace(self._view, feed=feed)
        if self._view.has_data:
            self._paint_soon()

    def on_update(self, update: Update) -> None:
        at = self._now()
        snapshot = apply(self._view.snapshot, update.data, full=update.full)
        history = remember(self._view.history, snapshot, at)
        before = self._scene()
        self._view = View(feed=replace(self._view.feed, last_at=at), snapshot=snapshot, history=history)
        self._ui = held(spec(before), before, self._scene())
        self._paint_soon()

    def on_lost(self, why: Absence, retry_in: float) -> None:
        feed = replace(self._view.feed, link=Link.LOST, absence=why, retry_at=self._now() + retry_in)
        self._view = replace(self._view, feed=feed)
        if not self._view.has_data and why.reason in (Reason.NOT_RUNNING, Reason.SILENT):
            self._show_last_seen()
        self._paint_soon()

    def _show_last_seen(self) -> None:
        """Nobody answers, and nothing was shown yet: what the supervisor left behind is better than nothing."""
        last = self._last_seen()
        if last is not None:
            feed = replace(self._view.feed, last_at=last.at)
            self._view = replace(self._view, feed=feed, snapshot=last.snapshot)

    def on_replay_end(self) -> None:
        self._view = replace(self._view, feed=replace(self._view.feed, replay_ended=True))
        self._paint_soon()

    # what the user does

    def on_key(self, event: events.Key) -> None:
        event.stop()
        self._press(event.key, event.character)

    def on_click(self, event: events.Click) -> None:
        lines = self.shown
        key = key_at(lines[event.screen_y], event.screen_x) if event.screen_y < len(lines) else None
        if key is not None:
            self._press(key, None)

    def on_mouse_scroll_down(self) -> None:
        self._press("down", None)

    def on_mouse_scroll_up(self) -> None:
        self._press("up", None)

    def on_paste(self, event: events.Paste) -> None:
        event.stop()
        self._ui = paste(self._scene(), event.text)
        self._paint()

    def _press(self, key: str, character: str | None) -> None:
        place = self._ui.place
        self._ui, effect = press(self._scene(), key, character)
        self._carry_out(effect)
        if (self._ui.place.screen, self._ui.place.path) != (place.screen, place.path):
            self._poll_at = NEVER
            self._poll(self._monotonic())
        self._paint()

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Quit):
            self.exit(0)
        elif isinstance(effect, Suspend):
            self.action_suspend_process()
        elif isinstance(effect, Copy):
            self.copy_to_clipboard(effect.text[:LONGEST_COPY])
            self._toast("Copied." if len(effect.text) <= LONGEST_COPY else "Copied the beginning.", Tone.GOOD)
        elif isinstance(effect, Say):
            self._toast(effect.text, effect.tone)
        elif isinstance(effect, Play) and self._player is not None:
            self._play(self._player, effect.what)
        elif isinstance(effect, Ask) and self._source is not None:
            self._start(self._ask(self._source, effect))

    def _play(self, player: Recorded, what: Playing) -> None:
        if player.control(what):
            self._start(player.run())
        ended = self._view.feed.replay_ended and what is not Playing.AGAIN
        self._view = replace(self._view, feed=replace(self._view.feed, speed=player.speed, replay_ended=ended))

    async def _ask(self, source: Source, effect: Ask) -> None:
        answer = await source.ask(effect.method, dict(effect.params), effect.within)
        if effect.then is not None:
            before = self._scene()
            self._ui = effect.then(before, answer)
            self._ui = held(spec(before), before, self._scene())
            self._paint()
        elif answer.ok:
            self._ui = replace(self._ui, undo=effect.undo)
            self._toast(f"{effect.done} Undo: u" if effect.undo else effect.done, Tone.GOOD)
        else:
            fix = f" ({answer.fix})" if answer.fix else ""
            self._toast(f"{effect.method} failed: {answer.message or answer.code or 'no reason given'}{fix}", Tone.BAD)

    def _toast(self, text: str, tone: Tone) -> None:
        self._ui = replace(self._ui, toast=Toast(text=clean(text), tone=tone, until=self._monotonic() + TOAST_S))
        self._paint()

    # painting

    def _scene(self) -> Scene:
        return Scene(view=self._view, look=self._look(), ui=self._ui)

    def _look(self) -> Look:
        size = self._canvas.size
        return Look(width=size.width, height=size.height, now=self._now(), zone=self._zone, glyphs=self._glyphs)

    def _tick(self) -> None:
        """Ages move on: every second while they matter, else now and then."""
        moment = self._monotonic()
        self._poll(moment)
        if self._ui.toast is not None and moment >= self._ui.toast.until:
            self._ui = replace(self._ui, toast=None)
            self._paint()
        elif self._view.stale or moment - self._painted_at >= AGES_EVERY_S:
            self._paint()

    def _poll(self, moment: float) -> None:
        """What the open screen wants to know again and again; asked at once when it was just opened."""
        found = spec(self._scene()).poll(self._scene()) if self._view.feed.link is Link.LIVE else None
        if found is not None and self._source is not None and moment >= self._poll_at:
            self._poll_at = moment + POLL_EVERY_S
            self._start(self._ask(self._source, found))

    def on_resize(self, event: events.Resize) -> None:
        """A terminal made small and large again within one frame lost its cells, though the size is the one we know:
        textual takes that for no change, so the whole screen is sent here."""
        if event.size == self._canvas.size:
            self._canvas.refresh()

    def _resized(self) -> None:
        """Nearly always the data comes a few milliseconds later: no frame just to say that it is on its way."""
        if self._painted_at == NEVER:
            self.set_timer(LOADING_AFTER_S, self._paint_unless_painted)
        else:
            self._paint()

    def _paint_unless_painted(self) -> None:
        if self._painted_at == NEVER:
            self._paint()

    def _paint_soon(self) -> None:
        first_data = self._view.has_data and not self._data_shown
        wait = self._painted_at + PAINT_EVERY_S - self._monotonic()
        if first_data or wait <= 0:
            self._paint()
        elif not self._paint_due:
            self._paint_due = True
            self.set_timer(wait, self._paint)

    def _paint(self) -> None:
        self._paint_due = False
        if self._canvas.is_attached:
            self._painted_at = self._monotonic()
            self._data_shown = self._view.has_data
            self._canvas.show(frame(self._scene()))

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def screen_text(self) -> str:
        """What is on the screen, for tests."""
        return "\n".join(plain(row) for row in self.shown)
