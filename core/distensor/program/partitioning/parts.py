"""The graphs of all coordinates, and how weights are cut between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from distensor.core.compute import ContextAttention, parse_context_attention
from distensor.core.layouts import WeightLayout
from distensor.core.sequence import HeadTail
from distensor.program.capturing import Captured
from distensor.program.context import cut_sequence
from distensor.program.partitioning.rewriter import Gathered
from distensor.program.partitioning.tensor import cut_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """A captured module as one graph for each (tp, cp) coordinate; together they compute what it computes."""

    tensor: int
    context: int
    graphs: Mapping[tuple[int, int], Captured]
    layouts: Mapping[str, WeightLayout]
    """Weights that are cut on tp; all others are the same on every rank."""
    gathers: tuple[Gathered, ...] = ()
    """Cut values that tensor parallelism makes whole, for want of a rule: right, but slow."""
    whole_sequences: tuple[tuple[str, str], ...] = ()
    """(operation, module) where context parallelism makes the sequence whole, for want of a rule: right, but slow."""

    def captured(self, *, tp: int = 0, cp: int = 0) -> Captured:
        """The graph of one coordinate, to be cut into stages."""
        return self.graphs[tp, cp]


def partition(
    captured: Captured,
    placements: Mapping[str, int | None],
    *,
    tensor: int = 1,
    context: int = 1,
    attention: str = ContextAttention.ALL_GATHER,
    shares: tuple[int, ...] = (),
) -> Partition:
    """Rewrite `captured` for `tensor` x `context` ranks.

    `placements` maps parameter names to the dim that is cut on tp, or None; parameters not named are replicated.
    `attention` is how keys and values move between the ranks of the sequence: all_gather, ring or ulysses; `shares`
    are the proportions of their parts, equal by default.

    Raises:
        ShardingError: a parameter that cannot be cut for this many ranks, by name.
        BatchError, CaptureError, ConfigError: the module or its batch has no sequence to cut (`cut_sequence`).
    """
    if tensor == 1:  # one rank holds every weight whole
        made = Partition(tensor=1, context=1, graphs={(0, 0): captured}, layouts={})
    else:
        made = _with_tensor(captured, placements, tensor)
    return with_context(made, context, attention, shares)


def _with_tensor(captured: Captured, placements: Mapping[str, int | None], tensor: int) -> Partition:
    cut = cut_weights(captured, placements, tensor)
    graphs = {(rank, 0): graph for rank, graph in enumerate(cut.graphs)}
    return Partition(tensor=tensor, context=1, graphs=graphs, layouts=cut.layouts, gathers=cut.gathers)


def with_context(made: Partition, context: int, attention: str, shares: tuple[int, ...] = ()) -> Partition:
    """The graphs of `made` (one for each tp rank) cut along the sequence, head-tail."""
    if context == 1:
        return made
    division, method = HeadTail(ranks=context, weights=shares), parse_context_attention(attention)
    cuts = {tp: cut_sequence(graph, division, method) for (tp, _), graph in made.graphs.items()}
    graphs = {(tp, cp): graph for tp, cut in cuts.items() for cp, graph in enumerate(cut.graphs)}
    return replace(made, context=context, graphs=graphs, whole_sequences=cuts[0].gathers)
