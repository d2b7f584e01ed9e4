"""The orders of GPipe, looped breadth-first GPipe, 1F1B and interleaved 1F1B, each for one rank of a pipeline.

Stage s lives on rank s mod P, so that rank r holds the chunks r, r+P, r+2P, ...

Sources: GPipe (Huang et al. 2019, arXiv:1811.06965); breadth-first pipelines (Lamy-Poirier 2023, arXiv:2211.05953);
1F1B (Narayanan et al. 2019, PipeDream-flush in arXiv:2006.09503); interleaved 1F1B (Narayanan et al. 2021,
arXiv:2104.04473).
"""

from __future__ import annotations

from collections.abc import Iterator

from distensor.core.actions import Action, backward, forward


def gpipe(rank: int, ranks: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """All forwards, then all backwards, each stage's micro-batches in the order of their forwards."""
    own = range(rank, stages, ranks)
    return (
        *(forward(stage, micro) for stage in own for micro in range(micro_batches)),
        *(backward(stage, micro) for stage in reversed(own) for micro in range(micro_batches)),
    )


def looped_bfs(rank: int, ranks: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """As GPipe, the newest micro-batch's backward first: what was made last is freed first."""
    own = range(rank, stages, ranks)
    return (
        *(forward(stage, micro) for stage in own for micro in range(micro_batches)),
        *(backward(stage, micro) for stage in reversed(own) for micro in reversed(range(micro_batches))),
    )


def plain_warm_up(rank: int, ranks: int) -> int:
    """How many forwards 1F1B runs ahead on `rank`: its distance to the last rank."""
    return ranks - 1 - rank


def one_f_one_b(rank: int, micro_batches: int, warm_up: int) -> tuple[Action, ...]:
    """`warm_up` forwards, then one forward and one backward in turn; at most `warm_up` + 1 are in flight."""
    forwards = [forward(rank, micro) for micro in range(micro_batches)]
    backwards = [backward(rank, micro) for micro in range(micro_batches)]
    return merge(forwards, backwards, min(warm_up, micro_batches))


def interleaved(rank: int, ranks: int, stages: int, micro_batches: int) -> tuple[Action, ...]:
    """1F1B over virtual stages: groups of micro-batches go depth first through a rank's chunks.

    The definition has groups of `ranks` micro-batches. Where that does not divide, groups are as even as possible
    and never smaller (one group alone may be): a smaller one would wait for its own way round the ranks.
    """
    chunks = stages // ranks
    places = list(chunk_places(chunks, ranks, micro_batches))
    warm_up = (chunks - 1) * group_sizes(ranks, micro_batches)[0] + 2 * (ranks - 1 - rank)
    forwards = [forward(chunk * ranks + rank, micro) for chunk, micro in places]
    backwards = [backward((chunks - 1 - chunk) * ranks + rank, micro) for chunk, micro in places]
    return merge(forwards, backwards, min(warm_up, len(places)))


def group_sizes(ranks: int, micro_batches: int) -> list[int]:
    """How many micro-batches go through the chunks together, largest first; one empty group where there are none.

    >>> group_sizes(4, 11)
    [6, 5]
    """
    count = max(1, micro_batches // ranks)
    least, more = divmod(micro_batches, count)
    return [least + 1] * more + [least] * (count - more)


def chunk_places(chunks: int, ranks: int, micro_batches: int) -> Iterator[tuple[int, int]]:
    """(chunk, micro-batch) in the order of interleaved forwards; backwards take the chunks from the other end."""
    first = 0
    for size in group_sizes(ranks, micro_batches):
        yield from ((chunk, micro) for chunk in range(chunks) for micro in range(first, first + size))
        first += size


def merge(forwards: list[Action], backwards: list[Action], warm_up: int) -> tuple[Action, ...]:
    """`warm_up` forwards, then one forward and one backward in turn, then the remaining backwards."""
    steady = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
    return (*forwards[:warm_up], *steady, *backwards[len(forwards) - warm_up :])
