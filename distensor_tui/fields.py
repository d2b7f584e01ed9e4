"""Reading foreign JSON with tolerance: a wrong value becomes its default and a named problem, never a crash."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

LONGEST_TEXT = 2000


def clean(text: str) -> str:
    """Text from outside as one line without control, format or lone surrogate characters.

    Terminal escapes, tabs and direction marks would break the screen; `[` stays what it is.
    """
    text = text[:LONGEST_TEXT]
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    category = unicodedata.category(character)
    if category in ("Cc", "Zl", "Zp"):
        return "␛" if character == "\x1b" else " "
    if category in ("Cf", "Mn", "Me"):
        return ""
    return "\ufffd" if category in ("Cs", "Cn", "Co") else character


class Fields:
    """One JSON object together with its path, so that a problem can be named."""

    __slots__ = ("_path", "_problems", "_raw")

    def __init__(self, raw: Any, path: str, problems: list[str]) -> None:
        self._path, self._problems = path, problems
        self._raw: Mapping[str, Any] = {}
        if isinstance(raw, Mapping):
            self._raw = raw
        else:
            self._wrong("", raw, "an object")

    def text(self, name: str, default: str = "") -> str:
        value = self._raw.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            self._wrong(name, value, "a text")
        return clean(value if isinstance(value, str) else str(value))

    def shown(self, name: str) -> str:
        """A text or a number as text."""
        value = self._raw.get(name)
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else self.text(name)

    def maybe_text(self, name: str) -> str | None:
        return None if self._raw.get(name) is None else self.text(name)

    def value(self, name: str) -> str:
        """A text, number, truth value or list of texts, as an owner would type it."""
        value = self._raw.get(name)
        if isinstance(value, bool):
            return str(value).lower()
        if isinstance(value, (int, float)) and _is_real(value):
            return f"{value:g}" if abs(value) < 1e6 and value == float(f"{value:g}") else str(value)
        return ", ".join(self.texts(name)) if isinstance(value, list) else self.text(name)

    def number(self, name: str) -> float | None:
        value = self._raw.get(name)
        if value is None:
            return None
        if isinstance(value, (int, float)) and not isinstance(value, bool) and _is_real(value):
            return float(value)
        self._wrong(name, value, "a finite number")
        return None

    def seconds(self, name: str) -> float:
        return self.number(name) or 0.0

    def whole(self, name: str) -> int | None:
        value = self._raw.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and _is_real(value):
            return value  # not by way of a float, which would round a large amount
        number = self.number(name)
        return None if number is None else int(number)

    def count(self, name: str, default: int = 0) -> int:
        value = self.whole(name)
        return default if value is None else value

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self._raw.get(name, default)
        if not isinstance(value, bool):
            self._wrong(name, value, "true or false")
            return default
        return value

    def objects(self, name: str) -> list[Fields]:
        values = self._list(name)
        return [Fields(value, f"{self._path}.{name}[{i}]", self._problems) for i, value in enumerate(values)]

    def object(self, name: str) -> Fields:
        return Fields(self._raw.get(name) or {}, f"{self._path}.{name}", self._problems)

    def is_object(self, name: str) -> bool:
        return isinstance(self._raw.get(name), Mapping)

    def has(self, name: str) -> bool:
        return self._raw.get(name) is not None

    def wholes(self, name: str) -> tuple[int, ...]:
        return tuple(v for v in self._list(name) if isinstance(v, int) and _is_real(v))

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(clean(str(v)) for v in self._list(name))

    def text_map(self, name: str) -> dict[str, str]:
        value = self._raw.get(name)
        if not isinstance(value, Mapping):
            return {}
        return {clean(str(key)): clean(str(text)) for key, text in value.items()}

    def number_map(self, name: str) -> dict[str, float]:
        """Numbers by name; what is none is left out and named."""
        values = self.object(name)
        found = {clean(str(key)): values.number(key) for key in values.names()}
        return {key: number for key, number in found.items() if number is not None}

    def names(self) -> Sequence[str]:
        return list(self._raw)

    def _list(self, name: str) -> Sequence[Any]:
        value = self._raw.get(name)
        if value is None:
            return ()
        if isinstance(value, list):
            return value
        self._wrong(name, value, "a list")
        return ()

    def _wrong(self, name: str, value: Any, expected: str) -> None:
        where = f"{self._path}.{name}" if name else self._path
        self._problems.append(clean(f"{where}: {expected} was expected, got {str(value)[:40]!r}"))


def _is_real(value: float) -> bool:
    """Also false for integers that no float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
