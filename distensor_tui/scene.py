"""Everything that a frame is drawn from: what is known, how it is shown, where the user is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import tzinfo
from enum import IntEnum, StrEnum
from typing import Any, Protocol, TypeAlias

from distensor_tui.absence import Absence
from distensor_tui.glyphs import UNICODE, Glyphs
from distensor_tui.history import History
from distensor_tui.model import Snapshot
from distensor_tui.text import Line, Tone
from distensor_tui.tty import MIN_HEIGHT, MIN_WIDTH
from distensor_tui.wire import Answer, Hello


class Link(StrEnum):
    """The dashboard's own connection to the supervisor."""

    LOADING = "loading"
    LIVE = "live"
    LOST = "lost"


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """Where the data comes from and whether it still comes."""

    link: Link = Link.LOADING
    source: str = ""
    hello: Hello | None = None
    absence: Absence | None = None
    last_at: float | None = None
    """When the last message came; None before the first."""
    retry_at: float | None = None
    replay: bool = False
    replay_ended: bool = False
    speed: float = 1.0
    """Of a recording; 0 while it is held."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    feed: Feed = field(default_factory=Feed)
    snapshot: Snapshot = field(default_factory=Snapshot)
    history: History = field(default_factory=History)

    @property
    def has_data(self) -> bool:
        return self.snapshot.node is not None

    @property
    def stale(self) -> bool:
        return self.feed.link is not Link.LIVE and self.has_data


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    width: int
    height: int
    now: float
    zone: tzinfo | None = None
    glyphs: Glyphs = UNICODE

    @property
    def narrow(self) -> bool:
        return self.width < 100 or self.height < 30

    @property
    def wide(self) -> bool:
        return self.width >= 180 and self.height >= 45

    @property
    def dialog_cells(self) -> int:
        """The width inside a dialog."""
        return min(self.width - 4, 84) - 6

    @property
    def dialog_rows(self) -> int:
        """The height inside a dialog: its frame, its margins and one line of the screen are not."""
        return max(1, self.height - 6)

    @property
    def too_small(self) -> bool:
        return self.width < MIN_WIDTH or self.height < MIN_HEIGHT


class Screen(IntEnum):
    """The digit opens it."""

    HOME = 1
    JOBS = 2
    TOPOLOGY = 3
    EARNINGS = 4
    LIMITS = 5
    DEVICES = 6
    LOG = 7

    @property
    def title(self) -> str:
        return self.name.capitalize()


@dataclass(frozen=True, kw_only=True, slots=True)
class Toast:
    """The answer to the last request, shown for a few seconds."""

    text: str
    tone: Tone
    until: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the user is: a screen, how deep in it, at which row, through which filter."""

    screen: Screen = Screen.HOME
    path: tuple[str, ...] = ()
    """What was opened in the screen, outermost first: ('job-1', 'w-2')."""
    cursor: int = 0
    filter: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ui:
    """What the user has done: places, an open dialog, the last answer."""

    place: Place = Place()
    back: tuple[Place, ...] = ()
    """Where Esc leads, the last place at the end."""
    dialog: Dialog | None = None
    typing: bool = False
    """Keys go into the filter line."""
    toast: Toast | None = None
    undo: Ask | None = None
    """Takes back the last request that succeeded."""
    own: Mapping[str, str] = field(default_factory=dict)
    """What screens remember of the user's choices, by 'screen.choice'."""

    @property
    def screen(self) -> Screen:
        return self.place.screen

    @property
    def cursor(self) -> int:
        return self.place.cursor

    @property
    def filter(self) -> str:
        return self.place.filter

    def at(self, **changes: Any) -> Ui:
        """The same with another cursor, filter or path."""
        return replace(self, place=replace(self.place, **changes))

    def go(self, place: Place) -> Ui:
        """Drill down: Esc comes back here."""
        return replace(self, place=place, back=(*self.back, self.place), dialog=None, typing=False)

    def shows(self, dialog: Dialog | None) -> Ui:
        """The same with this dialog, or none, on top."""
        return replace(self, dialog=dialog)

    def remembers(self, name: str, value: str) -> Ui:
        return replace(self, own={**self.own, name: value})


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """All that a frame is drawn from and a key is judged by."""

    view: View
    look: Look
    ui: Ui


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask:
    """Send a request to the supervisor and say `done` when it agreed. Parameters may be secret: they are not shown."""

    method: str
    done: str
    params: Mapping[str, object] = field(default_factory=dict, repr=False)
    undo: Ask | None = None
    """What the key u sends afterwards to take it back."""
    then: Callable[[Scene, Answer], Ui] | None = None
    """Takes the answer, good or bad, instead of a toast."""
    within: float = 5.0
    """Seconds to wait for the answer."""


@dataclass(frozen=True, slots=True)
class Quit:
    """Leave the view."""


@dataclass(frozen=True, slots=True)
class Suspend:
    """Give the terminal back to the shell until it continues the view."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Put the text on the clipboard."""

    text: str


@dataclass(frozen=True, slots=True)
class Say:
    """Answer the user without asking the supervisor."""

    text: str
    tone: Tone = Tone.WARN


class Playing(StrEnum):
    """What a recording may be told."""

    HOLD = "hold"
    FASTER = "faster"
    SLOWER = "slower"
    AGAIN = "again"


@dataclass(frozen=True, slots=True)
class Play:
    """Tell the recording."""

    what: Playing


Effect: TypeAlias = "Ask | Quit | Suspend | Copy | Say | Play | None"
Step: TypeAlias = "tuple[Ui, Effect]"


class Dialog(Protocol):
    """A box over the screen that takes all keys. `distensor_tui.dialogs` has the usual ones."""

    @property
    def title(self) -> str: ...

    def rows(self, scene: Scene, size: int, height: int) -> list[Line]:
        """At most `height` lines of at most `size` cells."""

    def press(self, scene: Scene, key: str, character: str | None) -> Step: ...
    def paste(self, scene: Scene, text: str) -> Ui: ...
