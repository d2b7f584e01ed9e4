"""The README's second example: a Llama of transformers, its weights cut by a declaration, on four real workers."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import distensor as ds
from distensor.core import ParallelConfig
from distensor.nn import DistributedModel, Shard, ShardingSpec, StageMapping


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=131,  # prime: nothing has to divide
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def make_batches(count: int) -> list[dict[str, torch.Tensor]]:
    """Runs of neighbouring numbers, so that the next one can be learned."""
    generator = torch.Generator().manual_seed(0)
    starts = [torch.randint(0, 131, (8, 1), generator=generator) for _ in range(count)]
    ids = [(start + torch.arange(24)) % 131 for start in starts]
    return [{"input_ids": each, "labels": each} for each in ids]


def main() -> None:
    stages = StageMapping(
        [["model.embed_tokens", "model.layers.[0-1]"], ["model.layers.[2-3]", "model.norm", "lm_head"]]
    )
    tp_spec = ShardingSpec(
        {
            "model.embed_tokens.weight": Shard(dim=0),
            "model.layers.*.self_attn.q_proj.weight": Shard(dim=0),
            "model.layers.*.self_attn.k_proj.weight": Shard(dim=0),
            "model.layers.*.self_attn.v_proj.weight": Shard(dim=0),
            "model.layers.*.self_attn.o_proj.weight": Shard(dim=1),
            "model.layers.*.mlp.gate_proj.weight": Shard(dim=0),
            "model.layers.*.mlp.up_proj.weight": Shard(dim=0),
            "model.layers.*.mlp.down_proj.weight": Shard(dim=1),
            "lm_head.weight": Shard(dim=0),
        }
    )
    model = DistributedModel(make_model(), stage_mapping=stages, tp_spec=tp_spec)
    parallel = ParallelConfig(tensor_parallel=2, pipeline_parallel=2)  # and data_parallel=, context_parallel=
    batches = make_batches(30)

    with ds.session(mode="local", workers=parallel.world_size):
        print(ds.plan(model, parallel=parallel, batch=batches[0]))
        trainer = ds.Trainer(model, parallel=parallel, lr=3e-3, lr_schedule="cosine", clip_norm=1.0)
        print(f"largest difference to one process: {trainer.check_parity(batches[0]).max_relative_difference:.1e}")
        history = trainer.fit(batches)
        print(f"loss {history.losses[0]:.3f} -> {history.losses[-1]:.3f} in {len(history)} steps")


if __name__ == "__main__":
    main()
