"""torch.export's graph -> nodes of the table: one operation at a time, with names for everything refused."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from distensor.core.errors import CaptureError, UnsupportedOpError
from distensor.program.arguments import fits
from distensor.program.builder import VIEWS, GraphBuilder, Info, Name, Place, View
from distensor.program.calls import DTYPES
from distensor.program.expressions import Extent, Size
from distensor.program.ops import FIXED_ARGUMENTS, RANDOM
from distensor.program.precision import is_eligible, operand_dtype
from distensor.program.rewrites import INPLACE, REWRITES, Rewrite
from distensor.program.signatures import SIGNATURES, Signature
from distensor.program.sizes import SizeReader
from distensor.program.values import Argument, DType, Ref, WeightRef

_DROPPED_ARGUMENTS = frozenset({"device", "layout", "pin_memory", "non_blocking"})
_ASSERTIONS = frozenset(
    {
        "aten._assert_tensor_metadata.default",
        "aten._assert_scalar.default",
        "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default",
        "aten._assert_async.msg",
    }
)
_FORMATS = {
    torch.contiguous_format: "contiguous",
    torch.preserve_format: "preserve",
    torch.channels_last: "channels_last",
}

Bound = Any
"""What a node of the captured graph stands for: a Place, a list of Places, or a literal."""


class Lowering:
    """Walks a captured graph. `values` holds the placeholders to begin with."""

    def __init__(self, builder: GraphBuilder, sizes: SizeReader, *, autocast: bool = False) -> None:
        self.builder = builder
        self.sizes = sizes
        self._autocast = autocast
        """Whether the nodes at hand were traced under autocast to bfloat16; the module may switch it."""
        self.met_autocast = autocast
        self._cast_weights: dict[tuple[str, DType], Place] = {}

    def run(self, graph_module: fx.GraphModule, values: dict[fx.Node, Bound]) -> list[Bound]:
        """Lower every node; returns what the graph's output holds, flat."""
        for node in graph_module.graph.nodes:
            if node.op == "output":
                return [self._bound(item, values) for item in _flat(node.args[0])]
            if node.op == "get_attr":
                values[node] = _attribute(graph_module, str(node.target))
            elif node.op == "call_function":
                self._enter(node)
                values[node] = self._call(node, values)
            elif node.op != "placeholder":
                raise CaptureError(f"the captured graph holds {node.op} {node.target}, which is not an operation")
        return []

    def _enter(self, node: fx.Node) -> None:
        stack = node.meta.get("nn_module_stack")
        if stack:
            path = list(stack.values())[-1][0]
            if not path.startswith("_empty_nn_module_stack"):
                self.builder.module = module_name(path)

    def _bound(self, item: Any, values: Mapping[fx.Node, Bound]) -> Bound:
        return values[item] if isinstance(item, fx.Node) else item

    def _call(self, node: fx.Node, values: dict[fx.Node, Bound]) -> Bound:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self.sizes.read(value)
        if node.target is operator.getitem:
            return self._bound(node.args[0], values)[node.args[1]]
        name = str(node.target)
        if name.startswith("wrap_with_"):
            return self._region(name, node, values)
        if name in _ASSERTIONS:
            return None
        if not isinstance(node.target, torch._ops.OpOverload):
            if isinstance(value, (bool, int, float)):
                return value
            self._unsupported(name)
        return self._operation(name, node, values)

    def _region(self, name: str, node: fx.Node, values: dict[fx.Node, Bound]) -> Bound:
        """A block under no_grad, enable_grad or autocast: its nodes are taken in as they are."""
        args = [self._bound(item, values) for item in node.args]
        autocast = self._autocast
        if name == "wrap_with_set_grad_enabled":
            gradients, inner, rest = bool(args[0]), args[1], args[2:]
        elif name == "wrap_with_autocast":
            gradients, inner, rest = True, args[4], args[5:]
            self._switch_autocast(*args[:3])
        else:
            self._unsupported(name)
        outer = self.builder.module
        placeholders = [item for item in inner.graph.nodes if item.op == "placeholder"]
        results = self.run(inner, dict(zip(placeholders, rest, strict=True)))
        self.builder.module, self._autocast = outer, autocast
        return results if gradients else [self._detached(result) for result in results]

    def _switch_autocast(self, device: str, dtype: torch.dtype, enabled: bool) -> None:
        """A region of another device's autocast changes nothing: capture runs on the CPU."""
        if device != "cpu":
            return
        if enabled and dtype is not torch.bfloat16:
            raise CaptureError(f"autocast to {dtype} in {self.builder.module!r}; only torch.bfloat16 is supported")
        self._autocast = enabled
        self.met_autocast |= enabled

    def _detached(self, bound: Bound) -> Bound:
        """What leaves a no_grad block carries no gradient."""
        if not isinstance(bound, Place):
            return bound
        name = self.builder.read(bound)
        info = self.builder.info(name)
        if not info.requires_grad:
            return bound
        plain = Info(dtype=info.dtype, shape=info.shape, requires_grad=False)
        return Place(self.builder.emit_one("aten.detach.default", {"self": name}, plain, "detach"))

    def _operation(self, name: str, node: fx.Node, values: Mapping[fx.Node, Bound]) -> Bound:
        assert isinstance(node.target, torch._ops.OpOverload)
        schema = node.target._schema.arguments
        given: dict[str, Any] = {item.name: value for item, value in zip(schema, node.args, strict=False)}
        given.update(node.kwargs)
        raw = {key: self._raw(value, values) for key, value in given.items() if key not in _DROPPED_ARGUMENTS}
        if raw.pop("generator", None) is not None:
            raise CaptureError(
                f"{name} in {self.builder.module!r} uses a generator of its own; seed the Trainer instead"
            )
        infos = self._infos(node, raw)
        rewrite = REWRITES.get(name)
        if rewrite is not None:
            rewritten = rewrite(Rewrite(name=name, args=raw, infos=infos, builder=self.builder))
            if isinstance(rewritten, Place):
                return rewritten
            name, raw = rewritten
        if _is_inplace(name):
            return self._write(name, node, raw, infos)
        return self._emit(name, node, raw, infos)

    def _emit(self, name: str, node: fx.Node, raw: Mapping[str, Any], infos: list[Info]) -> Bound:
        signature = SIGNATURES.get(name)
        if signature is None:
            self._unsupported(name)
        if self._autocast:
            raw = self._cast_operands(name, raw)
        args = self._arguments(signature, raw)
        random = name in RANDOM and (not name.startswith("aten.scaled_dot") or bool(args.get("dropout_p")))
        results = self.builder.emit(name, args, infos, node.name, random=random)
        if isinstance(node.meta.get("val"), (list, tuple)):
            return [Place(result) for result in results]
        return self._place(name, raw, args, results[0])

    def _cast_operands(self, name: str, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        dtypes = [self.builder.info(self.builder.read(place)).dtype for place in _places(raw)]
        dtype = operand_dtype(name, dtypes)
        if dtype is None:
            return raw
        return {
            key: tuple(self._cast(item, dtype) for item in value)
            if isinstance(value, tuple)
            else self._cast(value, dtype)
            for key, value in raw.items()
        }

    def _cast(self, value: Any, dtype: DType) -> Any:
        """A tensor in another type. A trained weight is cast once and shared, so that its gradient is rounded once."""
        if not isinstance(value, Place):
            return value
        name = self.builder.read(value)
        info = self.builder.info(name)
        if not is_eligible(info.dtype) or info.dtype is dtype:
            return value
        shared = self._cast_weights.get((name.name, dtype)) if isinstance(name, WeightRef) else None
        if shared is not None:
            return shared
        cast = Info(dtype=dtype, shape=info.shape, requires_grad=info.requires_grad)
        args: dict[str, Argument] = {"self": name, "dtype": dtype.value}
        made = Place(self.builder.emit_one("aten.to.dtype", args, cast, name.name.lstrip("%").rpartition(".")[2]))
        if isinstance(name, WeightRef):
            self._cast_weights[name.name, dtype] = made
        return made

    def _place(self, name: str, raw: Mapping[str, Any], args: Mapping[str, Argument], result: Ref) -> Place:
        parent = raw.get("self")
        if name not in VIEWS or not isinstance(parent, Place):
            return Place(result)
        rest = {key: value for key, value in args.items() if key != "self"}
        return Place(result, View(parent, name, rest), parent.root.version)

    def _write(self, name: str, node: fx.Node, raw: dict[str, Any], infos: list[Info]) -> Place:
        """x.op_(...) -> a new value that x, its views and what x views refer to from now on."""
        place = raw.get("self")
        assert isinstance(place, Place)
        if name == "aten.copy_.default":
            self.builder.write(place, self._copied(place, raw["src"], node.name))
            return place
        plain = INPLACE.get(name) or _without_underscore(name)
        signature = SIGNATURES.get(plain)
        if signature is None:
            self._unsupported(name)
        old = self.builder.info(place.name)
        touching = any(info.requires_grad for info in infos) or old.requires_grad
        info = Info(dtype=old.dtype, shape=old.shape, requires_grad=touching and old.dtype.is_floating)
        new = self.builder.emit_one(plain, self._arguments(signature, raw), info, node.name)
        if any(dtype is not old.dtype for dtype in self._operand_dtypes(raw)):
            new = self.builder.emit_one("aten.to.dtype", {"self": new, "dtype": old.dtype.value}, info, node.name)
        self.builder.write(place, new)
        return place

    def _copied(self, place: Place, source: Place, hint: str) -> Name:
        """The value of `source` in the shape and dtype of `place`."""
        old, name = self.builder.info(place.name), self.builder.read(source)
        new = self.builder.info(name)
        for op, key, value, differs in (
            ("aten.expand.default", "size", old.shape, new.shape != old.shape),
            ("aten.to.dtype", "dtype", old.dtype.value, new.dtype is not old.dtype),
        ):
            if differs:
                info = Info(
                    dtype=old.dtype if key == "dtype" else new.dtype, shape=old.shape, requires_grad=new.requires_grad
                )
                name = self.builder.emit_one(op, {"self": name, key: value}, info, hint)
        return name

    def _operand_dtypes(self, raw: Mapping[str, Any]) -> list[DType]:
        named = [value for key, value in raw.items() if key in ("other", "tensor1", "tensor2", "end")]
        return [self.builder.info(value.name).dtype for value in named if isinstance(value, Place)]

    def _raw(self, value: Any, values: Mapping[fx.Node, Bound]) -> Any:
        """An argument with places for tensors and data for everything else."""
        if isinstance(value, fx.Node):
            return values[value]
        if isinstance(value, (list, tuple)):
            return tuple(self._raw(item, values) for item in value)
        if isinstance(value, torch.dtype):
            if value not in DTYPES:
                raise CaptureError(f"module {self.builder.module!r} computes in {value}, which no stage can")
            return DTYPES[value].value
        if isinstance(value, torch.memory_format):
            return _FORMATS.get(value, str(value))
        return self.sizes.read(value)

    def _arguments(self, signature: Signature, raw: Mapping[str, Any]) -> dict[str, Argument]:
        args: dict[str, Argument] = {}
        for parameter in signature.parameters:
            if parameter.name in raw:
                value = self._argument(raw[parameter.name])
                if parameter.is_list and value is not None and not isinstance(value, tuple):
                    value = (value,)
                if parameter.required or value != parameter.default or type(value) is not type(parameter.default):
                    args[parameter.name] = value
        self._check(signature, args, raw)
        return args

    def _argument(self, value: Any) -> Argument:
        if isinstance(value, Place):
            return self.builder.read(value)
        if isinstance(value, tuple):
            return tuple(self._argument(item) for item in value)
        return value  # type: ignore[no-any-return]

    def _check(self, signature: Signature, args: Mapping[str, Argument], raw: Mapping[str, Any]) -> None:
        known = {parameter.name: parameter for parameter in signature.parameters}
        for key, value in raw.items():
            if key not in known and value not in (None, False):
                raise CaptureError(f"{signature.name} in {self.builder.module!r}: {key}={value!r} is not supported")
        for key, value in args.items():
            allowed = FIXED_ARGUMENTS.get((signature.name, key), value)
            if allowed != value:
                raise CaptureError(_fixed_message(signature.name, key, value, self.builder.module))
            kind = known[key].kind
            items = value if isinstance(value, tuple) else (value,)
            if not all(item is None or fits(kind, item) for item in items):
                raise CaptureError(
                    f"{signature.name} in {self.builder.module!r}: {key}={value!r} is not {kind.name.lower()}"
                )

    def _infos(self, node: fx.Node, raw: Mapping[str, Any]) -> list[Info]:
        value = node.meta.get("val")
        items = value if isinstance(value, (list, tuple)) else [value]
        needs = any(self.builder.info(place.name).requires_grad for place in _places(raw))
        return [self._info(item, needs, node) for item in items]

    def _info(self, value: Any, needs: bool, node: fx.Node) -> Info:
        if not isinstance(value, Tensor) or value.dtype not in DTYPES:
            shown = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise CaptureError(
                f"{node.target} in {self.builder.module!r} gives {shown}, which no stage can compute with"
            )
        dtype = DTYPES[value.dtype]
        detached = str(node.target) in ("aten.detach.default", "aten.detach_.default")
        shape = tuple(self.extent(size) for size in value.shape)
        return Info(dtype=dtype, shape=shape, requires_grad=needs and dtype.is_floating and not detached)

    def extent(self, size: Any) -> Extent:
        value = self.sizes.read(size)
        assert isinstance(value, (int, Size))
        return value

    def _unsupported(self, name: str) -> NoReturn:
        raise UnsupportedOpError(
            f"operation {name} in module {self.builder.module or '(root)'!r} is not in the table of operations that a "
            "worker runs; express it with other operations, or ask for it to be added"
        )


def module_name(path: str) -> str:
    """The user's FQN of a module: without our wrapper and without the counter of repeated calls."""
    plain = re.sub(r"@\d+", "", path)
    return "" if plain in ("", "module") else plain.removeprefix("module.")


def _is_inplace(name: str) -> bool:
    base = name.split(".")[1]
    return base.endswith("_") and not base.endswith("__")


def _without_underscore(name: str) -> str:
    space, base, overload = name.split(".")
    return f"{space}.{base[:-1]}.{overload}"


def _attribute(graph_module: fx.GraphModule, target: str) -> Any:
    found: Any = graph_module
    for part in target.split("."):
        found = getattr(found, part)
    return found


def _flat(item: Any) -> list[Any]:
    return [leaf for part in item for leaf in _flat(part)] if isinstance(item, (list, tuple)) else [item]


def _places(raw: Mapping[str, Any]) -> Iterator[Place]:
    for value in raw.values():
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, Place):
                yield item


def _fixed_message(op: str, key: str, value: Argument, module: str) -> str:
    if op == "aten.batch_norm.default":
        return (
            f"module {module!r} is a batch normalisation in training mode: its result depends on how the batch is cut "
            "and it writes running statistics; use LayerNorm or GroupNorm, or freeze it with .eval()"
        )
    return f"{op} in module {module!r} with {key}={value!r} is not supported"
