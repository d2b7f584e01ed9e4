"""Everything that a frame is drawn from: what is known, how it is shown, where the user is."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import tzinfo
from enum import IntEnum, StrEnum

from distensor_tui.absence import Absence
from distensor_tui.glyphs import UNICODE, Glyphs
from distensor_tui.history import History
from distensor_tui.model import Snapshot
from distensor_tui.text import Tone
from distensor_tui.tty import MIN_HEIGHT, MIN_WIDTH
from distensor_tui.wire import Hello


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


class Overlay(StrEnum):
    NONE = "none"
    HELP = "help"
    PAUSE = "pause"
    DRAIN = "drain"
    WHY = "why"
    DETAIL = "detail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Toast:
    """The answer to the last request, shown for a few seconds."""

    text: str
    tone: Tone
    until: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Ui:
    screen: Screen = Screen.HOME
    overlay: Overlay = Overlay.NONE
    cursor: int = 0
    filter: str = ""
    typing: bool = False
    toast: Toast | None = None
