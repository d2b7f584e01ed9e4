"""A deterministic simulator of the control plane: the real hub, links and books, under every fault of a seed.

`run(Settings(seed=N))` is one run; `python -m distensor.testing.simulation --seed N` prints it. docs/simulator.md says
what is real in it and what is not.
"""

from distensor.testing.simulation.faults import Fault, FaultKind
from distensor.testing.simulation.trace import Entry, Promise, Trace, ViolationError
from distensor.testing.simulation.world import Outcome, Settings, run

__all__ = ["Entry", "Fault", "FaultKind", "Outcome", "Promise", "Settings", "Trace", "ViolationError", "run"]
