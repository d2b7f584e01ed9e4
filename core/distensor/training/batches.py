"""A user's batch as rows for replicas and micro-batches. Nothing here touches the network."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distensor.core.errors import BatchError
from distensor.program.expressions import Size

if TYPE_CHECKING:
    from torch import Tensor

    from distensor.program.values import ValueSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """`rows[replica][micro]` is the half-open range of rows; a replica may have none."""

    rows: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of every micro-batch, replica after replica."""
        return tuple(stop - start for replica in self.rows for start, stop in replica)

    @property
    def micro_batches(self) -> tuple[int, ...]:
        return tuple(len(replica) for replica in self.rows)


def split_rows(rows: int, *, replicas: int, micro_batches: int) -> Split:
    """Spread `rows` over replicas, then over at most `micro_batches` each, as evenly as whole rows allow.

    A batch with fewer rows than replicas leaves some replicas without work; their weight in every average is zero.

    >>> split_rows(5, replicas=2, micro_batches=2).rows
    (((0, 2), (2, 3)), ((3, 4), (4, 5)))

    Raises:
        BatchError: no rows at all.
    """
    if rows < 1:
        raise BatchError("the batch has 0 rows; expected at least 1")
    return Split(
        rows=tuple(
            tuple(_ranges(start, stop, min(micro_batches, stop - start))) for start, stop in _ranges(0, rows, replicas)
        )
    )


def _ranges(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    if parts == 0:
        return []
    size, larger = divmod(stop - start, parts)
    edges = [start]
    for index in range(parts):
        edges.append(edges[-1] + size + (1 if index < larger else 0))
    return list(itertools.pairwise(edges))


def row_major(inputs: Sequence[ValueSpec]) -> tuple[str, ...]:
    """The batch tensors whose dim 0 are rows; the others go whole to every micro-batch."""
    return tuple(spec.name for spec in inputs if spec.shape and isinstance(spec.shape[0], Size))


def row_count(flat: Mapping[str, Tensor], row_major: Sequence[str]) -> int:
    """The number of rows that all row-major tensors of a batch share.

    Raises:
        BatchError: they differ, or one is missing, or has no dimension.
    """
    counts: dict[str, int] = {}
    for name in row_major:
        if name not in flat:
            raise BatchError(f"the batch has no tensor {name!r}; the first batch had {', '.join(row_major)}")
        if flat[name].dim() == 0:
            raise BatchError(f"batch tensor {name!r} has no dimension; expected rows in dim 0")
        counts[name] = int(flat[name].shape[0])
    if not counts:
        raise BatchError("the batch holds no tensor with rows in dim 0, so it cannot be split")
    if len(set(counts.values())) > 1:
        sizes = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise BatchError(f"the tensors of the batch differ in their number of rows: {sizes}")
    return next(iter(counts.values()))
