"""Context parallelism for models beyond the families: encoder and decoder, classification, fused projections."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from context_harness import Ranks, differences
from torch import Tensor

from distensor.program import capture, partition

_SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
_SMALL |= {"num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64}
_ZERO = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def _ids(rows: int, length: int) -> Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(rows + length))


def _texts(rows: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": _ids(rows, length), "labels": _ids(rows, length)}


def _classes(rows: int, length: int) -> dict[str, Tensor]:
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[0, length - 2 :] = 0
    return {"input_ids": _ids(rows, length), "attention_mask": mask, "labels": torch.arange(rows) % 3}


MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[[int, int], dict[str, Tensor]]]] = {
    "bert classifier": (
        "BertForSequenceClassification",
        "BertConfig",
        {**_SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3},
        _classes,
    ),
    "phi3": (
        "Phi3ForCausalLM",
        "Phi3Config",
        {**_SMALL, "num_key_value_heads": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
        _texts,
    ),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**_SMALL, **_ZERO, "multi_query": True}, _texts),
    "bloom": ("BloomForCausalLM", "BloomConfig", {**_SMALL, **_ZERO, "n_layer": 2, "n_head": 4}, _texts),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
        | {"decoder_start_token_id": 0, "pad_token_id": 0},
        _texts,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    import transformers

    logging.getLogger("transformers").setLevel(logging.ERROR)
    model, config, options, batch = MODELS[name]
    torch.manual_seed(1)
    module = getattr(transformers, model)(getattr(transformers, config)(**options)).train()
    made = partition(capture(module, batch(3, 12)), {}, context=3)
    assert made.whole_sequences == ()
    loss, gradients = differences(Ranks(module, made), batch(2, 17), None)
    assert loss <= 1e-6
    assert gradients <= 2e-6
