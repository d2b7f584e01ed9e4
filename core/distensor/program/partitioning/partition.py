"""The graphs of all coordinates, and how weights are cut between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from distensor.core.errors import UnsupportedOptionError
from distensor.core.layouts import WeightLayout
from distensor.program.capturing import Captured


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A captured module as one graph for each (tp, cp) coordinate; together they compute what it computes."""

    tensor: int
    context: int
    graphs: Mapping[tuple[int, int], Captured]
    layouts: Mapping[str, WeightLayout]
    """Weights that are cut on tp; all others are the same on every rank."""

    def captured(self, *, tp: int = 0, cp: int = 0) -> Captured:
        """The graph of one coordinate, to be cut into stages."""
        return self.graphs[tp, cp]


def partition(
    captured: Captured, placements: Mapping[str, int | None], *, tensor: int = 1, context: int = 1
) -> Partition:
    """Rewrite `captured` for `tensor` x `context` ranks.

    `placements` maps parameter names to the dim that is cut on tp, or None; parameters not named are replicated.

    Raises:
        UnsupportedOptionError: more than one rank.
    """
    if (tensor, context) != (1, 1):
        raise UnsupportedOptionError(
            f"tensor={tensor}, context={context}: partitioning a graph is not implemented in this version; use 1 and 1"
        )
    del placements  # one rank holds every weight whole
    return Partition(tensor=1, context=1, graphs={(0, 0): captured}, layouts={})
