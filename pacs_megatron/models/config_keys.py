"""The keys of config.json, in three tables: used, rejected unless neutral, without effect.

Every field of a supported family's config class in transformers, and every key that its model code
reads, is in one of them (`tests/unit/models/test_config_keys.py` compares them with the installed
version). transformers ignores other keys, and so does this program.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

USED: Mapping[str, str] = {
    "model_type": "the family",
    "architectures": "language model or critic",
    "vocab_size": "rows of the embedding and of the output layer",
    "hidden_size": "width of the residual stream",
    "intermediate_size": "width of a dense MLP",
    "num_hidden_layers": "layers",
    "num_attention_heads": "query heads",
    "num_key_value_heads": "key and value heads",
    "head_dim": "size of a head",
    "max_position_embeddings": "limit of a sequence's length",
    "rms_norm_eps": "constant of the norms",
    "tie_word_embeddings": "whether the output layer is the embedding",
    "rope_parameters": "frequencies of the rotary positions (transformers 5)",
    "rope_theta": "base of these frequencies (transformers 4)",
    "rope_scaling": "scaling of these frequencies (transformers 4)",
    "dtype": "type of the weights (transformers 5)",
    "torch_dtype": "type of the weights (transformers 4)",
    "sliding_window": "rejected where a layer would use it",
    "use_sliding_window": "whether layers use it (Qwen)",
    "max_window_layers": "first layer that uses it (Qwen2, Qwen3)",
    "layer_types": "attention of each layer; rejected unless full",
    "num_experts": "experts of a layer (Qwen3-MoE)",
    "num_local_experts": "another name of num_experts, in transformers 5",
    "num_experts_per_tok": "experts of a token",
    "moe_intermediate_size": "width of an expert",
    "norm_topk_prob": "whether the probabilities of a token's experts are divided by their sum",
}
"""Key -> what it decides. The reader has each of them in the ModelSpec, or rejects its value."""

_USED_IN_HYBRIDS: Mapping[str, str] = {
    "full_attention_interval": "every such layer has attention, where layer_types is missing",
    "linear_conv_kernel_dim": "tokens that the convolution of a delta net reads",
    "linear_key_head_dim": "size of its key heads",
    "linear_value_head_dim": "size of its value heads",
    "linear_num_key_heads": "its heads of queries and keys",
    "linear_num_value_heads": "its value heads",
    "partial_rotary_factor": "part of a head that positions rotate",
}
_SHARED_EXPERT = {"shared_expert_intermediate_size": "width of the shared expert"}
USED_IN: Mapping[str, Mapping[str, str]] = {
    "qwen3_next": {**_USED_IN_HYBRIDS, **_SHARED_EXPERT},
    "qwen3_5_text": _USED_IN_HYBRIDS,
    "qwen3_5_moe_text": {**_USED_IN_HYBRIDS, **_SHARED_EXPERT},
}
"""Family -> keys that are used in this family only"""


class Rejected(NamedTuple):
    """A key whose value must be one of `unless`, null or missing."""

    unless: tuple[Any, ...]
    reason: str


_PLAIN_WEIGHTS = "weights must be plain; dequantise the checkpoint first"
_DENSE = "the MLP is dense"
_EVERY_LAYER = "every layer has experts"
_PLAIN_LOGITS = "logits are the product of the final norm and the output layer"
_PLAIN_ATTENTION = "attention divides by the square root of head_dim and has no cap"
_PLAIN_SUM = "the residual stream is a plain sum"
_PLAIN_ROUTER = "the router is a softmax over all experts and takes the largest"
_ONE_ATTENTION = "every layer has the same full, causal attention"
_ONE_PLACE = "positions rotate the whole head, in halves"
_GATED = "the attention of a hybrid has a gate at its output"

REJECTED: Mapping[str, Rejected] = {
    # Fields of the config classes, and keys that transformers reads from any config.
    "hidden_act": Rejected(("silu",), "the MLP is SwiGLU"),
    "attention_bias": Rejected((False,), "attention has no bias"),
    "mlp_bias": Rejected((False,), "the MLP has no bias"),
    "attention_dropout": Rejected((0,), "policy and sampler compute without dropout"),
    "partial_rotary_factor": Rejected((1,), _ONE_PLACE),
    "quantization_config": Rejected((), _PLAIN_WEIGHTS),
    "compression_config": Rejected((), _PLAIN_WEIGHTS),
    "quantization": Rejected((), _PLAIN_WEIGHTS),
    "decoder_sparse_step": Rejected((1,), _EVERY_LAYER),
    "mlp_only_layers": Rejected(([],), _EVERY_LAYER),
    "is_encoder_decoder": Rejected((False,), "the model is a decoder"),
    "is_causal": Rejected((True,), _ONE_ATTENTION),
    "attention_chunk_size": Rejected((), _ONE_ATTENTION),
    "num_kv_shared_layers": Rejected((0,), "every layer has keys and values of its own"),
    "per_layer_config": Rejected(({},), "all layers are alike"),
    "transformers_weights": Rejected((), "the weights are model.safetensors or its shards"),
    "fusion_config": Rejected((), "transformers would replace parts of the model"),
    "token_classification_bias": Rejected((True,), "a critic's output layer has a bias"),
    # Keys of other architectures, or that only servers read: a family's class in transformers
    # ignores them, but the weights were trained with them.
    "bias": Rejected((False,), "attention has no bias"),
    "logit_scale": Rejected((1,), _PLAIN_LOGITS),
    "logits_scaling": Rejected((1,), _PLAIN_LOGITS),
    "final_logit_softcapping": Rejected((), _PLAIN_LOGITS),
    "attn_logit_softcapping": Rejected((), _PLAIN_ATTENTION),
    "attention_multiplier": Rejected((), _PLAIN_ATTENTION),
    "query_pre_attn_scalar": Rejected((), _PLAIN_ATTENTION),
    "attn_temperature_tuning": Rejected((False,), _PLAIN_ATTENTION),
    "embedding_multiplier": Rejected((1,), _PLAIN_SUM),
    "residual_multiplier": Rejected((1,), _PLAIN_SUM),
    "scale_emb": Rejected((1,), _PLAIN_SUM),
    "scale_depth": Rejected((), _PLAIN_SUM),
    "no_rope_layers": Rejected(([],), "every layer rotates"),
    "rope_is_neox_style": Rejected((True,), _ONE_PLACE),
    "rope_interleave": Rejected((False,), _ONE_PLACE),
    "rotary_pct": Rejected((1,), _ONE_PLACE),
    "shared_expert_intermediate_size": Rejected((0,), "there are no shared experts"),
    "n_shared_experts": Rejected((0,), "there are no shared experts"),
    "n_routed_experts": Rejected((), "the key of Qwen3-MoE is num_experts"),
    "first_k_dense_replace": Rejected((0,), _EVERY_LAYER),
    "moe_layer_freq": Rejected((1,), _EVERY_LAYER),
    "n_group": Rejected((1,), _PLAIN_ROUTER),
    "topk_group": Rejected((1,), _PLAIN_ROUTER),
    "topk_method": Rejected(("greedy",), _PLAIN_ROUTER),
    "scoring_func": Rejected(("softmax",), _PLAIN_ROUTER),
    "routed_scaling_factor": Rejected((1,), _PLAIN_ROUTER),
}
"""Key -> its neutral values; the policy does not implement others."""

_REJECTED_IF_DENSE = {key: Rejected((0, 1), _DENSE) for key in ("num_experts", "num_local_experts")}

WITHOUT_EFFECT: Mapping[str, str] = {
    "initializer_range": "of weights that are drawn; these are loaded",
    "use_cache": "speed of transformers' generation",
    "pad_token_id": "the row of the embedding is used like others",
    "bos_token_id": "the chat template writes it",
    "eos_token_id": "ends a response (data/tokenizer.py); no part of the forward pass",
    "pretraining_tp": "splits a product in transformers 4; 5 does not read it",
    "output_router_logits": "adds an output, and a loss that transformers computes",
    "router_aux_loss_coef": "weight of that loss; the objectives have none",
    "output_hidden_states": "adds outputs",
    "output_attentions": "adds outputs",
    "return_dict": "type of the outputs",
    "chunk_size_feed_forward": "not read by these families",
    "gradient_checkpointing": "memory of transformers' training",
    "attn_implementation": "kernel of transformers; the policy has its own",
    "experts_implementation": "kernel of transformers; the policy has its own",
    "distributed_config": "placement of transformers' weights",
    "id2label": "names; a critic's output layer has one row, which its weights must have",
    "label2id": "names",
    "num_labels": "number of these names",
    "problem_type": "loss of a classifier in transformers",
    "classifier_dropout": "a critic is trained without dropout",
    "hidden_dropout": "a critic is trained without dropout",
    "name_or_path": "where the config was read",
    "transformers_version": "what wrote the config",
}
"""Key -> the reason why the forward pass does not depend on it"""

_WITHOUT_EFFECT_IN: Mapping[str, Mapping[str, str]] = {
    "qwen2": {"attention_bias": "q, k and v always have a bias, the output never"},
}
"""Family -> keys without effect in this family only"""

_REJECTED_IN: Mapping[str, Mapping[str, Rejected]] = {
    "mistral": {
        "layer_types": Rejected((), "transformers takes a config with it for Ministral"),
    },
    # Servers read the first key; transformers reads neither.
    "qwen3_next": {"attn_output_gate": Rejected((True,), _GATED)},
    "qwen3_5_text": {"attn_output_gate": Rejected((True,), _GATED)},
    "qwen3_5_moe_text": {
        "attn_output_gate": Rejected((True,), _GATED),
        "norm_topk_prob": Rejected((True,), "the probabilities of a token's experts sum to 1"),
    },
}
"""Family -> keys that are rejected in this family only"""

_HYBRID_DEFAULTS: Mapping[str, Any] = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen2": {
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3": {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "norm_topk_prob": False,
    },
    "llama": {"num_key_value_heads": None, "head_dim": None},
    "mistral": {"num_key_value_heads": 8, "head_dim": None, "sliding_window": 4096},
    "qwen3_next": {**_HYBRID_DEFAULTS, "num_key_value_heads": 2, "norm_topk_prob": True},
    "qwen3_5_text": {**_HYBRID_DEFAULTS, "num_key_value_heads": 4},
    "qwen3_5_moe_text": {**_HYBRID_DEFAULTS, "num_key_value_heads": 2},
}
"""Family -> transformers' value of a missing key. Other keys of `USED` that decide a number must be
present, or have the same default in all families (`ConfigReader`).
"""

ROPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""`rope_type` of rope_parameters -> its keys beside rope_type and rope_theta; other types and other
keys are rejected.
"""
OPTIONAL_ROPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
"""`rope_type` -> keys that may be missing. `attention_factor` is rejected, because servers do not
read it.
"""
NEUTRAL_ROPE_KEYS: Mapping[str, Any] = {"partial_rotary_factor": 1}
"""Key of rope_parameters that every type may have -> its only value"""
_ROPE_KEYS_IN_HYBRIDS: Mapping[str, str] = {
    "partial_rotary_factor": "part of a head that positions rotate",
    "mrope_section": "none for text: its three positions are equal",
    "mrope_interleaved": "none for text: its three positions are equal",
}
ROPE_KEYS_IN: Mapping[str, Mapping[str, str]] = dict.fromkeys(USED_IN, _ROPE_KEYS_IN_HYBRIDS)
"""Family -> keys of rope_parameters of every type, with their effect"""


def rejected_keys(family: str, *, is_dense: bool) -> dict[str, Rejected]:
    """The keys that this family rejects, with their neutral values."""
    rejected = {**REJECTED, **_REJECTED_IN.get(family, {})}
    if is_dense:
        rejected |= _REJECTED_IF_DENSE
    for key in (*_WITHOUT_EFFECT_IN.get(family, ()), *USED_IN.get(family, ())):
        rejected.pop(key, None)
    return rejected


def keys_without_effect(family: str) -> dict[str, str]:
    """The keys without effect in this family, with the reason."""
    return {**WITHOUT_EFFECT, **_WITHOUT_EFFECT_IN.get(family, {})}
