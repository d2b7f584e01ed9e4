"""The one redactor: takes keys, certificates, passwords, the owner's name and (if wanted) addresses out. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

MARK = "[redacted]"
_KEYS = re.compile(r"(dtj_|dt_[A-Za-z]{1,8}_)[A-Za-z0-9_\-+/=%]+")
_PEM = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----.*?(?:-----END \1-----|\Z)", re.DOTALL)
_HEADER = re.compile(
    r"""(?ix) ( (?:proxy-)? authorization (?:\\?["'])? \s* [:=,] \s* (?:\\?["'])? ) (?: [A-Za-z]+ [ ]+ )? [^\s"',\\]+"""
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)[ ]+[A-Za-z0-9._~+/=:\-]+")
_USERINFO = re.compile(r"(?i)\b([a-z][a-z0-9+.\-]*://)[^/\s@\"']+@")
_NAMED = re.compile(
    r"""(?ix)
    ( (?<![a-z0-9])
      [a-z0-9_\-]* (?: token | secret | passw(?:or)?d | passphrase | api_?key | private_?key ) [a-z0-9_\-]*
      (?:\\?["'])? \s* [=:] \s* )
    ( "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' | (?: \\" )? [^\s"',;}\\]+ )
    """
)
_SECRET_NAME = re.compile(r"(?i)token|secret|passw|passphrase|api_?key|private_?key|credential|authorization|cookie")
_HOLDS_SECRET = re.compile(r"(?i).*(token|secret|passw(or)?d|passphrase|api_?key|private_?key|authorization|cookie)")
_IPV4 = re.compile(r"(?<![\d.])(?:\d{1,3}\.){3}\d{1,3}(?![\d.])")
_IPV6 = re.compile(r"(?<![\w:])(?=[0-9a-fA-F:]*:[0-9a-fA-F:]*:)[0-9a-fA-F:]{2,45}(?:%\w+)?(?![\w:])")
_CLOCK = re.compile(r"\d{1,2}:\d{2}:\d{2}")
_LOOPBACK = frozenset({"127.0.0.1", "::1", "::"})
_COMMON_USERS = frozenset({"", "root", "user", "node", "distensor"})
_SHORTEST_KNOWN = 6


def redact_keys(text: str) -> str:
    """Take out keys of ours only; for messages that repeat what somebody typed."""
    return _KEYS.sub(rf"\1{MARK}", text)


def is_secret_name(name: str) -> bool:
    """Whether a variable or setting of this name holds something that nobody else should see."""
    return _SECRET_NAME.search(name) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Redactor:
    """`known`: values that are secret whatever they look like. `home` becomes ~, `user` becomes USER."""

    home: str = ""
    user: str = ""
    known: tuple[str, ...] = field(default=(), repr=False)
    hide_addresses: bool = False

    def text(self, text: str) -> str:
        """The text without what must not leave this machine. Redacting twice changes nothing more."""
        for value in sorted(self.known, key=len, reverse=True):
            if len(value) >= _SHORTEST_KNOWN:
                text = text.replace(value, MARK)
        text = _PEM.sub(MARK, text)
        text = redact_keys(text)
        text = _HEADER.sub(rf"\1{MARK}", text)
        text = _BEARER.sub(rf"\1 {MARK}", text)
        text = _USERINFO.sub(rf"\1{MARK}@", text)
        text = _NAMED.sub(_named, text)
        return self._addresses(self._owner(text))

    def environment(self, values: Mapping[str, str]) -> dict[str, str]:
        """Variables, sorted; the values of secret names are gone whatever they look like."""
        return {
            name: MARK if is_secret_name(name) and values[name] else self.text(values[name]) for name in sorted(values)
        }

    def member(self, name: str, value: object) -> object:
        """A member of a JSON object that is already redacted; text under a secret name is gone altogether."""
        return MARK if isinstance(value, str) and value and _HOLDS_SECRET.fullmatch(name) else value

    def _owner(self, text: str) -> str:
        if len(self.home) > 1:
            text = re.sub(re.escape(self.home.rstrip("/")) + r"(?![\w.\-])", "~", text)
        if self.user not in _COMMON_USERS:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(self.user)}(?![A-Za-z0-9])", "USER", text)
        return text

    def _addresses(self, text: str) -> str:
        if not self.hide_addresses:
            return text
        hide: Callable[[re.Match[str]], str] = _hidden
        return _IPV6.sub(hide, _IPV4.sub(hide, text))


def _named(found: re.Match[str]) -> str:
    value = found[2]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{found[1]}{quote}{MARK}{quote}"


def _hidden(found: re.Match[str]) -> str:
    """Times look like addresses of version 6, and loopback says nothing about anybody."""
    return found[0] if found[0] in _LOOPBACK or _CLOCK.fullmatch(found[0]) else "ADDRESS"
