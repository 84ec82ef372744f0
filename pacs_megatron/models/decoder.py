"""Shared by all families: the rows of attention, dense MLP and experts, and the common config keys."""

from pacs_megatron.errors import ConversionError
from pacs_megatron.models.config_reader import MAX_LAYERS, ConfigReader, wrong_value
from pacs_megatron.models.spec import ModelSpec, MoeSpec
from pacs_megatron.models.table import Row
from pacs_megatron.models.transforms import Qkv, Rows

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")

ATTENTION = (
    Row("input_layernorm.weight", ("input_layernorm.weight",), Rows(("hidden",))),
    Row("self_attention.linear_qkv.weight", tuple(f"{n}.weight" for n in _QKV), Qkv(("hidden",))),
    Row("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), Rows(("hidden", "heads"), tp_dim=1)),
)
QKV_BIAS = (Row("self_attention.linear_qkv.bias", tuple(f"{n}.bias" for n in _QKV), Qkv(())),)
QK_NORM = (
    Row("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), Rows(("head_dim",))),
    Row("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), Rows(("head_dim",))),
)
MLP_NORM = (Row("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), Rows(("hidden",))),)
DENSE_MLP = (
    Row(
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        Rows(("ffn", "hidden"), tp_dim=0, tp_parts=2),
    ),
    Row("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), Rows(("hidden", "ffn"), tp_dim=1)),
)
EXPERTS = (
    Row("mlp.router.weight", ("mlp.gate.weight",), Rows(("experts", "hidden"))),
    Row(
        "mlp.experts.local_experts.{e}.linear_fc1.weight",
        ("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"),
        Rows(("expert_ffn", "hidden"), tp_dim=0, tp_parts=2),
    ),
    Row(
        "mlp.experts.local_experts.{e}.linear_fc2.weight",
        ("mlp.experts.{e}.down_proj.weight",),
        Rows(("hidden", "expert_ffn"), tp_dim=1),
    ),
)


def read_decoder(
    config: ConfigReader, *, qk_norm: bool = False, qkv_bias: bool = False, moe: MoeSpec | None = None
) -> ModelSpec:
    """Reads the keys that all families have in common. Raises ConversionError for settings that are not implemented."""
    config.refuse("hidden_act", unless=("silu",), reason="the MLP is SwiGLU")
    config.refuse("quantization_config", unless=(), reason="weights must be plain; dequantise the checkpoint first")
    config.refuse("partial_rotary_factor", unless=(1, 1.0), reason="positions rotate the whole head")
    config.refuse("mlp_bias", unless=(False,), reason="the MLP has no bias")
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    num_kv_heads = config.optional_integer("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ConversionError(f"config.json: num_key_value_heads={num_kv_heads} does not divide {num_heads} heads")
    head_dim = config.optional_integer("head_dim")
    if head_dim is None and hidden_size % num_heads:
        raise ConversionError(f"config.json: num_attention_heads={num_heads} does not divide hidden_size={hidden_size}")
    head_dim = head_dim or hidden_size // num_heads
    if head_dim % 2:
        raise wrong_value("head_dim", head_dim, "an even number (rotary positions turn pairs)")
    theta, scaling = config.rope()
    return ModelSpec(
        family=config.family,
        num_layers=config.integer("num_hidden_layers", MAX_LAYERS),
        hidden_size=hidden_size,
        ffn_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        max_positions=config.integer("max_position_embeddings"),
        tied=config.boolean("tie_word_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=config.number("rms_norm_eps"),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        moe=moe,
        dtype=config.dtype(),
    )
