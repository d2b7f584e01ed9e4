"""Foreign JSON, taken apart with errors that name the place. Nothing here trusts a type or a size."""

from __future__ import annotations

import json
import math
from collections.abc import Set
from typing import Any, NoReturn

from distensor.core.errors import ProgramRejectedError
from distensor.program.values import DType, Limits

_CONTAINERS_PER_PROGRAM = 1_000_000
_ENTRIES_PER_PROGRAM = 2_000_000
MAX_NAME = 512
MAX_INTEGER = 2**63 - 1


def parse_json(data: bytes, limits: Limits) -> Any:
    """JSON of bounded size, depth and numbers; duplicate keys and non-finite numbers are refused."""
    if len(data) > limits.max_json_bytes:
        raise ProgramRejectedError(
            f"program has {len(data)} bytes; the limit is {limits.max_json_bytes} (Limits.max_json_bytes)"
        )
    # Counted before parsing, because an empty list of 2 bytes becomes 64 in memory.
    if data.count(b"[") + data.count(b"{") > _CONTAINERS_PER_PROGRAM or data.count(b",") > _ENTRIES_PER_PROGRAM:
        raise ProgramRejectedError("program has more lists, objects or entries than any real one")
    try:
        return json.loads(
            data.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_object, parse_float=_real
        )
    except RecursionError:
        raise ProgramRejectedError("program is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, integers of thousands of digits
        raise ProgramRejectedError(f"program is not JSON: {error}") from error


def _refuse_constant(text: str) -> NoReturn:
    raise ProgramRejectedError(f"program holds the number {text}, which JSON does not have")


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ProgramRejectedError(f"program holds the number {text[:32]}, beyond float64")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ProgramRejectedError(f"an object of the program repeats a key: {sorted(key for key, _ in pairs)[:8]}")
    return result


def refuse(where: str, value: object, expected: str) -> NoReturn:
    raise ProgramRejectedError(f"{where}: {clip(value)}; expected {expected}")


def clip(value: object) -> str:
    """A foreign value in a message, short whatever it is."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def fields(value: Any, where: str, required: set[str], optional: Set[str] = frozenset()) -> dict[str, Any]:
    """An object with exactly these keys (optional ones may be absent)."""
    if not isinstance(value, dict):
        refuse(where, value, "an object")
    if missing := required - value.keys():
        refuse(where, sorted(value), f"the keys {sorted(missing)} too")
    if unknown := value.keys() - required - optional:
        refuse(where, sorted(unknown), f"only the keys {sorted(required | optional)}")
    result: dict[str, Any] = value
    return result


def entries(value: Any, where: str, most: int) -> list[Any]:
    if not isinstance(value, list):
        refuse(where, value, "a list")
    if len(value) > most:
        refuse(where, f"{len(value)} entries", f"at most {most}")
    result: list[Any] = value
    return result


def integer(value: Any, where: str, low: int = -MAX_INTEGER - 1, high: int = MAX_INTEGER) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        refuse(where, value, f"an integer from {low} to {high}")
    result: int = value
    return result


def boolean(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        refuse(where, value, "true or false")
    return value


def name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or not value.isprintable():
        refuse(where, value, f"a name of 1 to {MAX_NAME} printable characters")
    return value


def optional_name(value: Any, where: str) -> str | None:
    return None if value is None else name(value, where)


def dtype(value: Any, where: str) -> DType:
    if not isinstance(value, str) or value not in set(DType):
        refuse(where, value, f"one of {', '.join(DType)}")
    return DType(value)
