"""`python -m distensor.testing.simulation`: run seeds, print what they were, shrink one that fails."""

from __future__ import annotations

import sys

from distensor.testing.simulation.cli import main

sys.exit(main(sys.argv[1:]))
