"""A worker computes with torch in eager mode only, so it need not load torch's compiler.

In torch 2.13 the first optimizer step, and the first run of many operations on the meta device, import
`torch._dynamo` for two functions that do nothing in eager mode; with it come some 330 modules and almost half of the
CPU time that a worker's start takes. A stand-in has those two, and what `init_process_group` asks of a compiler that is
there: to clear caches. Whatever else somebody asks of it loads the compiler and puts it in the place of the stand-in,
so nothing is missing, only late.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

NAME = "torch._dynamo"
_Function = TypeVar("_Function", bound=Callable[..., Any])


class _TraceRules:
    @staticmethod
    def clear_lru_cache() -> None:
        """Nothing has been cached."""


class _StandIn(ModuleType):
    """Found in `sys.modules` under the compiler's name."""

    trace_rules = _TraceRules

    @staticmethod
    def disable(
        fn: _Function | None = None, recursive: bool = True, *, reason: str | None = None, wrapping: bool = True
    ) -> Any:
        """Mark a function as one not to compile, or make what does so: nothing is compiled here."""
        return fn if fn is not None else lambda function: function

    @staticmethod
    def graph_break(msg: str = "") -> None:
        """End the part of a function that is compiled as one: there is none."""

    def __getattr__(self, name: str) -> Any:
        if name in ("__spec__", "__file__"):  # asked of every module by who lists modules, and no use of it
            raise AttributeError(name)
        return getattr(_load(self), name)


def _load(stand_in: ModuleType) -> ModuleType:
    if sys.modules.get(NAME) is stand_in:
        import torch

        del sys.modules[NAME]
        del torch._dynamo
        importlib.import_module(NAME)
    return sys.modules[NAME]


def put_off_the_compiler() -> None:
    """Let `torch._dynamo` be loaded only when somebody needs more of it. Where it is loaded, nothing is done."""
    import torch

    if NAME not in sys.modules:
        stand_in = _StandIn(NAME)
        sys.modules[NAME] = stand_in
        torch._dynamo = stand_in
