"""The authority of the data plane's tests signs for the relay's too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "transport"))
