"""A key of a payment service: from a file or the environment, never from a command line, and never shown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from distensor.core.errors import ConfigError, StoreError

KEY_VARIABLE = "DISTENSOR_STRIPE_KEY"
WEBHOOK_VARIABLE = "DISTENSOR_STRIPE_WEBHOOK_SECRET"
_MOST_BYTES = 4096


class Secret:
    """A text that neither `print` nor a traceback shows."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text, for the one place that sends it."""
        return self._text

    def __repr__(self) -> str:
        return "Secret(...)"


def find_secret(variable: str, environment: Mapping[str, str], file: Path | None) -> Secret:
    """From the file where there is one, else from the variable.

    Raises:
        ConfigError: neither has one, or what is there is no single word of ASCII.
        StoreError: the file cannot be read, or others than its owner may read it.
    """
    text = environment.get(variable, "") if file is None else _content(file)
    where = f"${variable}" if file is None else f"file {file}"
    if not text:
        raise ConfigError(f"{where} holds no key; set the variable, or name a file with the key in it")
    if not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError(f"{where} does not hold a key: expected one word of ASCII letters")
    return Secret(text)


def _content(file: Path) -> str:
    try:
        if (mode := file.stat().st_mode & 0o777) & 0o077:
            raise StoreError(f"file {file} holds a key and has mode {mode:04o}; expected 0600 (chmod 600 {file})")
        with file.open(encoding="utf-8") as stream:
            return stream.read(_MOST_BYTES).strip()
    except OSError as error:
        raise StoreError(f"file {file}: {error.strerror}") from error
    except ValueError as error:
        raise StoreError(f"file {file}: no text in UTF-8") from error
