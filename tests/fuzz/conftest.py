"""Which readers are tried is a list that the house rules look at too, without loading any of them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "repo"))
