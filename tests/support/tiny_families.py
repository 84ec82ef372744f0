"""Tiny random checkpoints of every supported family, saved by transformers, with its names and
shapes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

_SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "head_dim": 16,
}
HYBRID: dict[str, Any] = {
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
SHARED: dict[str, Any] = HYBRID | {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
"""Families whose layers Megatron-Core 0.16 does not have"""
# name -> (family, changes): KV heads 1, 2 and = heads; tied and not; odd vocabularies; head_dim !=
# hidden / heads
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {}),
    "qwen2-tied-mqa": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied-mha-odd-vocabulary": (
        "qwen3",
        {"tie_word_embeddings": True, "num_key_value_heads": 4, "vocab_size": 97, "head_dim": 24},
    ),
    "qwen3-padded-already": ("qwen3", {"vocab_size": 256, "head_dim": 8}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "qwen3_moe-tied-not-normalised": (
        "qwen3_moe",
        EXPERTS | {"tie_word_embeddings": True, "norm_topk_prob": False, "num_key_value_heads": 1},
    ),
    "llama": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-tied-mha": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen3_next": ("qwen3_next", SHARED),
    "qwen3_5": ("qwen3_5_text", HYBRID),
    "qwen3_5-tied-odd-vocabulary": (
        "qwen3_5_text",
        HYBRID
        | {
            "tie_word_embeddings": True,
            "vocab_size": 97,
            "num_hidden_layers": 3,
            "full_attention_interval": 3,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 10,
            "linear_conv_kernel_dim": 3,
            "partial_rotary_factor": 0.5,
        },
    ),
    "qwen3_5-yarn": (
        "qwen3_5_text",
        HYBRID
        | {
            "partial_rotary_factor": 0.5,
            "rope_parameters": YARN_ROPE | {"partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_5_moe": ("qwen3_5_moe_text", SHARED),
}


def config_of(family: str, changes: dict[str, Any]) -> Any:
    """A transformers config object."""
    import transformers

    kind = {
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "qwen3_moe": transformers.Qwen3MoeConfig,
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "qwen3_next": transformers.Qwen3NextConfig,
        "qwen3_5_text": transformers.Qwen3_5TextConfig,
        "qwen3_5_moe_text": transformers.Qwen3_5MoeTextConfig,
    }[family]
    return kind(**({"tie_word_embeddings": False} | _SHAPE | changes))


def make_family(
    folder: Path, case: str, *, seed: int = 0, dtype: str = "float32", **changes: Any
) -> Path:
    """Writes CASES[case] (with `changes`) to `folder` and returns it; no tokenizer.

    Every parameter is random.
    """
    import torch
    from transformers import AutoModelForCausalLM

    family, own = CASES[case]
    config = config_of(family, own | changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        _randomise(model, family)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def _randomise(model: Any, family: str) -> None:
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
                if family in HYBRIDS and "linear_attn" not in name:
                    parameter.sub_(1.0)  # the norm multiplies by 1 + weight
            elif "conv1d" in name:
                parameter.normal_(std=0.5)
            else:
                parameter.normal_(std=0.15)


WITH_VISION = {"qwen3_5": "Qwen3_5", "qwen3_5-tied-odd-vocabulary": "Qwen3_5"} | {
    "qwen3_5_moe": "Qwen3_5Moe"
}
"""Cases that transformers also defines beside a vision tower -> the start of its class names"""


def make_with_vision(folder: Path, case: str, *, all_experts: bool = False, **changes: Any) -> Path:
    """Writes CASES[case] (with `changes`) beside a vision tower, as Qwen3.5 is published, with a
    tensor of an MTP layer, which transformers does not load.

    Args:
        folder: the target.
        case: of WITH_VISION.
        all_experts: whether the experts of a layer are one tensor, as in published checkpoints;
            otherwise as transformers saves them.
    """
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    family, own = CASES[case]
    prefix = WITH_VISION[case]
    text = _SHAPE | own | changes
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": _SHAPE["hidden_size"],
        "num_position_embeddings": 16,
    }
    tied = own.get("tie_word_embeddings", False)
    kind = getattr(transformers, f"{prefix}Config")
    config = kind(text_config=text, vision_config=vision, tie_word_embeddings=tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
        _randomise(model, family)
    model.save_pretrained(folder, save_original_format=not all_experts)

    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["mtp.fc.weight"] = torch.arange(12.0).reshape(3, 4)
    save_file(tensors, file, {"format": "pt"})
    return folder
