"""One small module for each family of operations: every gradient against the eager module, in 64 bits.

Shapes: B rows, S positions, D features, H heads, W width of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from partition_harness import divided, run_ranks
from program_harness import eager, gradient_differences, loss_difference
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from distensor.core.errors import ShardingError, UserError
from distensor.nn import Replicate, Shard
from distensor.program import Partition, capture, cut, partition

D0, D1 = Shard(dim=0), Shard(dim=1)
_EXACT = 1e-11


class Module(nn.Module):
    """`function(module, batch)` with parameters of these shapes."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.function = function
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).double()))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def real(*shape: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randn(rows, *shape, generator=torch.Generator().manual_seed(rows)).double()


def ids(sequence: int, vocabulary: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randint(0, vocabulary, (rows, sequence), generator=torch.Generator().manual_seed(rows))


def squares(outputs: Tensor, batch: Any) -> Tensor:
    """A loss to which no two elements count alike."""
    del batch
    flat = outputs.reshape(-1)
    return (flat.square() * (torch.arange(flat.shape[0]) % 7 + 1)).sum()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A function of parameters and a batch; `gathers` is how many values have no rule and are made whole."""

    shapes: Mapping[str, tuple[int, ...]]
    spec: Mapping[str, Any]
    run: Callable[[Any, Tensor], Tensor]
    batch: Callable[[int], Tensor] = field(default=real(6, 8))
    gathers: int = 0
    ranks: tuple[int, ...] = (2, 3)


def column(m: Any, x: Tensor) -> Tensor:
    return F.linear(x, m.a)


def _attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """[B, S, H, W] each -> [B, S, H * W]."""
    made = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), **options)
    return made.transpose(1, 2).flatten(2)


def _fused(m: Any, x: Tensor) -> Tensor:
    """Queries, keys and values by explicit sizes, as [3, H, W]."""
    q, k, v = F.linear(x, m.qkv, m.bias).view(x.shape[0], 6, 3, 4, 2).unbind(2)
    return F.linear(_attention(q, k, v, is_causal=True), m.out)


def _chunked(m: Any, x: Tensor) -> Tensor:
    q, k, v = F.linear(x, m.qkv).chunk(3, -1)
    heads = [part.reshape(x.shape[0], 6, 4, 2) for part in (q, k, v)]
    return F.linear(_attention(*heads), m.out)


def _grouped(m: Any, x: Tensor) -> Tensor:
    """Six heads of queries, three of keys and values, in one weight."""
    q, k, v = F.linear(x, m.qkv).split([12, 6, 6], -1)
    q, k, v = (part.view(x.shape[0], 6, -1, 2) for part in (q, k, v))
    return F.linear(_attention(q, k, v, enable_gqa=True), m.out)


def _eager_attention(m: Any, x: Tensor) -> Tensor:
    """Scores by hand, with a mask over heads and one over positions."""
    q, k, v = (F.linear(x, w).view(x.shape[0], 6, 4, 2).transpose(1, 2) for w in (m.q, m.k, m.v))
    scores = q @ k.transpose(-1, -2) * 0.7 + m.relative
    scores = scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape[0], 6, 8)
    return F.linear(mixed, m.out)


def _gate(m: Any, x: Tensor) -> Tensor:
    gate, up = F.linear(x, m.gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, m.down)


def _tied(m: Any, x: Tensor) -> Tensor:
    """An embedding that is the head too, and is regularised."""
    hidden = F.embedding(x, m.table, padding_idx=3) + m.position
    return F.linear(hidden.tanh(), m.table).log_softmax(-1) + m.table.square().mean()


def _statistics(m: Any, x: Tensor) -> Tensor:
    """Sums, means, largest and logarithmic sums over a cut dim."""
    y = F.linear(x, m.a)
    parts = [y.sum(-1), y.mean((1, 2), keepdim=True).squeeze(-1), y.logsumexp(-1), y.detach().amax(-1)]
    return sum(parts, start=torch.zeros(())) * y.mean() + y.sum()


def _norms(m: Any, x: Tensor) -> Tensor:
    y = F.linear(x, m.a)
    y = F.layer_norm(y, (10,), m.weight, m.bias) + F.rms_norm(y, (10,), m.scale, 1e-6)
    return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)


def _joins(m: Any, x: Tensor) -> Tensor:
    """Slices, joins and repeats along the cut dim and others."""
    y = F.linear(x, m.a)
    both = torch.cat([y, y.flip(1), y[:, :1]], 1)
    rotated = torch.cat([-both[..., 5:], both[..., :5]], -1)
    stacked = torch.stack([rotated, both * 2], 2).repeat(1, 1, 2, 1)
    return stacked.unsqueeze(1).expand(-1, 2, -1, -1, -1).roll(1, 2).movedim(2, 0).sum(0)


def _lookups(m: Any, x: Tensor) -> Tensor:
    """Elements and rows by index, along the cut dim and others."""
    y = F.linear(x, m.a)
    at = (x[..., :2].abs() * 97).long() % 10
    rows = torch.tensor([3, 0, 1])
    return y.log_softmax(-1).gather(-1, at).sum(-1) + y[:, rows].sum((1, 2))[:, None] + y.index_select(1, rows).mean()


def _transposed(m: Any, x: Tensor) -> Tensor:
    """Products of every kind: matmul, mm, bmm, addmm, baddbmm, mv."""
    flat = x.reshape(-1, 8)
    y = torch.addmm(m.bias, flat, m.a, beta=0.5, alpha=2.0)
    z = torch.addmm(m.last, y.tanh(), m.b, beta=3.0, alpha=0.5)
    u = torch.bmm(z[None], m.b.t()[None])[0]
    w = torch.baddbmm(z[None], u[None], m.b[None], beta=0.2)[0]
    return torch.mv(w, m.v[:5])[:, None] + w @ m.c.t() + torch.dot(m.v, m.v) + torch.outer(y[:, 0], m.c[:, 0])


def _letters(m: Any, x: Tensor) -> Tensor:
    """Attention in einsum; weights are [heads, width, in]."""
    q, k, v = (torch.einsum("bsd,hwd->bhsw", x, w) for w in (m.q, m.k, m.v))
    scores = torch.einsum("bhsw,bhtw->bhst", q, k).softmax(-1)
    mixed = torch.einsum("bhst,bhtw->bshw", scores, v)
    return (
        torch.einsum("bshw,dhw->bsd", mixed, m.o)
        + torch.einsum("hwd,hwd->", m.q, m.k)
        + torch.einsum("hww->h", m.v[:, :, :2]).sum()
    )


def _elementwise(m: Any, x: Tensor) -> Tensor:
    """Broadcasting of all sorts; parameters on every rank that meet cut values."""
    y = F.linear(x, m.a)
    y = torch.where(y > 0, y, y.exp() - 1) * m.scale + m.one * y.clamp(-2, 2)
    y = torch.addcmul(y, m.scale.sigmoid(), y) + torch.lerp(y, y * 2, 0.3) + m.rows[:, None]
    return y + y.sum(-1, keepdim=True) + y.mean(1, keepdim=True)


def _convolved(m: Any, x: Tensor) -> Tensor:
    """Output channels cut, pooled, then input channels cut."""
    hidden = F.avg_pool1d(F.conv1d(x.transpose(1, 2), m.k, m.kb, padding="same").relu(), 2)
    return F.linear(F.conv1d(hidden, m.l, m.lb).transpose(1, 2), m.a)


def _unruled(m: Any, x: Tensor) -> Tensor:
    """Operations that get whole values."""
    y = F.linear(x, m.a)
    return y.cumsum(-1) + y.var(-1, keepdim=True) + F.glu(y, -1).sum(-1, keepdim=True)


CASES: Mapping[str, Case] = {
    "column, whole row": Case(
        shapes={"a": (10, 8), "ab": (10,), "b": (5, 10), "bb": (5,)},
        spec={"a": D0, "ab": D0, "b": D1},
        run=lambda m, x: F.linear(F.linear(x, m.a, m.ab).relu(), m.b, m.bb),
    ),
    "biases on every rank": Case(
        shapes={"a": (10, 8), "ab": (10,), "b": (5, 10), "bb": (5,)},
        spec={"a": D0, "b": D1},
        run=lambda m, x: F.linear(F.linear(x, m.a, m.ab).relu(), m.b, m.bb),
    ),
    "8 to 5 to 8": Case(
        shapes={"a": (5, 8), "ab": (5,), "b": (8, 5), "bb": (8,)},
        spec={"a": D0, "ab": D0, "b": D1},
        run=lambda m, x: F.linear(F.linear(x, m.a, m.ab).tanh(), m.b, m.bb),
        ranks=(2, 3, 4),
    ),
    "row first, then column, then column": Case(
        shapes={"a": (7, 8), "b": (6, 7), "c": (9, 6)},
        spec={"a": D1, "b": D0, "c": D0},
        run=lambda m, x: F.linear(F.linear(F.linear(x, m.a).tanh(), m.b).tanh(), m.c),
        gathers=1,
    ),
    "the loss over a cut output": Case(shapes={"a": (7, 8)}, spec={"a": D0}, run=column),
    "fused, three by heads by width": Case(
        shapes={"qkv": (24, 8), "bias": (24,), "out": (8, 8)},
        spec={"qkv": D0, "bias": D0, "out": D1},
        run=_fused,
        ranks=(2, 3, 4),
    ),
    "fused, chunks": Case(
        shapes={"qkv": (24, 8), "out": (8, 8)}, spec={"qkv": D0, "out": D1}, run=_chunked, ranks=(2, 3, 4)
    ),
    "fused and grouped": Case(
        shapes={"qkv": (24, 8), "out": (8, 12)}, spec={"qkv": D0, "out": D1}, run=_grouped, ranks=(2, 3)
    ),
    "attention by hand": Case(
        shapes={"q": (8, 8), "k": (8, 8), "v": (8, 8), "relative": (4, 6, 6), "out": (8, 8)},
        spec={"q": D0, "k": D0, "v": D0, "out": D1},
        run=_eager_attention,
    ),
    "gate and up in one": Case(
        shapes={"gate_up": (14, 8), "down": (8, 7)}, spec={"gate_up": D0, "down": D1}, run=_gate
    ),
    "tied vocabulary": Case(
        shapes={"table": (131, 8), "position": (6, 8)},
        spec={"table": D0},
        run=_tied,
        batch=ids(6, 131),
        ranks=(2, 3, 4),
    ),
    "embedding by columns": Case(
        shapes={"table": (11, 7), "b": (5, 7)},
        spec={"table": D1, "b": D1},
        run=lambda m, x: F.linear(F.embedding(x, m.table), m.b),
        batch=ids(6, 11),
    ),
    "statistics": Case(shapes={"a": (7, 8)}, spec={"a": D0}, run=_statistics),
    "norms": Case(
        shapes={"a": (10, 8), "weight": (10,), "bias": (10,), "scale": (10,)},
        spec={"a": D0, "weight": D0},
        run=_norms,
    ),
    "slices and joins": Case(shapes={"a": (10, 8)}, spec={"a": D0}, run=_joins),
    "lookups": Case(shapes={"a": (10, 8)}, spec={"a": D0}, run=_lookups),
    "products": Case(
        shapes={"a": (8, 6), "bias": (6,), "b": (6, 5), "last": (5,), "v": (6,), "c": (9, 5)},
        spec={"a": D1, "b": D0, "c": D1},
        run=_transposed,
        gathers=2,
    ),
    "products by letters": Case(
        shapes={"q": (4, 2, 8), "k": (4, 2, 8), "v": (4, 2, 8), "o": (8, 4, 2)},
        spec={"q": D0, "k": D0, "v": D0, "o": D1},
        run=_letters,
        gathers=1,
    ),
    "elementwise": Case(
        shapes={"a": (10, 8), "scale": (10,), "one": (1,), "rows": (6,)}, spec={"a": D0}, run=_elementwise
    ),
    "operations without a rule": Case(shapes={"a": (10, 8)}, spec={"a": D0}, run=_unruled, gathers=3),
    "a cut parameter that nothing else follows": Case(
        shapes={"a": (10, 8), "g": (7, 3)},
        spec={"a": D0, "g": D1},
        run=lambda m, x: F.linear(x, m.a).sum(-1) * m.g.norm() + torch.linalg.vector_norm(m.g, dim=0).sum(),
        gathers=1,
    ),
    "convolutions by channels": Case(
        shapes={"k": (7, 8, 3), "kb": (7,), "l": (5, 7, 1), "lb": (5,), "a": (4, 5)},
        spec={"k": D0, "l": D1, "a": D0},
        run=_convolved,
    ),
    "convolution in groups": Case(
        shapes={"k": (6, 4, 3)},
        spec={"k": D0},
        run=lambda m, x: F.conv1d(x.transpose(1, 2), m.k, groups=2),
        gathers=1,
    ),
}


def _compare(
    module: nn.Module, spec: Mapping[str, Any], ranks: int, batch: Callable[[int], Any], **options: Any
) -> Partition:
    captured = capture(module, batch(4), **options)
    made = divided(captured, spec, ranks)
    for rows in (4, 5):
        found = run_ranks(made, batch(rows), foreign=rows == 4)
        expected = eager(module, batch(rows), options.get("loss"))
        assert loss_difference(found.result, expected) < _EXACT
        differences = gradient_differences(found.result, expected)
        assert max(differences.values()) < _EXACT, differences
    return made


@pytest.mark.parametrize("name", CASES)
def test_rule_keeps_loss_and_gradients(name: str) -> None:
    case = CASES[name]
    module = Module(case.run, case.shapes)
    for ranks in case.ranks:
        made = _compare(module, case.spec, ranks, case.batch, loss=squares, loss_weight="rows")
        assert len(made.gathers) == case.gathers, made.gathers
        assert set(made.layouts) == set(case.spec)


_TARGETS = torch.tensor([[0, 10, -100, 3, 5, 7], [1, 1, -100, -100, 9, 2], [4, 0, 10, 10, 6, 8]])
_SHARES = torch.linspace(0.5, 2.0, 11, dtype=torch.float64)


def _targets(rows: int) -> Tensor:
    return _TARGETS.repeat(2, 1)[:rows]


def _labelled(rows: int) -> Any:
    return real(6, 8)(rows), _targets(rows)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("shares", [None, _SHARES])
def test_cross_entropy_over_a_cut_vocabulary(reduction: str, smoothing: float, shares: Tensor | None) -> None:
    def loss(outputs: Tensor, batch: Any) -> Tensor:
        options = {"weight": shares, "label_smoothing": smoothing, "reduction": reduction}
        made = F.cross_entropy(outputs.transpose(1, 2), batch[1], **options)
        return made if made.ndim == 0 else (made * made).sum()

    module = Module(lambda m, x: F.linear(x, m.head, m.bias), {"head": (11, 8), "bias": (11,)})
    made = _compare(module, {"head": D0, "bias": D0}, 3, _labelled, loss=loss, loss_weight="rows")
    assert made.gathers == ()
    assert "dist.gather.default" not in {node.op for node in made.captured().nodes}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_likelihood_over_a_cut_vocabulary(reduction: str) -> None:
    def loss(outputs: Tensor, batch: Any) -> Tensor:
        made = F.nll_loss(outputs.log_softmax(-1).transpose(1, 2), batch[1], reduction=reduction)
        return made if made.ndim == 0 else (made * made).sum()

    made = _compare(Module(column, {"a": (11, 8)}), {"a": D0}, 3, _labelled, loss=loss, loss_weight="rows")
    assert made.gathers == ()


LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "mse_loss": F.mse_loss,
    "l1_loss": F.l1_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "huber_loss": F.huber_loss,
    "soft_margin_loss": F.soft_margin_loss,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "hinge_embedding_loss": lambda x, y, **how: F.hinge_embedding_loss(x, (y > 0.5) * 2.0 - 1.0, **how),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_of_elements_over_a_cut_output(name: str) -> None:
    def pairs(rows: int) -> Any:
        return real(6, 8)(rows), real(6, 5)(rows).sigmoid()

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        return LOSSES[name](outputs, batch[1]) + LOSSES[name](outputs, batch[1], reduction="sum")

    module = Module(column, {"a": (5, 8)})
    made = _compare(module, {"a": D0}, 2, pairs, loss=loss, loss_weight="rows")
    assert made.gathers == ()


def test_dropout_draws_alike_where_values_are_whole_and_apart_where_they_are_cut() -> None:
    """The masks of a row-cut product's two halves differ, those of its sum are the same on all ranks."""

    def run(m: Any, x: Tensor) -> Tensor:
        cut = F.dropout(F.linear(x * 0 + 1, m.a), 0.5)
        return F.dropout(F.linear(cut, m.b), 0.25) + 0 * m.bias

    module = Module(run, {"a": (32, 8), "b": (16, 32), "bias": (16,)})
    with torch.no_grad():
        for name in ("a", "b"):
            getattr(module, name).fill_(1.0)
    captured = capture(module, real(6, 8)(4), loss=squares, loss_weight="rows")
    made = divided(captured, {"a": D0, "b": D1}, 2)
    sites = [[node.site for node in made.captured(tp=rank).nodes if node.site is not None] for rank in range(2)]
    assert sites[0][0] != sites[1][0]
    assert sites[0][1] == sites[1][1]
    once, again, other = (run_ranks(made, real(6, 8)(4), seed=seed) for seed in (1, 1, 2))
    assert once.result.loss == again.result.loss != other.result.loss
    left, right = (once.per_rank[rank]["a"] for rank in range(2))
    assert not torch.equal(left, right)
    kept = [float((part != 0).double().mean()) for part in (left, right)]
    assert all(share > 0.9 for share in kept)


def test_two_names_of_one_parameter_must_agree() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(8, 8, bias=False).double()
            self.other = nn.Linear(8, 8, bias=False).double()
            self.other.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.one(x).tanh())  # type: ignore[no-any-return]

    module = Tied()
    captured = capture(module, real(6, 8)(4), loss=squares, loss_weight="rows")
    with pytest.raises(ShardingError, match=r"'other.weight' is the same parameter as 'one.weight'"):
        partition(captured, {"one.weight": 0, "other.weight": 1}, tensor=2)
    made = partition(captured, {"other.weight": -1}, tensor=2)
    assert made.layouts["one.weight"].dim == 1
    found = run_ranks(made, real(6, 8)(4))
    differences = gradient_differences(found.result, eager(module, real(6, 8)(4), squares))
    assert max(differences.values()) < _EXACT


def _heads(m: Any, x: Tensor) -> Tensor:
    q, k, v = (F.linear(x, w).view(x.shape[0], 6, 2, 4) for w in (m.q, m.k, m.v))
    return F.linear(_attention(q, k, v), m.out)


@pytest.mark.parametrize(
    ("spec", "ranks", "message"),
    [
        ({"q": D0}, 9, r"'q' has 8 elements along dim 0 and tensor_parallel=9: use Replicate\(\) for it, or at most 8"),
        (
            {"q": D0, "k": D0, "v": D0, "out": D1},
            3,
            r"'q' is used in units of 4 along dim 0 \(in 'the root module'\): 2 units for tensor_parallel=3; "
            r"use Replicate\(\) for it, or at most tensor_parallel=2",
        ),
    ],
)
def test_more_ranks_than_units_are_refused(spec: Mapping[str, Any], ranks: int, message: str) -> None:
    module = Module(_heads, dict.fromkeys(("q", "k", "v", "out"), (8, 8)))
    captured = capture(module, real(6, 8)(4), loss=squares, loss_weight="rows")
    with pytest.raises(UserError, match=message):
        divided(captured, spec, ranks)


def test_keys_and_values_on_every_rank() -> None:
    """Queries are cut by heads, the fewer heads of keys and values are whole: each rank takes those it needs."""

    def run(m: Any, x: Tensor) -> Tensor:
        q = F.linear(x, m.q).view(x.shape[0], 6, 6, 2)
        k, v = (F.linear(x, w).view(x.shape[0], 6, 2, 2) for w in (m.k, m.v))
        return F.linear(_attention(q, k, v, enable_gqa=True), m.out)

    shapes = {"q": (12, 8), "k": (4, 8), "v": (4, 8), "out": (8, 12)}
    for ranks in (2, 3, 4):
        spec = {"q": D0, "k": Replicate(), "v": Replicate(), "out": D1}
        made = _compare(Module(run, shapes), spec, ranks, real(6, 8), loss=squares, loss_weight="rows")
        assert made.gathers == ()


@pytest.mark.parametrize("dim", [0, 1])
def test_weights_start_alike_however_they_are_cut(dim: int) -> None:
    """The module is made once and cut afterwards: its parts are those of one process."""
    module = Module(column, {"a": (10, 7)})
    captured = capture(module, real(6, 7)(4), loss=squares, loss_weight="rows")
    made = partition(captured, {"a": dim}, tensor=2)
    parts = [cut(made.captured(tp=rank)).weights(0)["a"] for rank in range(2)]
    assert torch.equal(made.layouts["a"].join(parts), module.get_parameter("a"))
