"""The architecture of a checkpoint as one plain record, for transformers 4 and 5."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A mixture-of-experts MLP; every layer has one."""

    num_experts: int
    top_k: int
    expert_ffn_size: int
    norm_topk_prob: bool  # Divide the chosen experts' probabilities by their sum


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU; no bias but on qkv."""

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int  # Intermediate size of the dense MLP; unused where `moe` is set
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int  # Rows of the Hugging Face embedding, without Megatron's padding
    max_positions: int
    tied: bool  # The output layer is the embedding
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = field(hash=False)
    """None, or `rope_type` (`linear` or `llama3`) with its numbers."""
    norm_eps: float
    qk_norm: bool  # RMSNorm over head_dim on queries and keys, before the rotation
    qkv_bias: bool
    moe: MoeSpec | None
    head: Literal["tokens", "value"] = "tokens"  # Of the last layer: logits of the vocabulary, or a critic's value
    dtype: str  # As the config declares it: `float32`, `bfloat16` or `float16`

    def critic(self) -> "ModelSpec":
        """The architecture of a critic: a value in the place of the output layer."""
        return replace(self, head="value", tied=False)
