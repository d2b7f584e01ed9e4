"""Small models of every family that stage programs must carry, with random weights, batches and stage mappings.

A plain module: the parity benchmark imports it by path. Nothing is downloaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 97
LAYERS = 4


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to build a model of a family, feed it and cut it.

    `blocks` are patterns of the repeated modules in order; `head` comes before them, `tail` after.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    head: tuple[str, ...]
    blocks: tuple[str, ...]
    tail: tuple[str, ...]
    loss: Callable[[Any, Any], Tensor] | None = None
    sizes: tuple[tuple[int, int], ...] = ((4, 12), (5, 19))
    """(rows, sequence) of the captured example and of another batch."""

    def stages(self, count: int) -> list[list[str]]:
        """The mapping into `count` stages, blocks spread evenly."""
        share = len(self.blocks) / count
        parts = [[block for at, block in enumerate(self.blocks) if int(at / share) == index] for index in range(count)]
        parts[0] = [*self.head, *parts[0]]
        parts[-1] = [*parts[-1], *self.tail]
        return parts


def tokens(*names: str, seed: int = 3) -> Callable[[int, int], Any]:
    """A batch of token ids; labels are the ids with some of them ignored."""

    def make(rows: int, sequence: int) -> Any:
        generator = torch.Generator().manual_seed(seed + rows)
        ids = torch.randint(0, VOCABULARY, (rows, sequence), generator=generator)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
        mask = torch.ones_like(ids)
        for row in range(rows):
            mask[row, sequence - row % 3 :] = 0
        made = {"input_ids": ids, "labels": labels, "attention_mask": mask}
        return {name: made[name] for name in names}

    return make


def images(rows: int, sequence: int) -> Any:
    del sequence
    generator = torch.Generator().manual_seed(rows)
    pixels = torch.randn(rows, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 10, (rows,), generator=generator)}


def pictures(rows: int, sequence: int) -> Any:
    made = images(rows, sequence)
    return made["pixel_values"], made["labels"]


def features(rows: int, sequence: int) -> Any:
    del sequence
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 3, generator=generator)


def sequences(rows: int, sequence: int) -> Any:
    generator = torch.Generator().manual_seed(rows)
    states = torch.randn(rows, sequence, 16, generator=generator)
    return states, torch.randn(rows, sequence, 16, generator=generator)


def _common(**changes: Any) -> dict[str, Any]:
    base = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {**base, **changes}


def _transformers(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        logging.getLogger("transformers").setLevel(logging.ERROR)
        torch.manual_seed(1)
        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
        return made.train()

    return build


def _blocks(path: str) -> tuple[str, ...]:
    return tuple(f"{path}.{index}" for index in range(LAYERS))


def _decoder(name: str, prefix: str, *names: str, **options: Any) -> Family:
    """The layout of Llama: model.embed_tokens, model.layers, model.norm, lm_head."""
    return Family(
        name=name,
        build=_transformers(f"{prefix}ForCausalLM", f"{prefix}Config", **_common(**options)),
        batch=tokens(*(names or ("input_ids", "labels"))),
        head=("model.embed_tokens",),
        blocks=_blocks("model.layers"),
        tail=("model.norm", "lm_head"),
    )


class ConvNet(nn.Module):
    """Convolutions with group normalisation, pooling, and writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block1 = nn.Sequential(nn.GroupNorm(2, 8), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1))
        self.block2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding="same"), nn.SiLU(inplace=True))
        self.block3 = nn.Sequential(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.GELU(), nn.AvgPool2d(2))
        self.head = nn.Linear(16, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        hidden = self.block1(self.stem(pixels))
        hidden += 1
        hidden = self.block3(self.block2(hidden))
        return self.head(functional.adaptive_avg_pool2d(hidden, 1).flatten(1))  # type: ignore[no-any-return]


def _mlp() -> nn.Module:
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(8, 8), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, 3)).train()


def _conv() -> nn.Module:
    torch.manual_seed(1)
    return ConvNet().train()


def _encoder() -> nn.Module:
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).train()


def cross_entropy(outputs: Any, batch: Any) -> Tensor:
    return functional.cross_entropy(outputs, batch[1])


def squared_error(outputs: Any, batch: Any) -> Tensor:
    return functional.mse_loss(outputs, batch[1])


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

_LIST = (
    _decoder("llama", "Llama", num_key_value_heads=2),
    _decoder("llama_tied", "Llama", num_key_value_heads=2, tie_word_embeddings=True),
    _decoder("llama_masked", "Llama", "input_ids", "labels", "attention_mask", num_key_value_heads=2),
    _decoder("qwen2", "Qwen2", num_key_value_heads=2),
    _decoder("mistral", "Mistral", num_key_value_heads=2, sliding_window=8),
    _decoder("olmo2", "Olmo2", num_key_value_heads=2),
    _decoder("gemma2", "Gemma2", num_key_value_heads=2, head_dim=8, sliding_window=8, attn_implementation="eager"),
    # Experts as one batched product: the other implementations branch on values, which no graph can hold.
    _decoder("mixtral", "Mixtral", num_key_value_heads=2, num_local_experts=4, experts_implementation="batched_mm"),
    Family(
        name="gpt2",
        build=_transformers(
            "GPT2LMHeadModel",
            "GPT2Config",
            **_common(n_embd=32, n_layer=LAYERS, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
        ),
        batch=tokens("input_ids", "labels"),
        head=("transformer.wte", "transformer.wpe"),
        blocks=_blocks("transformer.h"),
        tail=("transformer.ln_f", "lm_head"),
    ),
    Family(
        name="opt",
        build=_transformers("OPTForCausalLM", "OPTConfig", **_common(ffn_dim=64, dropout=0.0, word_embed_proj_dim=32)),
        batch=tokens("input_ids", "labels", "attention_mask"),
        head=("model.decoder.embed_tokens", "model.decoder.embed_positions"),
        blocks=_blocks("model.decoder.layers"),
        tail=("model.decoder.final_layer_norm", "lm_head"),
    ),
    Family(
        name="gpt_neox",
        build=_transformers(
            "GPTNeoXForCausalLM", "GPTNeoXConfig", **_common(hidden_dropout=0.0, attention_dropout=0.0)
        ),
        batch=tokens("input_ids", "labels"),
        head=("gpt_neox.embed_in",),
        blocks=_blocks("gpt_neox.layers"),
        tail=("gpt_neox.final_layer_norm", "lm_head"),
    ),
    Family(
        name="bert",
        build=_transformers("BertForMaskedLM", "BertConfig", **_common(**_NO_DROPOUT)),
        batch=tokens("input_ids", "labels", "attention_mask"),
        head=("bert.embeddings",),
        blocks=_blocks("bert.encoder.layer"),
        tail=("cls",),
    ),
    Family(
        name="vit",
        build=_transformers(
            "ViTForImageClassification",
            "ViTConfig",
            **_common(**_NO_DROPOUT, image_size=16, patch_size=4, num_labels=10),
        ),
        batch=images,
        head=("vit.embeddings",),
        blocks=_blocks("vit.layers"),
        tail=("vit.layernorm", "classifier"),
    ),
    Family(
        name="transformer_encoder",
        build=_encoder,
        batch=sequences,
        head=(),
        blocks=_blocks("layers"),
        tail=(),
        loss=squared_error,
    ),
    Family(
        name="mlp",
        build=_mlp,
        batch=features,
        head=(),
        blocks=("0", "2", "4", "6"),
        tail=("8",),
        loss=squared_error,
    ),
    Family(
        name="conv",
        build=_conv,
        batch=pictures,
        head=("stem",),
        blocks=("block1", "block2", "block3"),
        tail=("head",),
        loss=cross_entropy,
    ),
)

FAMILIES: Mapping[str, Family] = {family.name: family for family in _LIST}
STAGE_COUNTS = (1, 2, 4)
