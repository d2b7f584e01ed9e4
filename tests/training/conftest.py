"""Planes inside one process, from the kit of the transport tests, the model families of the program tests, and gloo
processes from the kit of the core tests."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path.extend([str(TESTS / "transport"), str(TESTS / "program"), str(TESTS / "core")])
