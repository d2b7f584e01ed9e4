"""Assumptions about sizes: read without eval, checked on every batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  the name that everybody uses

from distensor.core.errors import BatchError, CaptureError
from distensor.program import capture, cut
from distensor.program.guards import parse_guards

SHAPES = {"ids": (4, 12), "labels": (4, 10)}


def guards(*codes: str) -> Any:
    return parse_guards(SimpleNamespace(_guards_code=list(codes)), ["ids", "labels"])


def _size(tensor: int, dim: int) -> str:
    return f"L['tensors'][{tensor}].size()[{dim}]"


@pytest.mark.parametrize(
    ("code", "holds"),
    [
        (f"{_size(0, 1)} <= 64", True),
        (f"{_size(0, 1)} <= 8", False),
        (f"{_size(0, 0)} == {_size(1, 0)}", True),
        (f"{_size(0, 1)} + ((-1)*{_size(1, 1)}) <= 0", False),
        (f"(8*{_size(0, 1)}) != 56", True),
        (f"(({_size(0, 0)}*{_size(0, 1)}) % 5) == 0", False),
        (f"2 <= {_size(0, 0)} < 5", True),
        (f"{_size(0, 0)} // 2 == 2 and not {_size(0, 1)} == 3", True),
        (f"{_size(0, 0)} == 1 or {_size(0, 1)} == 1", False),
        (f"max({_size(0, 0)}, 3) ** 2 == 16", True),
    ],
)
def test_guards_are_evaluated(code: str, holds: bool) -> None:
    (guard,) = guards(code)
    assert guard.holds(SHAPES) is holds


def test_the_text_names_the_users_tensors() -> None:
    (guard,) = guards(f"{_size(0, 1)} <= {_size(1, 1)}")
    assert guard.text == "ids.shape[1] <= labels.shape[1]"


@pytest.mark.parametrize(
    "code",
    [
        "__import__('os').system('true')",
        "open('x')",
        "L['tensors'][0].stride()[0] == 1",
        "lambda: 1",
        "-'a' == 1",
        "1 in (1,)",
    ],
)
def test_what_cannot_be_checked_is_refused_at_capture(code: str) -> None:
    with pytest.raises(CaptureError, match="in a way that cannot be checked"):
        guards(code)


def test_a_branch_on_a_size_holds_for_the_sizes_it_was_taken_for() -> None:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            out = self.layer(x)
            return out * 2 if x.shape[1] % 3 == 0 else out  # type: ignore[no-any-return]

    def loss(out: Any, batch: Any) -> Tensor:
        return F.mse_loss(out, batch[1])

    given = torch.randn(4, 6, 2), torch.randn(4, 6, 2)
    pieces = cut(capture(Long().train(), given, loss=loss))
    pieces.flatten_batch((torch.randn(3, 9, 2), torch.randn(3, 9, 2)))
    with pytest.raises(BatchError, match=r"another path for these sizes.*inputs\.shape\[1\].*% 3"):
        pieces.flatten_batch((torch.randn(3, 8, 2), torch.randn(3, 8, 2)))
