"""Planes inside one process, from the kit of the transport tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "transport"))
