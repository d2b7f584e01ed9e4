"""Round trips of keep-alives: a numbered one comes back with its number. Pure; monotonic times in, seconds out.

    keep-alive, micro 0, slot 0   nothing is asked
    keep-alive, micro 0, slot n   please send n back
    keep-alive, micro 1, slot n   this is your n

A peer that knows nothing of this ignores the tag of a keep-alive, so nothing comes back and nothing is measured.
"""

from __future__ import annotations

from collections import deque

from distensor.transport.types import Channel, Tag

KEPT = 8
"""The shortest of so many counts: a longer one has waited for data on the way."""
_MASK = (1 << 63) - 1


def asking(number: int) -> Tag:
    return Tag(Channel.META, slot=number)


def answering(number: int) -> Tag:
    return Tag(Channel.META, micro=1, slot=number)


def question_in(tag: Tag) -> int | None:
    """The number that a keep-alive wants back."""
    return tag.slot if tag.micro == 0 and tag.slot else None


class RoundTrips:
    """Those of one peer. Only the last question counts: what comes back late was asked before a silence."""

    __slots__ = ("_asked", "_at", "_number", "_seconds")

    def __init__(self) -> None:
        self._number = 0
        self._asked: float | None = None
        self._at: float | None = None
        self._seconds: deque[float] = deque(maxlen=KEPT)

    def ask(self, now: float) -> Tag:
        """The tag of a keep-alive that leaves now."""
        self._number = (self._number + 1) & _MASK or 1
        self._asked = now
        return asking(self._number)

    def heard(self, tag: Tag, now: float) -> None:
        """A keep-alive came. Numbers that we did not ask for, and repeated ones, are left alone."""
        if tag.micro == 1 and tag.slot == self._number and self._asked is not None:
            self._seconds.append(max(0.0, now - self._asked))
            self._asked, self._at = None, now

    @property
    def shortest(self) -> float | None:
        """Seconds; None until the first one."""
        return min(tuple(self._seconds), default=None)

    @property
    def last_at(self) -> float | None:
        return self._at
