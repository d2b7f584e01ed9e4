"""A ShardingSpec as text to paste, read off a module's structure. Nothing is applied: what is cut, the user says.

The pattern is that of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053): in each block the layers that widen are cut
by columns (the weight's output dim), the ones that follow them by rows (its input dim); embedding and head along the
vocabulary. Shapes and module types decide; names only tell queries, keys and values from the rest.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from distensor.core.errors import UserError
from distensor.nn.patterns import parse

if TYPE_CHECKING:
    from torch import Tensor, nn

QUERY = frozenset({"q", "q_proj", "query", "q_lin", "wq", "to_q", "query_proj"})
KEY = frozenset({"k", "k_proj", "key", "k_lin", "wk", "to_k", "key_proj"})
VALUE = frozenset({"v", "v_proj", "value", "v_lin", "wv", "to_v", "value_proj"})
FUSED = frozenset({"c_attn", "query_key_value", "qkv", "qkv_proj", "Wqkv", "in_proj", "attn_qkv", "att_proj"})
TOKENS = frozenset({"embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings", "token_embedding", "embed"})
MATRIX = 2
LINE = 116


@dataclass(frozen=True, kw_only=True, slots=True)
class _Linear:
    """A layer that multiplies with a matrix: torch's Linear, or Conv1D of Transformers with the dims swapped."""

    path: str
    width_in: int
    width_out: int
    out_dim: int
    weight: str
    bias: str | None

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def parent(self) -> str:
        return self.path.rpartition(".")[0]

    def columns(self) -> dict[str, int]:
        """Cut where it writes; its bias goes along."""
        return {self.weight: self.out_dim} | ({} if self.bias is None else {self.bias: 0})

    def rows(self) -> dict[str, int]:
        """Cut where it reads; the sum over the ranks gets the whole bias once."""
        return {self.weight: 1 - self.out_dim}


def suggest_sharding(module: nn.Module) -> str:
    """Print and return a ShardingSpec for `module`, as text to paste.

    Recognised: attention (separate or fused queries, keys and values, and the layer after them), the two or three
    layers of an MLP, token embeddings, the head. Everything else stays whole and is listed in comments.

    Raises:
        UserError: not a module, or nothing that is recognised.
    """
    if not hasattr(module, "named_parameters"):
        raise UserError(f"suggest_sharding({type(module).__name__}): expected a torch.nn.Module")
    names = _Names(module)
    dims = _dims(module, names)
    if not dims:
        raise UserError(
            f"suggest_sharding({type(module).__name__}): neither attention, nor an MLP, nor embedding and head are "
            "recognised by their shapes; write the ShardingSpec by hand"
        )
    text = _text(dims, names.shapes)
    sys.stdout.write(f"{text}\n")
    return text


@dataclass(slots=True)
class _Names:
    """Parameters by the names that a ShardingSpec knows them by: of a tied one, the first."""

    module: nn.Module
    by_id: dict[int, str] = field(init=False)
    shapes: dict[str, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        found = list(self.module.named_parameters())
        self.by_id = {id(value): name for name, value in found}
        self.shapes = {name: tuple(value.shape) for name, value in found}

    def of(self, parameter: Tensor | None) -> str | None:
        return None if parameter is None else self.by_id.get(id(parameter))


def _dims(module: nn.Module, names: _Names) -> dict[str, int]:
    """Parameter name -> the dim to cut."""
    linears = list(_linears(module, names))
    tables = [child for _, child in module.named_modules() if names.of(_table(child)) is not None]
    heads = [linear for linear in linears if not _block_of(linear.path) and _reads_back(linear, tables)]
    blocks: dict[str, list[_Linear]] = {}
    for linear in linears:
        if linear not in heads:
            blocks.setdefault(_block_of(linear.path), []).append(linear)
    dims: dict[str, int] = {}
    for members in blocks.values():
        dims.update(_in_block(members))
    dims.update(_packed_attention(module, names))
    dims.update(_vocabulary(module, names, heads))
    return dims


def _linears(module: nn.Module, names: _Names) -> Iterator[_Linear]:
    for path, child in module.named_modules():
        weight = getattr(child, "weight", None)
        name = names.of(weight)
        if name is None or weight is None or weight.ndim != MATRIX or hasattr(child, "num_embeddings"):
            continue
        out_dim = _out_dim(child, tuple(weight.shape))
        if out_dim is not None:
            yield _Linear(
                path=path,
                width_in=weight.shape[1 - out_dim],
                width_out=weight.shape[out_dim],
                out_dim=out_dim,
                weight=name,
                bias=names.of(getattr(child, "bias", None)),
            )


def _out_dim(child: Any, shape: Sequence[int]) -> int | None:
    """Which dim of the weight a layer writes along; None for what is no linear layer."""
    if (getattr(child, "out_features", None), getattr(child, "in_features", None)) == tuple(shape):
        return 0
    return 1 if type(child).__name__ == "Conv1D" and getattr(child, "nf", None) == shape[1] else None


def _block_of(path: str) -> str:
    """The innermost module of a list that `path` lies in: a.layers.3.mlp.fc1 -> a.layers.3."""
    parts = path.split(".")
    ends = [index + 1 for index, part in enumerate(parts[:-1]) if part.isdigit()]
    return ".".join(parts[: ends[-1]]) if ends else ""


def _in_block(members: Sequence[_Linear]) -> dict[str, int]:
    dims: dict[str, int] = {}
    left = list(members)
    for firsts, last in _attentions(members):
        for linear in firsts:
            dims.update(linear.columns())
        dims.update(last.rows())
        left = [linear for linear in left if linear is not last and linear not in firsts]
    for firsts, last in _mlps(left):
        for linear in firsts:
            dims.update(linear.columns())
        dims.update(last.rows())
    return dims


def _attentions(members: Sequence[_Linear]) -> Iterator[tuple[list[_Linear], _Linear]]:
    """(layers that make queries, keys and values; the layer after the heads)."""
    for parent in dict.fromkeys(linear.parent for linear in members):
        own = [linear for linear in members if linear.parent == parent]
        firsts = _separate(own) or _fused(own)
        if not firsts:
            continue
        # Queries are as wide as what the heads give; fused ones hold keys and values too, so any part of them may fit.
        width = firsts[0].width_out if len(firsts) > 1 else None
        others = [linear for linear in (*own, *members) if linear not in firsts]
        last = next((linear for linear in others if _follows(firsts[0], linear, width)), None)
        if last is not None:
            yield firsts, last


def _separate(own: Sequence[_Linear]) -> list[_Linear]:
    found = [[linear for linear in own if linear.name in hints] for hints in (QUERY, KEY, VALUE)]
    if any(len(linears) != 1 for linears in found):
        return []
    query, key, value = (linears[0] for linears in found)
    fits = key.width_in == value.width_in and key.width_out == value.width_out
    return [query, key, value] if fits and query.width_out % key.width_out == 0 else []


def _fused(own: Sequence[_Linear]) -> list[_Linear]:
    found = [linear for linear in own if linear.name in FUSED and linear.width_out > linear.width_in]
    return found if len(found) == 1 else []


def _follows(first: _Linear, last: _Linear, width: int | None) -> bool:
    reads = last.width_in == width if width is not None else last.width_in < first.width_out
    return reads and last.width_out == first.width_in


def _mlps(members: Sequence[_Linear]) -> Iterator[tuple[list[_Linear], _Linear]]:
    """(one or two layers that widen, the layer that narrows again), told by their shapes alone."""
    left = list(members)
    for last in members:
        fitting = [linear for linear in left if (linear.width_in, linear.width_out) == (last.width_out, last.width_in)]
        firsts = [linear for linear in fitting if linear.parent == last.parent] or fitting
        if firsts and last.width_in > last.width_out:
            yield firsts, last
            left = [linear for linear in left if linear not in firsts]


def _packed_attention(module: nn.Module, names: _Names) -> dict[str, int]:
    """torch's MultiheadAttention: one parameter for queries, keys and values, without a module of its own."""
    dims: dict[str, int] = {}
    for child in module.modules():
        packed, after = names.of(getattr(child, "in_proj_weight", None)), getattr(child, "out_proj", None)
        if packed is None or after is None:
            continue
        bias, weight = names.of(getattr(child, "in_proj_bias", None)), names.of(after.weight)
        dims |= {name: dim for name, dim in ((packed, 0), (bias, 0), (weight, 1)) if name is not None}
    return dims


def _table(child: Any) -> Tensor | None:
    """The weight of an embedding."""
    table: Tensor | None = child.weight if hasattr(child, "num_embeddings") else None
    return table


def _reads_back(linear: _Linear, tables: Sequence[Any]) -> bool:
    """Whether a layer is the head: it maps to as many things as an embedding maps from."""
    return any(tuple(child.weight.shape) == (linear.width_out, linear.width_in) for child in tables)


def _vocabulary(module: nn.Module, names: _Names, heads: Sequence[_Linear]) -> dict[str, int]:
    """The heads, and the embeddings of what they map to; without a head, those that are named like one of tokens."""
    sizes = {head.width_out for head in heads}
    dims: dict[str, int] = {}
    for path, child in module.named_modules():
        name = names.of(_table(child))
        if name is not None and (child.num_embeddings in sizes or path.rpartition(".")[2] in TOKENS):
            dims[name] = 0
    for head in heads:
        dims.update(head.columns())
    return dims


def _text(dims: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> str:
    lines = [f'    "{pattern}": Shard(dim={dim}),' for pattern, dim in _patterns(dims, shapes).items()]
    whole = [name for name in shapes if name not in dims]
    matrices = _general_names(name for name in whole if len(shapes[name]) >= MATRIX)
    vectors = _general_names(name for name in whole if len(shapes[name]) < MATRIX)
    notes = [*_note("not recognised, stays whole on every rank", matrices), *_note("stays whole too", vectors)]
    return "\n".join(["ShardingSpec({", *lines, *notes, "})"])


def _note(what: str, names: Sequence[str]) -> list[str]:
    listed = textwrap.wrap(", ".join(names), LINE, initial_indent="    #   ", subsequent_indent="    #   ")
    return [f"    # {what}:", *listed] if names else []


def _patterns(dims: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The names with `*` for indices, where that says the same; the names themselves where it would say more."""
    found: dict[str, int] = {}
    for name, dim in dims.items():
        general = _general(name)
        pattern = parse(general)
        alike = all(dims.get(other) == dim for other in shapes if pattern.covers(other))
        found[general if alike else name] = dim
    return found


def _general(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _general_names(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(map(_general, names)))
