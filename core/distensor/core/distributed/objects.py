"""Objects as bytes without pickle: JSON, with bytes and tuples marked. Nothing that arrives is ever executed."""

from __future__ import annotations

import base64
import json
from typing import Any

from distensor.core.errors import ConfigError, FrameError

_BYTES, _TUPLE, _DICT = "bytes", "tuple", "dict"


def encode(value: object) -> bytes:
    """None, bool, int, float, str, bytes, and lists, tuples and dicts with text as keys of them.

    Raises:
        ConfigError: anything else, by its type.
    """
    return json.dumps(_plain(value)).encode()


def decode(data: bytes) -> Any:
    """The inverse of `encode`.

    Raises:
        FrameError: bytes that `encode` did not make.
    """
    try:
        return _restored(json.loads(data))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise FrameError(f"{data[:80]!r} is no object of another rank: {error}") from error


def _plain(value: object) -> Any:
    # Exact types: a subclass would silently arrive as its base.
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list and isinstance(value, list):
        return [_plain(item) for item in value]
    if kind is tuple and isinstance(value, tuple):
        return {_TUPLE: [_plain(item) for item in value]}
    if kind is bytes and isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if kind is dict and isinstance(value, dict) and all(type(key) is str for key in value):
        return {_DICT: {key: _plain(item) for key, item in value.items()}}
    raise ConfigError(
        f"an object of type {kind.__name__} cannot be sent: expected None, bool, int, float, str, bytes, and lists, "
        "tuples and dicts (keys: str) of these, or a tensor by itself"
    )


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((mark, inner),) = value.items()
    if mark == _BYTES:
        return base64.b64decode(inner)
    if mark == _TUPLE:
        return tuple(_restored(item) for item in inner)
    return {key: _restored(item) for key, item in inner.items()}
