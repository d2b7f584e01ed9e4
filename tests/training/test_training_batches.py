"""Rows over replicas and micro-batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distensor.core.errors import BatchError
from distensor.training.batches import row_count, split_rows


@given(rows=st.integers(1, 200), replicas=st.integers(1, 9), micro_batches=st.integers(1, 9))
def test_every_row_goes_to_one_place_in_order_and_evenly(rows: int, replicas: int, micro_batches: int) -> None:
    split = split_rows(rows, replicas=replicas, micro_batches=micro_batches)
    assert len(split.rows) == replicas
    flat = [place for replica in split.rows for place in replica]
    assert [row for start, stop in flat for row in range(start, stop)] == list(range(rows))
    assert all(stop > start for start, stop in flat), "no micro-batch is empty"
    assert all(len(replica) <= micro_batches for replica in split.rows)
    sizes = [sum(stop - start for start, stop in replica) for replica in split.rows]
    assert max(sizes) - min(sizes) <= 1
    for replica in split.rows:
        parts = [stop - start for start, stop in replica]
        assert not parts or max(parts) - min(parts) <= 1


def test_fewer_rows_than_replicas_leave_some_without_work() -> None:
    assert split_rows(1, replicas=3, micro_batches=4).micro_batches == (1, 0, 0)


def test_no_rows_are_an_error() -> None:
    with pytest.raises(BatchError, match="0 rows"):
        split_rows(0, replicas=1, micro_batches=1)


def test_rows_that_differ_between_tensors_are_named() -> None:
    flat = {"ids": torch.zeros(4, 2), "labels": torch.zeros(3, 2)}
    with pytest.raises(BatchError, match="ids 4, labels 3"):
        row_count(flat, ["ids", "labels"])


def test_a_missing_tensor_and_a_scalar_are_named() -> None:
    with pytest.raises(BatchError, match="'labels'"):
        row_count({"ids": torch.zeros(4)}, ["ids", "labels"])
    with pytest.raises(BatchError, match="'ids'"):
        row_count({"ids": torch.tensor(1.0)}, ["ids"])
    with pytest.raises(BatchError, match="cannot be split"):
        row_count({"ids": torch.zeros(4)}, [])
