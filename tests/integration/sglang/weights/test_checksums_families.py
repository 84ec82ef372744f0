"""Weights of models whose parameters SGLang holds otherwise than they are exported: tied, odd
vocabulary, experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pacs_megatron.config.schema import ModelOptions
from pacs_megatron.models import load_spec
from pacs_megatron.sglang import build as sglang
from pacs_megatron.sglang.weights.server_sync import server_sync
from pacs_megatron.training.push import push
from tests.integration.sglang.conftest import START_S, own_options
from tests.support.needs import require_sglang
from tests.support.tiny_models import make_tiny_qwen3

pytestmark = [pytest.mark.sglang, pytest.mark.full]


def tied(folder: Path, seed: int) -> Path:
    """With biases, an odd vocabulary, one key-value head."""
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=397,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    return _save(transformers.Qwen2ForCausalLM, config, folder, seed)


def experts(folder: Path, seed: int) -> Path:
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=397,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    )
    return _save(transformers.Qwen3MoeForCausalLM, config, folder, seed)


def _save(kind: Any, config: Any, folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    model = kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    make_tiny_qwen3(folder)  # its tokenizer
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("make", [tied, experts])
def test_every_way_brings_all_weights(tmp_path: Path, make: Any) -> None:
    require_sglang()
    from safetensors.torch import load_file

    folders = [make(tmp_path / f"m{seed}", seed) for seed in range(2)]
    # Dummy weights, as servers with FP8 start: a weight that is not sent is visible.
    options = own_options(servers={"extra_args": ("--load-format", "dummy")})
    assert options.servers is not None
    specs = sglang.server_specs(options, ModelOptions(path=str(folders[0])), tmp_path / "servers")
    [server] = sglang.start_servers(specs, START_S)
    try:
        verified = set()
        for number, transport in enumerate(("disk", "broadcast", "ipc")):
            sync_options = options.sync.model_copy(
                update={"transport": transport, "verify": "full", "timeout_s": 60.0}
            )
            run = options.model_copy(update={"sync": sync_options})
            sync = server_sync(run, load_spec(folders[0]), tmp_path / "run" / "weights")
            sync.set_targets(sglang.server_apis(run, (server.url,)))
            # As the policy exports: a tied head once, an expert's weights one by one.
            weights = load_file(folders[1 - number % 2] / "model.safetensors")
            push(number + 1, weights.items(), [sync])
            verified.add(sync.report.verified)
            sync.close()
        [count] = verified
        assert count > 10
    finally:
        server.close()
