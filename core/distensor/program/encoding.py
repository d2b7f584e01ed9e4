"""StageProgram <-> canonical JSON. Decoding checks the structure; shapes.py checks what it computes.

    {"format": "distensor.stage", "version": 1, "stage": 0, "stages": 2,
     "dims": [["batch", 1, null, 4]],
     "inputs": [{"name", "dtype", "shape", "grad", "source"}], "outputs": [{"name", "dtype", "shape", "grad"}],
     "parameters": [[name, dtype, [extents], requires_grad]], "buffers": [[...]],
     "nodes": [{"op": "aten.add.Tensor", "args": {"self": {"v": "%x"}, "other": 2}, "out": ["%y"], "in": "model"}],
     "loss": null, "weight": null, "axes": [["tp", 2, 0]]}

`axes` is there only in a program that is one of several of its stage: name, size, rank.

An argument is a literal, a list, {"v": value}, {"w": weight}, {"s": size expression} or {"f": "inf"}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from distensor.core.errors import ProgramRejectedError
from distensor.program import reading
from distensor.program.arguments import check_node
from distensor.program.expressions import Extent, Size, Tree, check_tree
from distensor.program.values import (
    FORMAT_VERSION,
    Argument,
    AxisSpec,
    Dim,
    InputSpec,
    Limits,
    Node,
    ProgramData,
    Ref,
    Source,
    ValueSpec,
    WeightRef,
    WeightSpec,
)

FORMAT = "distensor.stage"
MAX_NDIM = 16
MAX_STAGES = 4096
MAX_RANKS = 4096
_AXES = ("tp", "cp")
_KEYS = {"format", "version", "stage", "stages", "dims", "inputs", "outputs", "parameters", "buffers", "nodes"}


def encode(program: ProgramData) -> bytes:
    """Canonical bytes: sorted keys, no spaces, no floats that JSON lacks."""
    document: dict[str, Any] = {
        "format": FORMAT,
        "version": program.version,
        "stage": program.stage,
        "stages": program.stages,
        "dims": [[dim.name, dim.minimum, dim.maximum, dim.example] for dim in program.dims],
        "inputs": [{**_encode_value(spec.value), "source": spec.source.value} for spec in program.inputs],
        "outputs": [_encode_value(spec) for spec in program.outputs],
        "parameters": [_encode_weight(spec) for spec in program.parameters],
        "buffers": [_encode_weight(spec) for spec in program.buffers],
        "nodes": [_encode_node(node) for node in program.nodes],
        "loss": program.loss,
        "weight": program.weight,
    }
    if program.axes:
        document["axes"] = [[axis.name, axis.size, axis.rank] for axis in program.axes]
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _encode_value(spec: ValueSpec) -> dict[str, Any]:
    shape = [_encode_extent(extent) for extent in spec.shape]
    return {"name": spec.name, "dtype": spec.dtype.value, "shape": shape, "grad": spec.requires_grad}


def _encode_weight(spec: WeightSpec) -> list[Any]:
    return [spec.name, spec.dtype.value, list(spec.shape), spec.requires_grad]


def _encode_node(node: Node) -> dict[str, Any]:
    encoded: dict[str, Any] = {
        "op": node.op,
        "args": {name: encode_argument(value) for name, value in node.args.items()},
        "out": list(node.out),
        "in": node.module,
    }
    if node.site is not None:
        encoded["site"] = node.site
    return encoded


def _encode_extent(extent: Extent) -> Any:
    return {"s": _encode_tree(extent.tree)} if isinstance(extent, Size) else extent


def _encode_tree(tree: Tree) -> Any:
    return [_encode_tree(operand) for operand in tree] if isinstance(tree, tuple) else tree


def encode_argument(value: Argument) -> Any:
    if isinstance(value, Ref):
        return {"v": value.name}
    if isinstance(value, WeightRef):
        return {"w": value.name}
    if isinstance(value, Size):
        return _encode_extent(value)
    if isinstance(value, tuple):
        return [encode_argument(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"f": str(value)}
    return value


def decode(data: bytes, limits: Limits) -> ProgramData:
    """The program, with its structure checked: names, references, arity, kinds, sizes of lists."""
    document = reading.fields(reading.parse_json(data, limits), "program", _KEYS, {"loss", "weight", "axes"})
    if document["format"] != FORMAT or document["version"] != FORMAT_VERSION:
        raise ProgramRejectedError(
            f"format {reading.clip(document['format'])} version {reading.clip(document['version'])}: "
            f"this version runs {FORMAT} {FORMAT_VERSION}"
        )
    program = _decode_fields(document, limits)
    check_structure(program)
    return program


def _decode_fields(document: Mapping[str, Any], limits: Limits) -> ProgramData:
    stages = reading.integer(document["stages"], "stages", 1, MAX_STAGES)
    dims = tuple(_decode_dim(item) for item in reading.entries(document["dims"], "dims", 64))
    known = frozenset(dim.name for dim in dims)
    decode_list = _ListDecoder(document, limits)
    return ProgramData(
        stage=reading.integer(document["stage"], "stage", 0, stages - 1),
        stages=stages,
        dims=dims,
        inputs=decode_list("inputs", lambda item: _decode_input(item, known)),
        outputs=decode_list("outputs", lambda item: _decode_value(item, "outputs", known)),
        parameters=decode_list("parameters", _decode_weight),
        buffers=decode_list("buffers", _decode_weight),
        nodes=decode_list("nodes", lambda item: _decode_node(item, known, limits)),
        loss=reading.optional_name(document.get("loss"), "loss"),
        weight=reading.optional_name(document.get("weight"), "weight"),
        axes=tuple(_decode_axis(item) for item in reading.entries(document.get("axes", []), "axes", len(_AXES))),
    )


class _ListDecoder:
    def __init__(self, document: Mapping[str, Any], limits: Limits) -> None:
        self._document = document
        self._limits = limits

    def __call__(self, key: str, decode_item: Any) -> tuple[Any, ...]:
        return tuple(decode_item(item) for item in reading.entries(self._document[key], key, self._limits.max_nodes))


def _decode_axis(value: Any) -> AxisSpec:
    if not isinstance(value, list) or len(value) != 3 or value[0] not in _AXES:
        reading.refuse("axes", value, f"[{' or '.join(_AXES)}, size, rank]")
    size = reading.integer(value[1], f"axis {value[0]} size", 1, MAX_RANKS)
    return AxisSpec(name=value[0], size=size, rank=reading.integer(value[2], f"axis {value[0]} rank", 0, size - 1))


def _decode_dim(value: Any) -> Dim:
    if not isinstance(value, list) or len(value) != 4:
        reading.refuse("dims", value, "[name, minimum, maximum or null, example]")
    name = reading.name(value[0], "dims")
    low = reading.integer(value[1], f"dim {name} minimum", 0)
    high = None if value[2] is None else reading.integer(value[2], f"dim {name} maximum", low)
    most = reading.MAX_INTEGER if high is None else high
    return Dim(
        name=name, minimum=low, maximum=high, example=reading.integer(value[3], f"dim {name} example", low, most)
    )


def _decode_input(value: Any, known: frozenset[str]) -> InputSpec:
    if not isinstance(value, dict) or value.get("source") not in tuple(Source):
        reading.refuse("inputs", value, f"an object with a source of {', '.join(Source)}")
    rest = {key: item for key, item in value.items() if key != "source"}
    return InputSpec(value=_decode_value(rest, "inputs", known), source=Source(value["source"]))


def _decode_value(value: Any, where: str, known: frozenset[str]) -> ValueSpec:
    document = reading.fields(value, where, {"name", "dtype", "shape", "grad"})
    name = reading.name(document["name"], where)
    place = f"{where}: {name}"
    dtype = reading.dtype(document["dtype"], place)
    requires_grad = reading.boolean(document["grad"], place)
    if requires_grad and not dtype.is_floating:
        raise ProgramRejectedError(f"{place}: {dtype} cannot carry a gradient")
    shape = tuple(
        _decode_extent(extent, place, known) for extent in reading.entries(document["shape"], place, MAX_NDIM)
    )
    return ValueSpec(name=name, dtype=dtype, shape=shape, requires_grad=requires_grad)


def _decode_extent(value: Any, where: str, known: frozenset[str]) -> Extent:
    if isinstance(value, dict):
        return Size(check_tree(reading.fields(value, where, {"s"})["s"], known))
    return reading.integer(value, where, 0)


def _decode_weight(value: Any) -> WeightSpec:
    if not isinstance(value, list) or len(value) != 4:
        reading.refuse("weights", value, "[name, dtype, shape, requires_grad]")
    name = reading.name(value[0], "weights")
    dtype = reading.dtype(value[1], f"weight {name}")
    shape = tuple(
        reading.integer(extent, f"weight {name}", 0) for extent in reading.entries(value[2], f"weight {name}", MAX_NDIM)
    )
    requires_grad = reading.boolean(value[3], f"weight {name}")
    if requires_grad and not dtype.is_floating:
        raise ProgramRejectedError(f"weight {name}: {dtype} cannot carry a gradient")
    return WeightSpec(name=name, dtype=dtype, shape=shape, requires_grad=requires_grad)


def _decode_node(value: Any, known: frozenset[str], limits: Limits) -> Node:
    document = reading.fields(value, "node", {"op", "args", "out", "in"}, {"site"})
    op = reading.name(document["op"], "op")
    if not isinstance(document["args"], dict):
        reading.refuse(f"arguments of {op}", document["args"], "an object")
    site = document.get("site")
    node = Node(
        op=op,
        args={
            reading.name(key, op): decode_argument(item, f"{op}({reading.clip(key)})", known, limits)
            for key, item in document["args"].items()
        },
        out=tuple(
            reading.optional_name(item, f"results of {op}")
            for item in reading.entries(document["out"], f"results of {op}", limits.max_list)
        ),
        module=document["in"] if document["in"] == "" else reading.name(document["in"], f"module of {op}"),
        site=None if site is None else reading.integer(site, f"site of {op}", 0),
    )
    check_node(node)
    return node


def decode_argument(value: Any, where: str, known: frozenset[str], limits: Limits, depth: int = 0) -> Argument:
    if isinstance(value, dict):
        return _decode_tagged(value, where, known)
    if isinstance(value, list):
        if depth > 0:
            reading.refuse(where, value, "no list inside a list")
        items = reading.entries(value, where, limits.max_list)
        return tuple(decode_argument(item, where, known, limits, depth + 1) for item in items)
    if isinstance(value, str):
        return reading.name(value, where)
    if isinstance(value, int) and not isinstance(value, bool):
        return reading.integer(value, where)
    if value is None or isinstance(value, (bool, float)):
        return value
    return reading.refuse(where, value, "an argument")


def _decode_tagged(value: dict[str, Any], where: str, known: frozenset[str]) -> Argument:
    if len(value) != 1:
        reading.refuse(where, value, "an object with one of v, w, s, f")
    ((tag, content),) = value.items()
    if tag == "v":
        return Ref(reading.name(content, where))
    if tag == "w":
        return WeightRef(reading.name(content, where))
    if tag == "s":
        return Size(check_tree(content, known))
    if tag == "f" and content in ("inf", "-inf", "nan"):
        return float(content)
    return reading.refuse(where, value, "an object with one of v, w, s, f")


def check_structure(program: ProgramData) -> None:
    """Every name is given once, every reference points back, the last stage has its loss."""
    _check_unique("dim", [dim.name for dim in program.dims])
    weights = _check_unique("weight", [spec.name for spec in (*program.parameters, *program.buffers)])
    values = _check_unique("input", [spec.name for spec in program.inputs])
    axes = sorted(_check_unique("axis", [axis.name for axis in program.axes]))
    for node in program.nodes:
        for reference in node.references():
            known = values if isinstance(reference, Ref) else weights
            if reference.name not in known:
                raise ProgramRejectedError(
                    f"{node.op} in {node.module!r} uses {reference.name!r}, which nothing before it gives"
                )
        axis = node.args.get("axis")
        if axis is not None and axis not in axes:
            raise ProgramRejectedError(f"{node.op} in {node.module!r} runs on the axis {axis!r}, declared are {axes}")
        for name in node.out:
            if name in values:
                raise ProgramRejectedError(f"{node.op} in {node.module!r} gives {name!r} a second time")
            if name is not None:
                values.add(name)
    _check_results(program, values)


def _check_unique(what: str, names: list[str]) -> set[str]:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ProgramRejectedError(f"{what} {name!r} is declared twice")
        seen.add(name)
    return seen


def _check_results(program: ProgramData, values: set[str]) -> None:
    _check_unique("output", [spec.name for spec in program.outputs])
    for name in program.results:
        if name not in values:
            raise ProgramRejectedError(f"output {name!r} is a result of nothing in stage {program.stage}")
    last = program.stage == program.stages - 1
    if last != (program.loss is not None) or last != (program.weight is not None) or (last and program.outputs):
        raise ProgramRejectedError(
            f"stage {program.stage} of {program.stages}: the last stage gives loss and weight, the others outputs"
        )
    if program.stage == 0 and program.inputs_from(Source.PREVIOUS):
        raise ProgramRejectedError("stage 0 has no previous stage to receive from")
