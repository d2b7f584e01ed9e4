"""ShardingSpecs of the size that a README shows, one for each family of program_families.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distensor.nn import Replicate, Shard

COLUMN = Shard(dim=0)
ROW = Shard(dim=1)


def _decoder(**more: Any) -> dict[str, Any]:
    """Llama and its relatives."""
    return {
        "model.embed_tokens.weight": COLUMN,
        "model.layers.*.self_attn.q_proj.weight": COLUMN,
        "model.layers.*.self_attn.k_proj.weight": COLUMN,
        "model.layers.*.self_attn.v_proj.weight": COLUMN,
        "model.layers.*.self_attn.o_proj.weight": ROW,
        "model.layers.*.mlp.gate_proj.weight": COLUMN,
        "model.layers.*.mlp.up_proj.weight": COLUMN,
        "model.layers.*.mlp.down_proj.weight": ROW,
        **more,
    }


_HEAD = {"lm_head.weight": COLUMN}

SPECS: Mapping[str, Mapping[str, Any]] = {
    "llama": _decoder(**_HEAD),
    "llama_tied": _decoder(),
    "llama_masked": _decoder(**_HEAD),
    "qwen2": _decoder(**_HEAD, **{f"model.layers.*.self_attn.{name}_proj.bias": COLUMN for name in "qkv"}),
    "mistral": _decoder(**_HEAD),
    "olmo2": _decoder(**_HEAD),
    "gemma2": _decoder(),
    "mixtral": {
        **{name: rule for name, rule in _decoder(**_HEAD).items() if ".mlp." not in name},
        "model.layers.*.mlp.experts.gate_up_proj": ROW,  # [experts, out, in]
        "model.layers.*.mlp.experts.down_proj": Shard(dim=2),
    },
    "gpt2": {
        "transformer.wte.weight": COLUMN,
        "transformer.h.*.attn.c_attn.weight": ROW,  # Conv1D: [in, out], queries, keys and values in one
        "transformer.h.*.attn.c_attn.bias": COLUMN,
        "transformer.h.*.attn.c_proj.weight": COLUMN,
        "transformer.h.*.mlp.c_fc.weight": ROW,
        "transformer.h.*.mlp.c_fc.bias": COLUMN,
        "transformer.h.*.mlp.c_proj.weight": COLUMN,
    },
    "opt": {
        "model.decoder.embed_tokens.weight": COLUMN,
        **{f"model.decoder.layers.*.self_attn.{name}_proj.*": COLUMN for name in "qkv"},
        "model.decoder.layers.*.self_attn.out_proj.weight": ROW,
        "model.decoder.layers.*.fc1.*": COLUMN,
        "model.decoder.layers.*.fc2.weight": ROW,
    },
    "gpt_neox": {
        "gpt_neox.embed_in.weight": COLUMN,
        "gpt_neox.layers.*.attention.query_key_value.*": COLUMN,
        "gpt_neox.layers.*.attention.dense.weight": ROW,
        "gpt_neox.layers.*.mlp.dense_h_to_4h.weight": COLUMN,
        "gpt_neox.layers.*.mlp.dense_4h_to_h.weight": ROW,
        **_HEAD,
    },
    "bert": {
        "bert.embeddings.word_embeddings.weight": COLUMN,
        **{f"bert.encoder.layer.*.attention.self.{name}.weight": COLUMN for name in ("query", "key", "value")},
        "bert.encoder.layer.*.attention.output.dense.weight": ROW,
        "bert.encoder.layer.*.intermediate.dense.weight": COLUMN,
        "bert.encoder.layer.*.output.dense.weight": ROW,
    },
    "vit": {
        **{f"vit.layers.*.attention.{name}_proj.weight": COLUMN for name in "qkv"},
        "vit.layers.*.attention.o_proj.weight": ROW,
        "vit.layers.*.mlp.fc1.weight": COLUMN,
        "vit.layers.*.mlp.fc2.weight": ROW,
    },
    "transformer_encoder": {
        "layers.*.self_attn.in_proj_weight": COLUMN,
        "layers.*.self_attn.out_proj.weight": ROW,
        "layers.*.linear1.weight": COLUMN,
        "layers.*.linear2.weight": ROW,
    },
    "mlp": {"0.weight": COLUMN, "0.bias": COLUMN, "2.weight": ROW, "4.weight": COLUMN, "6.weight": ROW},
    "conv": {"head.weight": COLUMN},
}


def with_whole_keys(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Keys and values on every rank: fewer of their heads than ranks."""
    return {name: Replicate() if "k_proj" in name or "v_proj" in name else rule for name, rule in spec.items()}
