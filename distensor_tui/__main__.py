"""`python -m distensor_tui`."""

from __future__ import annotations

import sys

from distensor_tui.cli import main

if __name__ == "__main__":
    sys.exit(main())
