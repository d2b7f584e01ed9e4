"""Reading the answers of probe children: plain JSON in which anything may be missing. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from distensor.core.reading import Reading, Unavailable

Answer: TypeAlias = Mapping[str, Any] | Unavailable
"""What a probe child printed, or why it printed nothing."""


def number(entry: Mapping[str, Any], name: str) -> Reading[Any]:
    value = entry.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    return missing(value)


def word(entry: Mapping[str, Any], name: str, default: str) -> str:
    value = entry.get(name)
    return value if isinstance(value, str) and value else default


def words(entry: Mapping[str, Any], name: str) -> Reading[str]:
    value = entry.get(name)
    return value if isinstance(value, str) and value else missing(value)


def missing(value: Any) -> Unavailable:
    """The reason that the child gave in place of a value."""
    return Unavailable(reason=str(value.get("unavailable", "unknown")) if isinstance(value, dict) else "not reported")


def no_answer(answer: Answer) -> str | None:
    """Why a child said nothing; None when it answered."""
    return answer.reason if isinstance(answer, Unavailable) else None


def error_text(error: Mapping[str, Any]) -> str:
    code = f"NVML error {error['code']}: " if error.get("code") else ""
    hint = f"; {error['hint']}" if error.get("hint") else ""
    return f"{code}{error.get('message', 'unknown')}{hint}"


def torch_reason(torch: Answer, backend: str) -> str | None:
    """Why torch cannot use `backend` here; None when it can."""
    if isinstance(torch, Unavailable):
        return f"the torch probe failed: {torch.reason}"
    if "error" in torch:
        return error_text(torch["error"])
    if torch.get(backend):
        return None
    version = torch.get("version", "unknown")
    if not torch.get(f"{backend}_build"):
        return f"the installed torch {version} is built without {backend.upper()}; install a build that has it"
    return f"torch {version} cannot open {backend.upper()} here"
