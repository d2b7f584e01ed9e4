"""Programs from a stranger: whatever is wrong is refused with its name, before anything runs."""

from __future__ import annotations

import copy
import json
import resource
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from distensor.core.errors import ProgramRejectedError
from distensor.program import Limits, StageProgram, StageRunner, capture, cut

SECONDS = 5.0
MEGABYTES = 200


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """A sound program of one stage: two linear layers and a loss."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).train()
    batch = (torch.randn(5, 4), torch.randint(0, 3, (5,)))
    pieces = cut(capture(module, batch, loss=lambda out, given: functional.cross_entropy(out, given[1])))
    found: dict[str, Any] = json.loads(pieces.programs[0].to_json())
    return found


def encode(document: Any) -> bytes:
    return json.dumps(document).encode()


def load(document: Any, **limits: Any) -> StageProgram:
    return StageProgram.from_json(encode(document), Limits(**limits))


def node(op: str, out: list[str | None], **args: Any) -> dict[str, Any]:
    return {"op": op, "args": args, "out": out, "in": "bomb"}


def with_nodes(document: dict[str, Any], *nodes: dict[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(document)
    changed["nodes"] = [*nodes, *changed["nodes"]]
    return changed


def test_the_sound_program_loads(document: dict[str, Any]) -> None:
    program = load(document)
    assert [entry.op for entry in program.nodes][:2] == ["aten.linear.default", "aten.relu.default"]


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    *parents, last = path.split("/")

    def change(document: dict[str, Any]) -> None:
        here: Any = document
        for part in parents:
            here = here[int(part)] if part.isdigit() else here[part]
        if last.isdigit():
            here[int(last)] = value
        else:
            here[last] = value

    return change


def _remove(path: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        here: Any = document
        for part in parents:
            here = here[int(part)] if part.isdigit() else here[part]
        del here[int(last) if last.isdigit() else last]

    return change


LIES: list[tuple[str, Callable[[dict[str, Any]], None], str]] = [
    ("unknown operation", _set("nodes/0/op", "aten.system.default"), "'aten.system.default'.*not in the table"),
    ("operation of python", _set("nodes/0/op", "builtins.eval"), "not in the table"),
    ("operation left out", _set("nodes/0/op", "aten.as_strided.default"), "not in the table"),
    ("other version", _set("version", 2), "version 2: this version runs distensor.stage 1"),
    ("other format", _set("format", "torch"), "format 'torch'"),
    ("version as text", _set("version", "1"), "version '1'"),
    ("argument missing", _remove("nodes/0/args/weight"), "lacks its argument 'weight'"),
    ("argument unknown", _set("nodes/0/args/device", "cuda"), r"not \['device'\]"),
    ("tensor where a number is due", _set("nodes/0/args/bias", 3), "bias=3 is not of kind TENSOR"),
    ("number where a list is due", _set("nodes/1/args/self", [1]), "not of kind TENSOR"),
    ("two results", _set("nodes/1/out", ["%a", "%b"]), "gives 1 results, not 2"),
    ("no result", _set("nodes/1/out", []), "gives 1 results, not 0"),
    ("name given twice", _set("nodes/1/out", ["inputs"]), "'inputs' a second time"),
    ("reference to nothing", _set("nodes/1/args/self/v", "%nothing"), "'%nothing', which nothing before it gives"),
    ("reference forward", _set("nodes/0/args/input/v", "%relu"), "'%relu', which nothing before it gives"),
    ("reference to itself", _set("nodes/1/args/self/v", "%relu"), "'%relu', which nothing before it gives"),
    ("weight missing", _remove("parameters/0"), "'0.weight', which nothing before it gives"),
    ("weight twice", lambda d: d["parameters"].append(d["parameters"][0]), "weight '0.weight' is declared twice"),
    ("input twice", lambda d: d["inputs"].append(d["inputs"][0]), "input 'inputs' is declared twice"),
    ("dtype unknown", _set("inputs/0/dtype", "object"), "'object'; expected one of float64"),
    ("dtype of weights unknown", _set("parameters/0/1", "qint8"), "'qint8'; expected one of"),
    ("dtype lies", _set("inputs/0/dtype", "int64"), r"aten.linear.default in '0' mixes torch\.float32, torch\.int64"),
    ("dtype of a weight lies", _set("parameters/0/1", "float64"), "mixes"),
    ("shape lies", _set("parameters/0/2", [8, 5]), "cannot run on these shapes"),
    ("shape negative", _set("parameters/0/2", [8, -4]), "weight 0.weight: -4; expected an integer from 0"),
    ("shape of text", _set("parameters/0/2", ["8", 4]), "'8'; expected an integer"),
    ("shape of truth", _set("parameters/0/2", [True, 4]), "True; expected an integer"),
    ("too many dims", _set("parameters/0/2", [1] * 17), "17 entries'; expected at most 16"),
    ("gradient of integers", _set("parameters/0/1", "int64"), "int64 cannot carry a gradient"),
    ("loss of many elements", _set("loss", "%relu"), "'%relu' has 40 elements, not one"),
    ("loss of nothing", _set("loss", "%nothing"), "output '%nothing' is a result of nothing"),
    ("no loss", _set("loss", None), "the last stage gives loss and weight"),
    ("no weight", _remove("weight"), "the last stage gives loss and weight"),
    ("loss before the last stage", _set("stages", 2), "the last stage gives loss and weight"),
    ("stage beyond stages", _set("stage", 1), "stage: 1; expected an integer from 0 to 0"),
    ("stages negative", _set("stages", -1), "stages: -1"),
    ("stages without end", _set("stages", 10**30), "expected an integer from 1"),
    ("previous of the first", _set("inputs/0/source", "previous"), "stage 0 has no previous stage"),
    ("source unknown", _set("inputs/0/source", "internet"), "source of batch, previous"),
    ("source that is a list", _set("inputs/0/source", ["batch"]), "source of batch, previous"),
    ("dim unknown", _set("inputs/0/shape/0", {"s": "planet"}), "'planet', which is none of the dims"),
    ("dim twice", lambda d: d["dims"].append(d["dims"][0]), "dim 'batch' is declared twice"),
    ("dim example out of range", _set("dims/0/3", 0), "dim batch example: 0"),
    ("size operator unknown", _set("inputs/0/shape/0", {"s": ["__import__", "batch"]}), "operator"),
    ("size operator without operands", _set("inputs/0/shape/0", {"s": ["*"]}), "has 0 operands"),
    ("size divided by zero", _set("inputs/0/shape/0", {"s": ["//", "batch", 0]}), "division|modulo"),
    ("size real", _set("inputs/0/shape/0", {"s": ["/", "batch", 2]}), "not a count"),
    ("size beyond 2**63", _set("inputs/0/shape/0", {"s": ["*", "batch", 2**62, 2**62]}), "beyond 2"),
    ("size of texts", _set("inputs/0/shape/0", {"s": ["+", None, "batch"]}), "size expression holds None"),
    ("unknown key", _set("code", "import os"), r"\['code'\]; expected only the keys"),
    ("missing key", _remove("nodes"), r"the keys \['nodes'\] too"),
    ("nodes as an object", _set("nodes", {}), "nodes: {}; expected a list"),
    ("node as a text", _set("nodes/0", "aten.add.Tensor"), "expected an object"),
    ("arguments as a list", _set("nodes/0/args", []), "expected an object"),
    ("list in a list", _set("nodes/0/args/bias", [[1]]), "no list inside a list"),
    ("tag unknown", _set("nodes/0/args/bias", {"py": "x"}), "an object with one of v, w, s, f"),
    ("two tags", _set("nodes/0/args/bias", {"v": "x", "w": "y"}), "an object with one of v, w, s, f"),
    ("name of a line break", _set("nodes/0/out", ["a\nb"]), "printable"),
    ("name too long", _set("nodes/0/out", ["x" * 513]), "1 to 512"),
    ("integer too large", _set("nodes/0/args/bias", 2**63), "expected an integer"),
    ("site where nothing is drawn", _set("nodes/0/site", 1), "draws no random numbers"),
    ("not an object", lambda d: d.clear(), "the keys"),
]


@pytest.mark.parametrize(("change", "message"), [pytest.param(*case[1:], id=case[0]) for case in LIES])
def test_a_lie_is_refused_and_named(
    document: dict[str, Any], change: Callable[[dict[str, Any]], None], message: str
) -> None:
    changed = copy.deepcopy(document)
    change(changed)
    with pytest.raises(ProgramRejectedError, match=message):
        load(changed)


@pytest.mark.parametrize("argument", [True, "training"])
def test_batch_norm_may_not_train(document: dict[str, Any], argument: Any) -> None:
    changed = with_nodes(
        document,
        node(
            "aten.batch_norm.default", ["%x"], input={"v": "inputs"}, weight=None, bias=None, running_mean=None,
            running_var=None, training=argument, momentum=0.1, eps=1e-5, cudnn_enabled=False,
        ),
    )  # fmt: skip
    with pytest.raises(ProgramRejectedError, match="training"):
        load(changed)


def test_outputs_must_be_what_is_computed(document: dict[str, Any]) -> None:
    changed = copy.deepcopy(document)
    changed.update(stages=2, loss=None, weight=None)
    changed["outputs"] = [{"name": "%relu", "dtype": "float32", "shape": [{"s": "batch"}, 8], "grad": True}]
    assert load(changed).outputs[0].name == "%relu"
    for key, value in (("dtype", "float64"), ("shape", [{"s": "batch"}, 9]), ("shape", [40])):
        lie = copy.deepcopy(changed)
        lie["outputs"][0][key] = value
        with pytest.raises(ProgramRejectedError, match="output '%relu' is declared"):
            load(lie)


def _chain(op: str, first: str, count: int, **args: Any) -> list[dict[str, Any]]:
    names = [first, *(f"%b{index}" for index in range(count))]
    return [
        node(op, [names[index + 1]], **{key: _fill(value, names[index]) for key, value in args.items()})
        for index in range(count)
    ]


def _fill(value: Any, name: str) -> Any:
    if isinstance(value, list):
        return [_fill(item, name) for item in value]
    return {"v": name} if value == "*" else value


X = {"v": "inputs"}
BOMBS: list[tuple[str, list[dict[str, Any]]]] = [
    ("arange", [node("aten.arange.default", ["%b"], end=10**12)]),
    ("arange of reals", [node("aten.arange.start_step", ["%b"], start=0, end=1e300, step=1e-300)]),
    ("zeros", [node("aten.zeros.default", ["%b"], size=[10**6, 10**6])]),
    ("zeros beyond 2**63", [node("aten.zeros.default", ["%b"], size=[2**62, 2**62])]),
    ("full of a huge integer", [node("aten.full.default", ["%b"], size=[10**11], fill_value=2**62)]),
    ("doubling cat", _chain("aten.cat.default", "inputs", 60, tensors=["*", "*"])),
    ("repeat", [node("aten.repeat.default", ["%b"], self=X, repeats=[10**6, 10**6])]),
    ("outer", [*_chain("aten.cat.default", "inputs", 20, tensors=["*", "*"]),
               node("aten.flatten.using_ints", ["%f"], self={"v": "%b19"}),
               node("aten.outer.default", ["%o"], self={"v": "%f"}, vec2={"v": "%f"})]),
    ("expand, then read", [node("aten.sum.default", ["%s"], self=X),
                           node("aten.expand.default", ["%e"], self={"v": "%s"}, size=[10**9, 10**9]),
                           node("aten.sum.default", ["%t"], self={"v": "%e"})]),
    ("expand, then write", [node("aten.sum.default", ["%s"], self=X),
                            node("aten.expand.default", ["%e"], self={"v": "%s"}, size=[10**9, 10**9]),
                            node("aten.neg.default", ["%t"], self={"v": "%e"})]),
    ("pad", [node("aten.pad.default", ["%b"], self=X, pad=[10**12, 10**12])]),
    ("split into single elements", [node("aten.sum.default", ["%s"], self=X),
                                    node("aten.expand.default", ["%e"], self={"v": "%s"}, size=[10**12]),
                                    node("aten.split.Tensor", ["%p"], self={"v": "%e"}, split_size=1)]),
    ("unbind", [node("aten.sum.default", ["%s"], self=X),
                node("aten.expand.default", ["%e"], self={"v": "%s"}, size=[10**12]),
                node("aten.unbind.int", ["%p"], self={"v": "%e"})]),
    ("chunk", [node("aten.sum.default", ["%s"], self=X),
               node("aten.expand.default", ["%e"], self={"v": "%s"}, size=[10**12]),
               node("aten.chunk.default", ["%p"], self={"v": "%e"}, chunks=10**12)]),
    ("tensor_split", [node("aten.tensor_split.sections", ["%p"], self=X, sections=10**12)]),
    ("split by zero", [node("aten.split.Tensor", ["%p"], self=X, split_size=0)]),
    ("chunk by minus one", [node("aten.chunk.default", ["%p"], self=X, chunks=-1)]),
    ("repeat_interleave", [node("aten.repeat_interleave.self_int", ["%b"], self=X, repeats=10**12)]),
    ("long shape", [node("aten.zeros.default", ["%b"], size=[1] * 65)]),
    ("many dims", [node("aten.zeros.default", ["%b"], size=[1] * 40)]),
    ("matmul", [node("aten.sum.default", ["%s"], self=X),
                node("aten.expand.default", ["%e"], self={"v": "%s"}, size=[10**5, 10**9]),
                node("aten.mm.default", ["%m"], self={"v": "%e"}, mat2={"v": "%u"})]),
    ("eye", [node("aten.eye.default", ["%b"], n=10**6)]),
    ("convolution of no groups", [node("aten.conv1d.default", ["%b"], input=X, weight=X, groups=0)]),
    ("pooling without a step", [node("aten.max_pool1d.default", ["%b"], self=X, kernel_size=[1], stride=[0])]),
    ("unfold without a step", [node("aten.unfold.default", ["%b"], self=X, dimension=0, size=1, step=0)]),
    ("dim out of range", [node("aten.transpose.int", ["%b"], self=X, dim0=0, dim1=10**18)]),
    ("slice with step 0", [node("aten.slice.Tensor", ["%b"], self=X, step=0)]),
    ("attention of nothing", [node("aten.scaled_dot_product_attention.default", ["%b"],
                                   query=X, key=X, value={"v": "targets"})]),
    ("size from the batch", [node("aten.zeros.default", ["%b"], size=[{"s": ["*", "batch", 10**15]}])]),
    ("upscaled pooling", [node("aten.adaptive_avg_pool1d.default", ["%b"], self=X, output_size=[10**13])]),
]  # fmt: skip


@pytest.mark.parametrize("nodes", [pytest.param(nodes, id=name) for name, nodes in BOMBS])
def test_a_bomb_is_refused_in_little_time_and_memory(document: dict[str, Any], nodes: list[dict[str, Any]]) -> None:
    data = encode(with_nodes(document, *nodes))
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(ProgramRejectedError):
        StageProgram.from_json(data)
    assert time.monotonic() - started < SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < MEGABYTES


def test_limits_are_those_of_the_assignment(document: dict[str, Any]) -> None:
    with pytest.raises(ProgramRejectedError, match=r"Limits\.max_bytes"):
        load(document, max_bytes=500)
    with pytest.raises(ProgramRejectedError, match=r"its weights: the stage needs 268 bytes; the limit is 200"):
        load(document, max_bytes=200)
    with pytest.raises(ProgramRejectedError, match=r"Limits\.max_work"):
        load(document, max_work=100)
    with pytest.raises(ProgramRejectedError, match=r"Limits\.max_json_bytes"):
        load(document, max_json_bytes=100)
    with pytest.raises(ProgramRejectedError, match="at most 2"):
        load(document, max_nodes=2)


RAW: list[tuple[str, bytes]] = [
    ("nothing", b""),
    ("not JSON", b"\x80\x04\x95"),
    ("not UTF-8", b'{"format": "\xff"}'),
    ("a list", b"[]"),
    ("null", b"null"),
    ("nested", b"[" * 100_000 + b"]" * 100_000),
    ("nested objects", b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    ("a number of a million digits", b'{"version": ' + b"9" * 1_000_000 + b"}"),
    ("infinity", b'{"version": Infinity}'),
    ("not a number", b'{"version": NaN}'),
    ("a real beyond float64", b'{"version": 1e999}'),
    ("a key twice", b'{"version": 1, "version": 1}'),
    ("a million empty lists", b"[" + b"[]," * 1_100_000 + b"[]]"),
    ("four million entries", b"[" + b"1," * 3_000_000 + b"1]"),
    ("too many bytes", b" " * (9 << 20)),
    ("a pickle", b"cos\nsystem\n(S'true'\ntR."),
]


@pytest.mark.parametrize("data", [pytest.param(data, id=name) for name, data in RAW])
def test_bytes_that_are_no_program_are_refused(data: bytes) -> None:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(ProgramRejectedError):
        StageProgram.from_json(data)
    assert time.monotonic() - started < SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < MEGABYTES


def test_every_truncation_is_refused(document: dict[str, Any]) -> None:
    data = encode(document)
    for length in range(0, len(data), 7):
        with pytest.raises(ProgramRejectedError):
            StageProgram.from_json(data[:length])


def test_a_program_of_very_many_nodes_is_checked_in_time(document: dict[str, Any]) -> None:
    nodes = _chain("aten.alias.default", "inputs", 20_000, self="*")
    started = time.monotonic()
    assert len(load(with_nodes(document, *nodes)).nodes) > 20_000
    assert time.monotonic() - started < 4 * SECONDS


def test_weights_must_be_what_the_program_declares(document: dict[str, Any]) -> None:
    program = load(document)
    good = {spec.name: torch.zeros(spec.shape) for spec in program.parameters}
    StageRunner(program, good)
    for name, value, message in (
        (
            "0.weight",
            torch.zeros(8, 5),
            r"'0\.weight' is torch\.float32 \[8, 5\]; the program declares float32 \[8, 4\]",
        ),
        ("0.weight", torch.zeros(8, 4, dtype=torch.float64), r"torch\.float64"),
    ):
        with pytest.raises(ProgramRejectedError, match=message):
            StageRunner(program, {**good, name: value})
    del good["2.bias"]
    with pytest.raises(ProgramRejectedError, match=r"weight '2\.bias' is missing"):
        StageRunner(program, good)


def test_inputs_larger_than_the_limits_are_refused_before_they_run(document: dict[str, Any]) -> None:
    program = load(document)
    weights = {spec.name: torch.zeros(spec.shape) for spec in program.parameters}
    runner = StageRunner(program, weights, limits=Limits(max_bytes=20_000))
    runner.forward({"inputs": torch.zeros(9, 4), "targets": torch.zeros(9, dtype=torch.int64)})
    with pytest.raises(ProgramRejectedError, match=r"Limits\.max_bytes"):
        runner.forward({"inputs": torch.zeros(900, 4), "targets": torch.zeros(900, dtype=torch.int64)})
    runner.forward({"inputs": torch.zeros(3, 4), "targets": torch.zeros(3, dtype=torch.int64)})
