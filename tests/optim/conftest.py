"""Processes in one gloo group, from the kit of the core tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "core"))
