"""Architectures of published models by hub id, so that `plan` needs neither the checkpoint nor a
network.

The values are those of each repository's config.json that are not transformers' defaults.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pacs_megatron.config.text import local_path
from pacs_megatron.errors import ConfigError
from pacs_megatron.models import ModelSpec, language_config, load_config, read_spec
from pacs_megatron.models.hub import config_folder


def _qwen(hidden: int, layers: int, heads: int, ffn: int, *, tied: bool) -> Mapping[str, Any]:
    """The values that Qwen2.5 and Qwen3 have in common, or that Qwen3 has."""
    return {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": ffn,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": tied,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
    }


def _qwen3(hidden: int, layers: int, heads: int, ffn: int, *, tied: bool) -> Mapping[str, Any]:
    return {**_qwen(hidden, layers, heads, ffn, tied=tied), "head_dim": 128}


_QWEN3_30B_A3B: Mapping[str, Any] = {
    **_qwen3(2048, 48, 32, 6144, tied=False),
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
_QWEN25_7B: Mapping[str, Any] = {
    **_qwen(3584, 28, 28, 18944, tied=False),
    "model_type": "qwen2",
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
}
_QWEN25_72B: Mapping[str, Any] = {
    **_qwen(8192, 80, 64, 29568, tied=False),
    "model_type": "qwen2",
    "vocab_size": 152064,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}
_QWEN25_3B: Mapping[str, Any] = {
    **_qwen(2048, 36, 16, 11008, tied=True),
    "model_type": "qwen2",
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
}


def _qwen35(hidden: int, layers: int, heads: int, ffn: int, value_heads: int) -> Mapping[str, Any]:
    """The language model of a dense Qwen3.5."""
    return {
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "full_attention_interval": 4,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "intermediate_size": ffn,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
        "rms_norm_eps": 1e-6,
        "dtype": "bfloat16",
    }


_QWEN35_35B_A3B: Mapping[str, Any] = {
    **_qwen35(2048, 40, 16, 512, 32),
    "model_type": "qwen3_5_moe_text",
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}

KNOWN_MODELS: Mapping[str, Mapping[str, Any]] = {
    "Qwen/Qwen3-0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 28, 16, 6144, tied=True),
    "Qwen/Qwen3-4B": _qwen3(2560, 36, 32, 9728, tied=True),
    "Qwen/Qwen3-8B": _qwen3(4096, 36, 32, 12288, tied=False),
    "Qwen/Qwen3-14B": _qwen3(5120, 40, 40, 17408, tied=False),
    "Qwen/Qwen3-32B": _qwen3(5120, 64, 64, 25600, tied=False),
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B_A3B,
    "Qwen/Qwen3.5-9B": _qwen35(4096, 32, 16, 12288, 32),
    "Qwen/Qwen3.5-27B": _qwen35(5120, 64, 24, 17408, 48),
    "Qwen/Qwen3.5-35B-A3B": _QWEN35_35B_A3B,
    "Qwen/Qwen2.5-3B": _QWEN25_3B,
    "Qwen/Qwen2.5-7B": _QWEN25_7B,
    "Qwen/Qwen2.5-72B": _QWEN25_72B,
}
QUICKSTART_MODEL: Mapping[str, Any] = {
    **_qwen3(128, 2, 4, 256, tied=True),
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 384,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}
"""Architecture of examples/quickstart's model, for `plan` before the quickstart ran (a test
compares the two).
"""
QUICKSTART_HYBRID: Mapping[str, Any] = {
    **_qwen35(64, 2, 4, 128, 4),
    "full_attention_interval": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "vocab_size": 384,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "float32",
}
"""The same of examples/quickstart/hybrid.py"""
_QUICKSTART_FOLDERS: Mapping[str, Mapping[str, Any]] = {
    "quickstart-inputs/model": QUICKSTART_MODEL,
    "quickstart-warmstart/hf": QUICKSTART_MODEL,
    "quickstart-hybrid-inputs/model": QUICKSTART_HYBRID,
}


def find_config(model_path: str) -> Mapping[str, Any] | None:
    """config.json of a local folder, a converted checkpoint, a known hub id or the quickstart; else
    None. With a vision tower, that of the language model.

    Raises ConversionError if a folder's config.json cannot be read.
    """
    folder = config_folder(local_path(model_path))
    if (folder / "config.json").is_file():
        return language_config(load_config(folder))

    # A local path may end in a hub id: models/Qwen/Qwen3-14B.
    name = model_path
    if name not in KNOWN_MODELS:
        name = "/".join(Path(model_path).parts[-2:])
    if name in _QUICKSTART_FOLDERS:
        return _QUICKSTART_FOLDERS[name]
    return KNOWN_MODELS.get(name)


def find_spec(model_path: str) -> ModelSpec | None:
    """The architecture of `find_config`. Raises ConversionError if it cannot be used."""
    config = find_config(model_path)
    return None if config is None else read_spec(config)


def need_config(model_path: str, where: str) -> Mapping[str, Any]:
    """`find_config`; raises ConfigError for an unknown architecture."""
    config = find_config(model_path)
    if config is None:
        raise ConfigError(
            f"model.path={model_path}: no folder with a config.json, and none of "
            f"{', '.join(KNOWN_MODELS)}; run `pacs-megatron fetch` on a machine with network first "
            f"({where})"
        )
    return config
