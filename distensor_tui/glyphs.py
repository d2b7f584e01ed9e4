"""The characters that the screens are drawn with, and their stand-ins where there is no UTF-8."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from distensor_tui.model import NodeState


@dataclass(frozen=True, kw_only=True, slots=True)
class Glyphs:
    corners: str
    """Top left, top right, bottom left, bottom right."""
    horizontal: str
    vertical: str
    bar: str
    track: str
    stitch: str
    """A third kind of bar, told from the others without colour."""
    spark: str
    dot: str
    ring: str
    up: str
    down: str
    right: str
    between: str
    ok: str
    no: str
    warn: str
    info: str
    cursor: str
    ellipsis: str
    states: Mapping[NodeState, str]


UNICODE = Glyphs(
    corners="╭╮╰╯",
    horizontal="─",
    vertical="│",
    bar="━",
    track="─",
    stitch="╍",
    spark="▁▂▃▄▅▆▇█",
    dot="●",
    ring="○",
    up="↑",
    down="↓",
    right="▸",
    between="·",
    ok="✔",
    no="✖",
    warn="▲",
    info="·",
    cursor="▌",
    ellipsis="…",
    states={
        NodeState.STARTING: "◌",
        NodeState.EARNING: "●",
        NodeState.IDLE: "○",
        NodeState.WAITING: "◔",
        NodeState.PAUSED: "‖",
        NodeState.DRAINING: "▼",
        NodeState.DEGRADED: "▲",
        NodeState.OFFLINE: "✖",
        NodeState.UNKNOWN: "?",
    },
)

ASCII = Glyphs(
    corners="++++",
    horizontal="-",
    vertical="|",
    bar="#",
    track=".",
    stitch="=",
    spark="_.:-=+*#",
    dot="*",
    ring="o",
    up="^",
    down="v",
    right=">",
    between="-",
    ok="+",
    no="x",
    warn="!",
    info=".",
    cursor=">",
    ellipsis="~",
    states={
        NodeState.STARTING: ".",
        NodeState.EARNING: "*",
        NodeState.IDLE: "o",
        NodeState.WAITING: "~",
        NodeState.PAUSED: "=",
        NodeState.DRAINING: "v",
        NodeState.DEGRADED: "!",
        NodeState.OFFLINE: "x",
        NodeState.UNKNOWN: "?",
    },
)


def for_terminal(environ: Mapping[str, str], encoding: str | None = None) -> Glyphs:
    """ASCII on the Linux console, and where the locale or the output cannot carry anything else."""
    encoding = encoding if encoding is not None else (getattr(sys.__stdout__, "encoding", None) or "")
    utf8 = _is_utf8(encoding) and _is_utf8(_locale(environ))
    return UNICODE if utf8 and environ.get("TERM") != "linux" else ASCII


def _locale(environ: Mapping[str, str]) -> str:
    """The locale that was asked for. Containers often name none, and terminals of today are UTF-8."""
    names = (environ.get(variable) for variable in ("LC_ALL", "LC_CTYPE", "LANG"))
    return next((name for name in names if name), "utf8")


def _is_utf8(name: str) -> bool:
    return "utf8" in name.lower().replace("-", "")
