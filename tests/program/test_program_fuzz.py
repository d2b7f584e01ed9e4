"""Random programs and random damage: checking either gives a program or ProgramRejectedError, nothing else, in time."""

from __future__ import annotations

import json
import time
from typing import Any

import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from distensor.core.errors import ProgramRejectedError
from distensor.program import Limits, StageProgram, capture, cut
from distensor.program.signatures import SIGNATURES, Kind, Parameter

SECONDS = 5.0
LIMITS = Limits(max_bytes=1 << 30, max_work=1e12)


def _document() -> dict[str, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).train()
    batch = (torch.randn(5, 4), torch.randint(0, 3, (5,)))
    pieces = cut(capture(module, batch, loss=lambda out, given: functional.cross_entropy(out, given[1])))
    found: dict[str, Any] = json.loads(pieces.programs[0].to_json())
    return found


DOCUMENT = _document()
DATA = json.dumps(DOCUMENT).encode()


def check(data: bytes) -> None:
    started = time.monotonic()
    program, refusal = None, ""
    try:
        program = StageProgram.from_json(data, LIMITS)
    except ProgramRejectedError as error:
        refusal = str(error)
    assert (program is None) == (0 < len(refusal) < 2000)
    if program is not None:
        assert StageProgram.from_json(program.to_json(), LIMITS) == program
    assert time.monotonic() - started < SECONDS


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, len(DATA) - 1), st.binary(min_size=0, max_size=6), st.integers(0, 12))
def test_damaged_bytes(position: int, put: bytes, removed: int) -> None:
    check(DATA[:position] + put + DATA[position + removed :])


NUMBERS = st.one_of(
    st.integers(-3, 9),
    st.sampled_from([2**31, 2**40, 2**62, 2**63 - 1, -(2**63), 10**12]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
)
SIZES = st.sampled_from(["batch", ["*", "batch", 3], ["//", "batch", 2], ["/", "batch", 2], ["%", 7, "batch"]])
TENSORS = st.sampled_from(
    [{"v": "inputs"}, {"v": "targets"}, {"w": "0.weight"}, {"w": "2.bias"}, {"v": "%made"}, {"v": "%scalar"}]
)
WORDS = {
    Kind.BOOLEAN: st.booleans(),
    Kind.DTYPE: st.sampled_from(["float32", "int64", "bool", "complex64", "float16"]),
    Kind.EQUATION: st.sampled_from(["ab,bc->ac", "ab->", "ii->i", "a,b->ab"]),
    Kind.WORD: st.sampled_from(["none", "tanh", "trunc", "floor", "valid", "same", "constant", "circular", "ij"]),
    Kind.MEMORY_FORMAT: st.sampled_from(["contiguous", "preserve", "channels_last"]),
    Kind.INTEGER: st.one_of(st.integers(-3, 9), st.sampled_from([10**12, 2**62]), SIZES.map(lambda tree: {"s": tree})),
    Kind.NUMBER: st.one_of(NUMBERS, SIZES.map(lambda tree: {"s": tree})),
    Kind.REAL: NUMBERS.filter(lambda value: not isinstance(value, bool)),
    Kind.TENSOR: TENSORS,
    Kind.TENSOR_OR_NUMBER: st.one_of(TENSORS, NUMBERS),
}


def _argument(parameter: Parameter) -> st.SearchStrategy[Any]:
    one = WORDS[parameter.kind]
    value = st.lists(one, max_size=4) if parameter.is_list else one
    return st.one_of(st.none(), value) if parameter.optional else value


@st.composite
def nodes(draw: st.DrawFn) -> dict[str, Any]:
    signature = SIGNATURES[draw(st.sampled_from(sorted(SIGNATURES)))]
    args = {
        parameter.name: draw(_argument(parameter))
        for parameter in signature.parameters
        if parameter.required or draw(st.booleans())
    }
    count = signature.results if signature.results is not None else draw(st.integers(1, 4))
    return {"op": signature.name, "args": args, "out": [f"%fuzz{index}" for index in range(count)], "in": "fuzz"}


FIRST = [
    {"op": "aten.mul.Tensor", "args": {"self": {"v": "inputs"}, "other": 2}, "out": ["%made"], "in": ""},
    {"op": "aten.sum.default", "args": {"self": {"v": "inputs"}}, "out": ["%scalar"], "in": ""},
]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(nodes())
@example({"op": "aten.roll.default", "args": {"self": {"v": "inputs"}, "shifts": [1] * 4}, "out": ["%x"], "in": ""})
def test_any_single_operation_with_any_arguments(node: dict[str, Any]) -> None:
    check(json.dumps({**DOCUMENT, "nodes": [*FIRST, node, *DOCUMENT["nodes"]]}).encode())
