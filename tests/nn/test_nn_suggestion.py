"""suggest_sharding: which layers of a module are cut, by structure."""

from __future__ import annotations

import pytest
from torch import nn

from distensor.core.errors import UserError
from distensor.nn import Replicate, Shard, ShardingSpec, suggest_sharding

WIDTH, INNER, WORDS = 8, 12, 30


def dims_of(module: nn.Module) -> dict[str, int]:
    """The suggestion, pasted and resolved: parameter -> dim."""
    spec = eval(suggest_sharding(module), {"ShardingSpec": ShardingSpec, "Shard": Shard, "Replicate": Replicate})
    resolved = spec.resolve({name: tuple(value.shape) for name, value in module.named_parameters()})
    return {name: placement.dim for name, placement in resolved.items()}


def block(**layers: tuple[int, int]) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(*widths, bias=False) for name, widths in layers.items()})


def in_list(member: nn.Module) -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList([member])})


def test_the_text_is_printed_and_returned_and_names_what_stays_whole(capsys: pytest.CaptureFixture[str]) -> None:
    module = nn.ModuleDict(
        {
            "embed_tokens": nn.Embedding(WORDS, WIDTH),
            "positions": nn.Embedding(16, WIDTH),
            "layers": nn.ModuleList(
                nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "mlp": block(up=(WIDTH, INNER), down=(INNER, WIDTH))})
                for _ in range(2)
            ),
            "head": nn.Linear(WIDTH, WORDS),
        }
    )
    text = suggest_sharding(module)
    assert capsys.readouterr().out == f"{text}\n"
    assert text.splitlines() == [
        "ShardingSpec({",
        '    "layers.*.mlp.up.weight": Shard(dim=0),',
        '    "layers.*.mlp.down.weight": Shard(dim=1),',
        '    "embed_tokens.weight": Shard(dim=0),',
        '    "head.weight": Shard(dim=0),',
        '    "head.bias": Shard(dim=0),',
        "    # not recognised, stays whole on every rank:",
        "    #   positions.weight",
        "    # stays whole too:",
        "    #   layers.*.norm.weight, layers.*.norm.bias",
        "})",
    ]


def test_the_module_is_left_alone() -> None:
    module = in_list(block(up=(WIDTH, INNER), down=(INNER, WIDTH)))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    suggest_sharding(module)
    assert all(value.equal(before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("names", [("q_proj", "k_proj", "v_proj", "o_proj"), ("query", "key", "value", "dense")])
def test_attention_of_square_layers_is_told_by_names(names: tuple[str, ...]) -> None:
    found = dims_of(in_list(block(**dict.fromkeys(names, (WIDTH, WIDTH)))))
    assert found == {f"layers.0.{name}.weight": int(name == names[-1]) for name in names}


def test_grouped_queries_and_heads_wider_than_the_model() -> None:
    module = in_list(block(q_proj=(WIDTH, 16), k_proj=(WIDTH, 4), v_proj=(WIDTH, 4), any_name=(16, WIDTH)))
    assert dims_of(module)["layers.0.any_name.weight"] == 1


@pytest.mark.parametrize("values", [5, 2])
def test_keys_and_values_that_do_not_fit_are_not_taken_for_attention(values: int) -> None:
    odd = block(q_proj=(WIDTH, WIDTH), k_proj=(WIDTH, 5), v_proj=(WIDTH, values), o_proj=(WIDTH, WIDTH))
    found = dims_of(nn.ModuleDict({"layers": nn.ModuleList([odd]), "mlp": block(a=(WIDTH, INNER), b=(INNER, WIDTH))}))
    assert found == {"mlp.a.weight": 0, "mlp.b.weight": 1}


@pytest.mark.parametrize("fused", [3 * WIDTH, WIDTH + 2 * 2])
def test_fused_queries_keys_and_values(fused: int) -> None:
    module = in_list(block(qkv_proj=(WIDTH, fused), o_proj=(WIDTH, WIDTH), gate_up=(WIDTH, 24), down=(12, WIDTH)))
    found = dims_of(module)
    assert found == {"layers.0.qkv_proj.weight": 0, "layers.0.o_proj.weight": 1}


def test_a_fused_gate_is_not_recognised_and_said_to_stay_whole() -> None:
    module = in_list(block(qkv_proj=(WIDTH, 24), o_proj=(WIDTH, WIDTH), gate_up_proj=(WIDTH, 24), down=(12, WIDTH)))
    assert "layers.*.gate_up_proj.weight, layers.*.down.weight" in suggest_sharding(module)


def test_a_gated_mlp_and_two_mlps_in_one_block() -> None:
    gated = block(gate=(WIDTH, INNER), up=(WIDTH, INNER), down=(INNER, WIDTH))
    other = block(first=(WIDTH, INNER), second=(INNER, WIDTH))
    found = dims_of(in_list(nn.ModuleDict({"shared": gated, "own": other})))
    rows = {name for name, dim in found.items() if dim == 1}
    assert rows == {"layers.0.shared.down.weight", "layers.0.own.second.weight"}
    assert len(found) == 5


def test_packed_attention_of_torch() -> None:
    found = dims_of(nn.TransformerEncoderLayer(WIDTH, 2, INNER))
    assert found == {
        "self_attn.in_proj_weight": 0,
        "self_attn.in_proj_bias": 0,
        "self_attn.out_proj.weight": 1,
        "linear1.weight": 0,
        "linear1.bias": 0,
        "linear2.weight": 1,
    }


def test_a_tied_head_is_named_once_by_the_name_of_the_parameter() -> None:
    table, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    head.weight = table.weight
    assert dims_of(nn.ModuleDict({"words": table, "head": head})) == {"words.weight": 0}


def test_an_embedding_without_a_head_is_told_by_its_name() -> None:
    module = nn.ModuleDict({"wte": nn.Embedding(WORDS, WIDTH), "wpe": nn.Embedding(16, WIDTH)})
    assert dims_of(module) == {"wte.weight": 0}


def test_layers_that_differ_are_named_one_by_one() -> None:
    """A pattern must not say more than what was recognised."""
    plain = nn.ModuleDict({"up": nn.Linear(WIDTH, 5, bias=False)})
    module = nn.ModuleDict({"layers": nn.ModuleList([plain, block(up=(WIDTH, INNER), down=(INNER, WIDTH))])})
    assert dims_of(module) == {"layers.1.up.weight": 0, "layers.1.down.weight": 1}


@pytest.mark.parametrize("module", [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Conv2d(3, 8, 3)])
def test_a_module_of_unknown_structure_is_refused(module: nn.Module) -> None:
    with pytest.raises(UserError, match="recognised by their shapes; write the ShardingSpec by hand"):
        suggest_sharding(module)


def test_something_else_is_refused() -> None:
    with pytest.raises(UserError, match=r"suggest_sharding\(str\): expected a torch.nn.Module"):
        suggest_sharding("model")  # type: ignore[arg-type]
