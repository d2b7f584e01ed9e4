"""Patterns over dotted names.

`model.layers.[0-5]` is an inclusive range of indices, `*` matches within one name, `**` matches any number of
names. A pattern matches a name, or everything below the module that it names.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_RANGE = re.compile(r"\[(\d+)-(\d+)\]")
_PIECE = re.compile(r"[A-Za-z0-9_*-]|\[\d+-\d+\]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """A parsed pattern; `problem` says why it can match nothing at all."""

    text: str
    problem: str | None
    _names: tuple[re.Pattern[str] | None, ...]
    """One entry per name; None stands for `**`."""
    _ranges: tuple[tuple[tuple[int, int], ...], ...]

    def matches(self, name: str) -> bool:
        """Whether the pattern names `name` itself."""
        return self.problem is None and self._match(0, name.split("."), 0)

    def covers(self, name: str) -> bool:
        """Whether the pattern names `name` or a module above it."""
        parts = name.split(".")
        return any(self.matches(".".join(parts[:length])) for length in range(1, len(parts) + 1))

    @property
    def far_end(self) -> Pattern:
        """The pattern with every range narrowed to its last index: that must exist too, or the range is a mistake."""
        return parse(_RANGE.sub(lambda found: f"[{found[2]}-{found[2]}]", self.text))

    def _match(self, at: int, parts: Sequence[str], position: int) -> bool:
        if at == len(self._names):
            return position == len(parts)
        if self._names[at] is None:
            return any(self._match(at + 1, parts, later) for later in range(position, len(parts) + 1))
        return position < len(parts) and self._fits(at, parts[position]) and self._match(at + 1, parts, position + 1)

    def _fits(self, at: int, part: str) -> bool:
        expression = self._names[at]
        found = expression.fullmatch(part) if expression is not None else None
        if found is None:
            return False
        limits = zip(found.groups(), self._ranges[at], strict=True)
        return all(str(int(text)) == text and low <= int(text) <= high for text, (low, high) in limits)


def parse(text: str) -> Pattern:
    """Read a pattern; what is wrong with it is kept in `problem`.

    >>> parse("layers.[0-5]").covers("layers.3.weight"), parse("layers.1").covers("layers.10.weight")
    (True, False)
    """
    problem = _problem(text)
    if problem is not None:
        return Pattern(text=text, problem=problem, _names=(), _ranges=())
    parts = text.split(".")
    ranges = tuple(tuple((int(low), int(high)) for low, high in _RANGE.findall(part)) for part in parts)
    return Pattern(text=text, problem=None, _names=tuple(_compile(part) for part in parts), _ranges=ranges)


def _problem(text: object) -> str | None:
    if not isinstance(text, str) or not text:
        return "a pattern is a non-empty text such as 'model.layers.[0-5]'"
    for part in text.split("."):
        if not part:
            return "it has an empty name between dots"
        if _PIECE.sub("", part):
            return f"{part!r} is not a name, *, ** or an index range such as [0-5]"
        if "**" in part and part != "**":
            return f"in {part!r}, ** must stand alone between dots"
        for low, high in _RANGE.findall(part):
            if int(low) > int(high):
                return f"the range [{low}-{high}] is empty; write the smaller index first"
    return None


def _compile(part: str) -> re.Pattern[str] | None:
    if part == "**":
        return None
    pieces = re.split(r"(\[\d+-\d+\]|\*)", part)
    translated = [_translate(piece) for piece in pieces]
    return re.compile("".join(translated))


def _translate(piece: str) -> str:
    if piece == "*":
        return r"[^.]*"
    return r"(\d+)" if _RANGE.fullmatch(piece) else re.escape(piece)


def nearest(text: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Existing names that look most like `text`, for messages."""
    known = sorted({prefix for name in names for prefix in _prefixes(name)})
    plain = _RANGE.sub(lambda match: match[1], text).replace("**", "").replace("*", "0")
    return difflib.get_close_matches(plain, known, n=count, cutoff=0.3) or known[:count]


def _prefixes(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def listed(names: Iterable[str], most: int = 5) -> str:
    """'a', 'b' and 3 more."""
    found = list(names)
    rest = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(repr(name) for name in found[:most]) + rest
