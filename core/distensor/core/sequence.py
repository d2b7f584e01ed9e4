"""How a sequence is divided among the ranks of the context-parallel axis: arithmetic alone, no tensors.

Head-tail (the chunk rule of Megatron-LM and of torch's load balancer for causal attention): the sequence is cut into
2P chunks in order, and rank r owns chunk r and chunk 2P-1-r. Early positions see few keys and late ones many, so that
every rank computes the same number of score pairs. Lengths that 2P does not divide give chunks that differ by one;
short sequences give empty chunks. With weights (measured speeds) chunks are proportional to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from distensor.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadTail:
    """The division among `ranks`; `weights` (one integer of at least 1 for each rank) default to equal shares.

    >>> HeadTail(ranks=2).positions(8, 0)
    (0, 1, 6, 7)

    Raises:
        ConfigError: no rank at all, or weights that are not one positive integer for each rank.
    """

    ranks: int
    weights: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ConfigError(f"a sequence cannot be divided among {self.ranks} ranks; at least 1 is needed")
        if self.weights and (len(self.weights) != self.ranks or min(self.weights) < 1):
            raise ConfigError(
                f"weights {list(self.weights)} for {self.ranks} ranks: expected one integer of at least 1 for each"
            )

    @property
    def owners(self) -> tuple[int, ...]:
        """The rank of each chunk, in the order of the sequence."""
        return (*range(self.ranks), *reversed(range(self.ranks)))

    @property
    def marks(self) -> tuple[int, ...]:
        """Where chunks begin and end, as parts of marks[-1]: 2P + 1 numbers from 0."""
        weights = self.weights or (1,) * self.ranks
        return (0, *itertools.accumulate(weights[owner] for owner in self.owners))

    @property
    def shortest(self) -> int:
        """From this length on every rank holds a position."""
        length = -(-self.marks[-1] // min(self.weights, default=1))  # no chunk is empty from here on
        while length > 1 and self._nobody_is_empty(length - 1):
            length -= 1
        return length

    def _nobody_is_empty(self, length: int) -> bool:
        sizes = [stop - start for start, stop in itertools.pairwise(self.cuts(length))]
        held = dict.fromkeys(self.owners, 0)
        for owner, size in zip(self.owners, sizes, strict=True):
            held[owner] += size
        return all(held.values())

    def cuts(self, length: int) -> tuple[int, ...]:
        """Positions where chunks begin and end in a sequence of `length`: 2P + 1 numbers from 0 to `length`."""
        total = self.marks[-1]
        return tuple(length * mark // total for mark in self.marks)

    def chunks(self, length: int, rank: int) -> tuple[tuple[int, int], ...]:
        """(start, stop) of the two chunks of `rank`, head first; a chunk may be empty."""
        pairs = zip(self.owners, itertools.pairwise(self.cuts(length)), strict=True)
        return tuple(chunk for owner, chunk in pairs if owner == rank)

    def positions(self, length: int, rank: int) -> tuple[int, ...]:
        """The positions that `rank` holds, in the order that it holds them."""
        return tuple(itertools.chain.from_iterable(itertools.starmap(range, self.chunks(length, rank))))

    def rearrange(self, length: int) -> tuple[int, ...]:
        """Positions of all ranks, rank after rank: indexing a sequence with it gives the shards joined."""
        return tuple(itertools.chain.from_iterable(self.positions(length, rank) for rank in range(self.ranks)))

    def restore(self, length: int) -> tuple[int, ...]:
        """The inverse of `rearrange`: indexing the joined shards with it gives the sequence."""
        order = self.rearrange(length)
        return tuple(sorted(range(length), key=order.__getitem__))

    def causal_pairs(self, length: int, rank: int) -> int:
        """Pairs of query and key that causal attention needs on `rank`: position p sees p + 1 keys."""
        return sum(position + 1 for position in self.positions(length, rank))


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Queries [query, query + rows) against keys [key, key + columns), by their positions in the sequence.

    `row` and `column` are where they begin in the shards at hand. `is_cut`: row i sees the columns up to i alone.
    """

    query: int
    rows: int
    key: int
    columns: int
    row: int
    column: int
    is_cut: bool

    @property
    def pairs(self) -> int:
        """Pairs that attention needs of this tile."""
        if not self.is_cut:
            return self.rows * self.columns
        return sum(min(row + 1, self.columns) for row in range(self.rows))


def tiles(
    queries: Sequence[tuple[int, int]], keys: Sequence[tuple[int, int]], *, causal: bool, size: int
) -> Iterator[Tile]:
    """The tiles of at most size x size that attention of the chunks `queries` to the chunks `keys` needs.

    Chunks are (start, stop) positions, in the order of the shards. Under causality tiles without any pair are left
    out, and columns that no row sees: that is what makes head-tail shards equally expensive.
    """
    for query, row, rows in _steps(queries, size):
        for key, column, columns in _steps(keys, size):
            whole = Tile(query=query, rows=rows, key=key, columns=columns, row=row, column=column, is_cut=False)
            yield from _causal(whole) if causal else (whole,)


def _causal(tile: Tile) -> Iterator[Tile]:
    """The part before the first query, which all rows see, and the part on the diagonal, which begins at one place."""
    before = min(max(tile.query - tile.key, 0), tile.columns)
    if before:
        yield replace(tile, columns=before)
    skipped = max(tile.key - tile.query, 0)
    rows, columns = tile.rows - skipped, min(tile.columns - before, tile.rows - skipped)
    if rows > 0 and columns > 0:
        yield Tile(
            query=tile.query + skipped,
            rows=rows,
            key=tile.key + before,
            columns=columns,
            row=tile.row + skipped,
            column=tile.column + before,
            is_cut=columns > 1,
        )


def _steps(chunks: Sequence[tuple[int, int]], size: int) -> Iterator[tuple[int, int, int]]:
    """(position, place in the shard, length) of pieces of at most `size`."""
    place = 0
    for start, stop in chunks:
        for position in range(start, stop, size):
            length = min(size, stop - position)
            yield position, place, length
            place += length
