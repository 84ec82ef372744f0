"""Each key of config.json that is used, with another value: logits equal transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pacs_megatron.convert.logits import fixed_prompts
from pacs_megatron.models.config_keys import USED
from tests.support.ranks import run_ranks
from tests.support.tiers import in_test
from tests.support.tiny_families import EXPERTS, LLAMA3_ROPE, YARN_ROPE, config_of

LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {key: value for key, value in YARN_ROPE.items() if key != "rope_theta"}
LLAMA3 = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
BASE: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": EXPERTS,
    "llama": {},
    "mistral": {"sliding_window": None},
}
FULL = ["full_attention", "full_attention"]
SIZES: dict[str, list[dict[str, Any]]] = {
    "vocab_size": [{"vocab_size": 97}],
    "hidden_size": [{"hidden_size": 48}],
    "num_hidden_layers": [{"num_hidden_layers": 3}],
    "num_attention_heads": [{"num_attention_heads": 8}],
    "num_key_value_heads": [{"num_key_value_heads": 4}],
    "head_dim": [{"head_dim": 24}],
}
"""Key -> configs with another value of it"""
DENSE: dict[str, list[dict[str, Any]]] = {"intermediate_size": [{"intermediate_size": 40}]}
SAME_SIZES: dict[str, list[dict[str, Any]]] = {
    "rms_norm_eps": [{"rms_norm_eps": 0.05}],
    "tie_word_embeddings": [{"tie_word_embeddings": True}],
    "rope_parameters": [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        {"rope_parameters": LINEAR | {"rope_theta": 300.0}},
        {"rope_parameters": LLAMA3 | {"rope_theta": 300.0}},
        {"rope_parameters": YARN | {"rope_theta": 300.0}},
    ],
    # As transformers 4 writes them.
    "rope_theta": [{"rope_theta": 300.0}],
    "rope_scaling": [
        {"rope_theta": 300.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 300.0, "rope_scaling": LLAMA3},
        {"rope_theta": 300.0, "rope_scaling": YARN},
    ],
}
EXPERT_KEYS: dict[str, list[dict[str, Any]]] = {
    "num_experts": [{"num_experts": 6}],
    "moe_intermediate_size": [{"moe_intermediate_size": 40}],
    "num_experts_per_tok": [{"num_experts_per_tok": 3}],
    "norm_topk_prob": [{"norm_topk_prob": False}],
}
NO_CHANGE: dict[str, list[dict[str, Any]]] = {
    "max_position_embeddings": [{"max_position_embeddings": 64}],
    "layer_types": [{"layer_types": FULL}],
    # As long as the longest sequence.
    "sliding_window": [{"sliding_window": 256, "use_sliding_window": True}],
}
"""Values that are read, and that change no logit of a short sequence"""
QWEN_WINDOWS: dict[str, list[dict[str, Any]]] = {
    "use_sliding_window": [{"use_sliding_window": False, "sliding_window": 4}],
    "max_window_layers": [
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    ],
}
NOT_HERE = {
    "model_type": "every family is here",
    "architectures": "tests of critics",
    "dtype": "type of the weights in the file",
    "torch_dtype": "type of the weights in the file",
    "num_local_experts": "test_config_reader",
}
"""Key of USED -> where it is tested"""


def changes_of(family: str) -> dict[str, list[dict[str, Any]]]:
    of_mlp = EXPERT_KEYS if family == "qwen3_moe" else DENSE
    changes = SIZES | SAME_SIZES | NO_CHANGE | of_mlp
    if family in ("qwen2", "qwen3"):
        changes |= QWEN_WINDOWS
    if family == "mistral":
        del changes["layer_types"]  # rejected
    return changes


def write(folder: Path, family: str, change: dict[str, Any]) -> Path:
    """A model whose config.json has the change as it is written here; returns its folder."""
    from transformers import AutoModelForCausalLM

    # transformers has to build a model of the right sizes; its spelling is replaced afterwards.
    config = config_of(family, BASE[family] | change)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.15)
    model.save_pretrained(folder)

    file = folder / "config.json"
    written = json.loads(file.read_text())
    if "rope_theta" in change:
        del written["rope_parameters"]
    if "layer_types" not in change:
        written.pop("layer_types", None)
    file.write_text(json.dumps(written | change))
    return folder


def logits_of_transformers(folder: Path) -> torch.Tensor:
    """[t, v] of the fixed prompts, fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        parts = [
            model(torch.tensor([prompt])).logits[0]
            for prompt in fixed_prompts(model.config.vocab_size)
        ]
    return torch.cat(parts)


def logits_of_policy(folders: list[Path]) -> list[Any]:
    """[t, v] of each folder, NumPy, fp32; one rank builds all models in turn."""

    def on_rank(_rank: int, _world: int) -> list[Any]:
        from pacs_megatron.checkpoint.megatron_weights import open_weights
        from pacs_megatron.config.schema import ParallelOptions, PrecisionOptions
        from pacs_megatron.contracts import Layout
        from pacs_megatron.models import load_spec, weight_table
        from pacs_megatron.parallel import groups

        rank = groups.initialize(Layout(world_size=1), seed=0, control_timeout_s=600.0)
        from pacs_megatron.policy import model, precision, weights
        from pacs_megatron.policy.logits import logits

        machine = precision.inspect_machine()
        results = []
        for folder in folders:
            spec = load_spec(folder)
            table = weight_table(spec)
            config = model.transformer_config(
                spec, ParallelOptions(), PrecisionOptions(dtype="fp32"), machine
            )
            [chunk] = model.build_chunks(spec, table.padded_vocab, config, machine, rank)
            chunk.eval()
            weights.load([model.unwrap(chunk)], table, open_weights(folder).get)
            found = logits([chunk], spec, fixed_prompts(spec.vocab_size))
            assert found is not None
            results.append(found.numpy())
        return results

    return run_ranks(on_rank, 1)[0]


def test_every_used_key_is_changed_here_or_elsewhere() -> None:
    tried: set[str] = set()
    for family in BASE:
        tried |= changes_of(family).keys()
    assert tried | NOT_HERE.keys() == USED.keys()
    assert not tried & NOT_HERE.keys()


@pytest.mark.parametrize("family", in_test(list(BASE), "qwen3"))
def test_logits_with_another_value_equal_transformers(family: str, tmp_path: Path) -> None:
    changes = changes_of(family)
    names = ["base"]
    folders = [write(tmp_path / "base", family, {})]
    for key, values in changes.items():
        for number, change in enumerate(values):
            names.append(key)
            folders.append(write(tmp_path / f"{key}-{number}", family, change))

    expected = [logits_of_transformers(folder) for folder in folders]
    found = logits_of_policy(folders)
    for name, reference, policy in zip(names, expected, found, strict=True):
        assert reference.std() > 0.3, name
        difference = (torch.from_numpy(policy) - reference).abs().max().item()
        assert difference <= 3e-5, (name, difference)

    for name, reference in zip(names, expected, strict=True):
        if name in NO_CHANGE or name in QWEN_WINDOWS:
            assert torch.equal(reference, expected[0]), name
        elif name in SAME_SIZES or name in ("num_experts_per_tok", "norm_topk_prob"):
            # Otherwise a reader that ignores the key would pass.
            assert (reference - expected[0]).abs().max() > 0.01, name
