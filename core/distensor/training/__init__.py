"""The trainer's side: `init`, `Trainer`, and the job behind them. Names load torch when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distensor.training.plan_report import Plan
    from distensor.training.planning import plan
    from distensor.training.results import History, Parity, StepResult
    from distensor.training.sessions import Session, current_session, init, query_mesh, session, shutdown
    from distensor.training.trainer import Trainer

_HOME = {
    "History": "results",
    "Parity": "results",
    "StepResult": "results",
    "Plan": "plan_report",
    "plan": "planning",
    "Session": "sessions",
    "current_session": "sessions",
    "init": "sessions",
    "query_mesh": "sessions",
    "session": "sessions",
    "shutdown": "sessions",
    "Trainer": "trainer",
}

__all__ = [
    "History",
    "Parity",
    "Plan",
    "Session",
    "StepResult",
    "Trainer",
    "current_session",
    "init",
    "plan",
    "query_mesh",
    "session",
    "shutdown",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'distensor.training' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"distensor.training.{_HOME[name]}"), name)
    globals()[name] = value
    return value
