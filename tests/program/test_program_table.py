"""The operation table says what ATen says: arguments, kinds, defaults, results; and each name runs itself."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from distensor.program.attention import ATTENTION
from distensor.program.collectives import COLLECTIVES
from distensor.program.draws import Draws
from distensor.program.kernels import FACTORIES, KERNELS
from distensor.program.ops import FIXED_ARGUMENTS, RANDOM
from distensor.program.signatures import SIGNATURES, Kind, parse

DECIDED_BY_THE_WORKER = {"layout", "device", "pin_memory", "generator"}
RANDOM_KERNELS = Draws(torch.device("cpu")).kernels

_TYPES = {
    Kind.TENSOR: {"Tensor"},
    Kind.TENSOR_OR_NUMBER: {"Tensor"},
    Kind.INTEGER: {"int", "SymInt"},
    Kind.NUMBER: {"number"},
    Kind.REAL: {"float"},
    Kind.BOOLEAN: {"bool"},
    Kind.DTYPE: {"ScalarType"},
    Kind.WORD: {"str"},
    Kind.EQUATION: {"str"},
    Kind.MEMORY_FORMAT: {"MemoryFormat"},
}


ATEN = [name for name in SIGNATURES if name.startswith("aten.")]


def _schema(name: str) -> Any:
    space, base, overload = name.split(".")
    assert space == "aten"
    return getattr(getattr(torch.ops.aten, base), overload)


@pytest.mark.parametrize("name", ATEN)
def test_signature_is_that_of_aten(name: str) -> None:
    schema = _schema(name)._schema
    arguments = [argument for argument in schema.arguments if argument.name not in DECIDED_BY_THE_WORKER]
    parameters = SIGNATURES[name].parameters
    assert [parameter.name for parameter in parameters] == [argument.name for argument in arguments]
    for parameter, argument in zip(parameters, arguments, strict=True):
        text = str(argument.real_type)
        assert parameter.keyword_only == argument.kwarg_only
        assert parameter.optional == text.startswith("Optional")
        assert parameter.is_list == ("List" in text)
        assert parameter.optional_items == ("List[Optional" in text)
        plain = text.replace("Optional[", "").replace("List[", "").rstrip("]")
        assert plain in _TYPES[parameter.kind]
        assert parameter.required == (not argument.has_default_value())
    returned = [str(item.type) for item in schema.returns]
    assert SIGNATURES[name].results == (None if returned == ["List[Tensor]"] else len(returned))


@pytest.mark.parametrize("name", ATEN)
def test_default_is_that_of_aten(name: str) -> None:
    for argument in _schema(name)._schema.arguments:
        parameter = SIGNATURES[name].parameter(argument.name)
        if parameter is None or parameter.required or parameter.kind in (Kind.MEMORY_FORMAT, Kind.DTYPE):
            continue
        default = argument.default_value
        assert parameter.default == (tuple(default) if isinstance(default, list) else default)


def test_every_operation_runs_itself() -> None:
    assert set(KERNELS) | set(RANDOM_KERNELS) == set(ATEN)
    assert {*COLLECTIVES, *ATTENTION} == set(SIGNATURES) - set(ATEN)
    assert not set(KERNELS) & set(RANDOM_KERNELS)
    own = {"aten.div.Tensor_mode", "aten.div.Scalar_mode"}
    for name, kernel in KERNELS.items():
        assert str(kernel) == name or name in own


@pytest.mark.parametrize("mode", ["trunc", "floor", None])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_division_rounds_as_torch_does(mode: str | None, dtype: torch.dtype) -> None:
    dividend = torch.arange(-9, 10).to(dtype)
    for divisor in (-4, -3, -1, 1, 2, 5):
        other = torch.full_like(dividend, divisor)
        expected = torch.div(dividend, other, rounding_mode=mode)
        for kernel, value in (("Tensor_mode", other), ("Scalar_mode", divisor)):
            assert torch.equal(KERNELS[f"aten.div.{kernel}"](dividend, value, rounding_mode=mode), expected)


def test_division_of_the_smallest_integer_leaves_the_process_alive() -> None:
    smallest = torch.tensor([-(2**63)])
    assert KERNELS["aten.div.Tensor_mode"](smallest, torch.tensor([-1]), rounding_mode="trunc").dtype is torch.int64


def test_random_operations_are_those_that_take_a_site() -> None:
    assert set(RANDOM_KERNELS) == RANDOM


def test_factories_are_those_that_make_tensors_from_sizes() -> None:
    made = {
        name
        for name, signature in SIGNATURES.items()
        if not any(parameter.kind in (Kind.TENSOR, Kind.TENSOR_OR_NUMBER) for parameter in signature.parameters)
    }
    assert made - RANDOM == FACTORIES


def test_nothing_writes_in_place_or_shows_old_memory() -> None:
    for name in ATEN:
        assert not _schema(name)._schema.is_mutable or name == "aten.batch_norm.default", name
        assert "empty" not in name
        assert name.split(".")[1] not in {"as_strided", "set", "resize", "nonzero", "item", "masked_select"}
    assert FIXED_ARGUMENTS["aten.batch_norm.default", "training"] is False


def test_a_signature_that_cannot_be_read_stops_the_import() -> None:
    with pytest.raises(AssertionError, match="not a signature"):
        parse("aten.add(T self")
    with pytest.raises(AssertionError, match="not a parameter"):
        parse("aten.add.Tensor(T self, other) -> T")


def test_data_and_json_need_no_torch() -> None:
    code = (
        "import sys; import distensor.program.stage_program, distensor.program.signatures, distensor.program.losses;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
