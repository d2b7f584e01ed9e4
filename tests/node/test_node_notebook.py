"""What a driver leaves with a rank, and what another driver gets of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distensor.core.errors import ProgramRejectedError
from distensor.node.notebook import MOST_BYTES, MOST_STEPS, MOST_WORDS, Note, Notebook, parse_note
from distensor.node.step_report import StepReport
from distensor.sync import Held


def report(loss: float) -> StepReport:
    return StepReport(
        loss=loss, weight=4.0, grad_norm=0.5, compute_seconds=0.0, sync_seconds=0.0, wait_seconds=0.0, committed=True,
        held=Held(weights=0, peak=0), optimizer_bytes=0, scale=1.0,
    )  # fmt: skip


def note(parts: list[str], paid: int = 0, units: Any = None, **states: Any) -> Note:
    return Note(words={"parts": parts, "paid": paid, "units": units or [1, 2, 2]}, parts=states)


def test_the_note_of_the_newest_committed_step_is_given_back_with_parts_that_came_earlier() -> None:
    book, torch_state, python_state = Notebook(), torch.ones(3), torch.zeros(2)
    book.begin(1, note(["torch", "python"], torch=torch_state, python=python_state))
    book.commit(1, report(2.0))
    book.begin(2, note(["torch", "python"], paid=1, torch=torch_state + 1))
    words, tensors = book.answer(1)
    assert words["note"]["paid"] == 0
    assert torch.equal(tensors["note/torch"], torch_state), "step 2 is not committed"
    book.commit(2, report(1.5))
    words, tensors = book.answer(2)
    assert torch.equal(tensors["note/torch"], torch_state + 1)
    assert torch.equal(tensors["note/python"], python_state), "it has not changed since step 1"
    assert words["unpaid"] == [[2, [1, 2, 2]]], "the hub has the receipts of step 1"
    assert tensors["record"].tolist() == [[1.0, 2.0, 4.0, 0.5], [2.0, 1.5, 4.0, 0.5]]


def test_a_step_that_is_begun_anew_has_the_note_of_its_last_try() -> None:
    book = Notebook()
    book.begin(1, note(["a"], a=torch.zeros(1)))
    book.begin(1, note(["a"], units=[2, 4]))
    book.commit(1, report(1.0))
    words, tensors = book.answer(1)
    assert words["unpaid"] == [[1, [2, 4]]]
    assert torch.equal(tensors["note/a"], torch.zeros(1))


def test_without_a_note_there_is_still_the_record() -> None:
    book = Notebook()
    book.begin(1, None)
    book.commit(1, report(1.0))
    words, tensors = book.answer(1)
    assert (words["note"], words["unpaid"], len(tensors["record"])) == (None, [], 1)
    assert Notebook().answer(0)[1]["record"].shape == (0, 4)


def test_a_part_that_never_came_and_one_that_is_too_large_are_refused() -> None:
    with pytest.raises(ProgramRejectedError, match="never came"):
        Notebook().begin(1, note(["a"]))
    with pytest.raises(ProgramRejectedError, match="more than"):
        Notebook().begin(1, note(["a"], a=torch.zeros(MOST_BYTES + 1, dtype=torch.uint8)))


def test_the_record_does_not_grow_for_ever() -> None:
    book = Notebook()
    for step in range(1, MOST_STEPS + 11):
        book.commit(step, report(1.0))
    assert len(book.answer(MOST_STEPS + 10)[1]["record"]) == MOST_STEPS


def test_parts_are_taken_out_of_the_tensors_of_the_step() -> None:
    tensors = {"0/x": torch.ones(1), "note/torch": torch.zeros(1)}
    found = parse_note({"note": {"parts": ["torch"]}}, tensors)
    assert found is not None
    assert (list(tensors), list(found.parts)) == (["0/x"], ["torch"])
    assert parse_note({}, tensors) is None
    for wrong in ([], "x", {"run": "x" * MOST_WORDS}):
        with pytest.raises(ProgramRejectedError, match="expected an object"):
            parse_note({"note": wrong}, {})
