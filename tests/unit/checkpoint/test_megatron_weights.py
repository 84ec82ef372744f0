"""The weights that `train` reads: every tensor has its row, or the folder is rejected."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pacs_megatron.checkpoint.megatron_weights import open_weights
from pacs_megatron.errors import ConversionError

Tensors = dict[str, torch.Tensor]
ATTENTION = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("added", "config", "words"),
    [
        (
            {f"{ATTENTION}.q_proj.bias": torch.ones(64)},
            {},
            r"contains model\.layers\.0\.self_attn\.q_proj\.bias, which no row",
        ),
        (
            {"model.layers.0.mlp.shared_expert.up_proj.weight": torch.ones(1)},
            {},
            "contains model.layers.0.mlp.shared_expert.up_proj.weight, which no row",
        ),
        ({}, {"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens"),
        ({}, {"model_type": "qwen2", "architectures": None}, r"contains .*_norm\.weight, which no"),
        ({}, {"num_hidden_layers": 3, "layer_types": None}, r"lacks model\.layers\.2"),
        ({}, {"hidden_size": 32}, r"expected \[272, 32\] from config\.json"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_rejected(
    added: Tensors, config: dict[str, Any], words: str, tiny_qwen3: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_qwen3, tmp_path / "hf")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | added, folder / "model.safetensors")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(ConversionError, match=words):
        open_weights(folder)


def test_a_second_copy_of_tied_embeddings_and_rotary_tables_pass(tmp_path: Path) -> None:
    from tests.support.tiny_models import make_tiny_qwen3

    folder = make_tiny_qwen3(tmp_path / "hf", tied=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{ATTENTION}.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, folder / "model.safetensors")
    weights = open_weights(folder)
    assert torch.equal(weights.get("lm_head.weight"), tensors["lm_head.weight"])
