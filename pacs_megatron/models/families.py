"""The model families: the keys of config.json that each one reads or rejects, and the rows of one
layer.

config.json -> ModelSpec -> weight table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pacs_megatron.errors import ConversionError, shown
from pacs_megatron.models.config_reader import (
    MAX_EXPERTS,
    MAX_LAYERS,
    ConfigReader,
    ModelSpec,
    MoeSpec,
    wrong_value,
)
from pacs_megatron.models.hybrid import (
    DELTA_NET,
    GATED_QKV,
    SHARED_EXPERT_GATE,
    delta_in_proj,
    read_delta,
    read_rotary_dim,
)
from pacs_megatron.models.table import (
    CRITIC_CLASS,
    Concat,
    Qkv,
    WeightRow,
    WeightTable,
    build_table,
)
from pacs_megatron.runtime.json_reader import read_object

ATTENTION = (
    WeightRow(
        "input_layernorm.weight",
        ("input_layernorm.weight",),
        Concat(("hidden",)),
        saved_as="self_attention.linear_qkv.layer_norm_weight",
    ),
    WeightRow(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        Qkv(("hidden",)),
    ),
    WeightRow(
        "self_attention.linear_proj.weight",
        ("self_attn.o_proj.weight",),
        Concat(("hidden", "heads"), tp_dim=1),
    ),
)
QKV_BIAS = (
    WeightRow(
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
        Qkv(()),
    ),
)
QK_NORM = (
    WeightRow(
        "self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), Concat(("head_dim",))
    ),
    WeightRow(
        "self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), Concat(("head_dim",))
    ),
)
_MLP_NORM = WeightRow(
    "pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), Concat(("hidden",))
)


def _mlp(megatron: str, hf: str, ffn: str) -> tuple[WeightRow, WeightRow]:
    """The rows of a SwiGLU MLP.

    Args:
        megatron: Megatron's name of the module.
        hf: Name of the module in Hugging Face.
        ffn: Name of the intermediate dimension.
    """
    return (
        WeightRow(
            f"{megatron}.linear_fc1.weight",
            (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"),
            Concat((ffn, "hidden"), tp_dim=0, tp_parts=2),
        ),
        WeightRow(
            f"{megatron}.linear_fc2.weight",
            (f"{hf}.down_proj.weight",),
            Concat(("hidden", ffn), tp_dim=1),
        ),
    )


DENSE_MLP = (
    replace(_MLP_NORM, saved_as="mlp.linear_fc1.layer_norm_weight"),
    *_mlp("mlp", "mlp", "ffn"),
)
EXPERTS = (
    # No linear layer follows this norm, so Transformer Engine does not fuse it.
    _MLP_NORM,
    WeightRow("mlp.router.weight", ("mlp.gate.weight",), Concat(("experts", "hidden"))),
    *_mlp("mlp.experts.local_experts.{e}", "mlp.experts.{e}", "expert_ffn"),
)
SHARED_EXPERT = (
    *_mlp("mlp.shared_experts", "mlp.shared_expert", "shared_ffn"),
    SHARED_EXPERT_GATE,
)


def _qwen_window(config: ConfigReader) -> int | None:
    """With `use_sliding_window`, Qwen's layers from `max_window_layers` on have a window; with
    `layer_types`, those of that type.
    """
    if not config.boolean("use_sliding_window") or config.config.get("layer_types") is not None:
        return None
    first = config.count("max_window_layers")
    if first >= config.integer("num_hidden_layers", MAX_LAYERS):
        return None
    return config.optional_integer("sliding_window")


def _qwen_moe_window(config: ConfigReader) -> int | None:
    """With `use_sliding_window` all layers have a window; `max_window_layers` is not read."""
    if not config.boolean("use_sliding_window"):
        return None
    return config.optional_integer("sliding_window")


def _window(config: ConfigReader) -> int | None:
    """All layers of Mistral have the window.

    Llama has none, but transformers' cache and other programs read the key.
    """
    return config.optional_integer("sliding_window")


def _qwen_experts(config: ConfigReader) -> MoeSpec:
    """A softmax top-k mixture in every layer."""
    # transformers 5 reads both keys and keeps the older one when it saves.
    experts_key = "num_experts" if config.optional_integer("num_experts") else "num_local_experts"
    num_experts = config.integer(experts_key, MAX_EXPERTS)
    local_experts = config.optional_integer("num_local_experts")
    if local_experts not in (None, num_experts):
        raise wrong_value(
            "num_local_experts", local_experts, f"{num_experts} as num_experts; remove one of them"
        )
    moe = MoeSpec(
        num_experts=num_experts,
        top_k=config.integer("num_experts_per_tok"),
        expert_ffn_size=config.integer("moe_intermediate_size"),
        norm_topk_prob=config.boolean("norm_topk_prob"),
    )
    if moe.top_k > moe.num_experts:
        raise wrong_value(
            "num_experts_per_tok", moe.top_k, f"at most {experts_key}={moe.num_experts}"
        )
    return moe


def _qwen_next_experts(config: ConfigReader) -> MoeSpec:
    """The same with a shared expert."""
    config.integer("num_experts", MAX_EXPERTS)  # its other name is none of this family
    shared_ffn_size = config.integer("shared_expert_intermediate_size")
    return replace(_qwen_experts(config), shared_ffn_size=shared_ffn_size)


def _qwen35_experts(config: ConfigReader) -> MoeSpec:
    """The same; the probabilities of a token's experts always sum to 1."""
    return replace(_qwen_next_experts(config), norm_topk_prob=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One model family: the rows of one layer, and what its config.json has beside the keys of all
    families.
    """

    layer_rows: tuple[WeightRow, ...]
    window: Callable[[ConfigReader], int | None] = _window
    """the sliding window that some layer uses, in tokens; None: no layer uses one"""
    experts: Callable[[ConfigReader], MoeSpec] | None = None
    """None: the MLP is dense"""
    ffn_key: str = "intermediate_size"
    """the key of `ModelSpec.ffn_size`"""
    delta_rows: tuple[WeightRow, ...] = ()
    """the rows of a layer with a gated delta net; empty: the family has none"""


_HYBRID_ATTENTION = (ATTENTION[0], GATED_QKV, *ATTENTION[2:], *QK_NORM)
_NEXT_DELTA_NET = (delta_in_proj(grouped=True), *DELTA_NET)
_QWEN35_DELTA_NET = (delta_in_proj(grouped=False), *DELTA_NET)

FAMILIES = {
    # Qwen2 and Qwen2.5, DeepSeek-R1-Distill-Qwen
    "qwen2": Family(layer_rows=ATTENTION + QKV_BIAS + DENSE_MLP, window=_qwen_window),
    # 0.6B to 32B; head_dim apart from hidden / heads
    "qwen3": Family(layer_rows=ATTENTION + QK_NORM + DENSE_MLP, window=_qwen_window),
    # 30B-A3B and 235B-A22B
    "qwen3_moe": Family(
        layer_rows=ATTENTION + QK_NORM + EXPERTS,
        window=_qwen_moe_window,
        experts=_qwen_experts,
    ),
    # Llama 3.x, DeepSeek-R1-Distill-Llama
    "llama": Family(layer_rows=ATTENTION + DENSE_MLP),
    # 7B v0.2 and later, Nemo, Small: with full attention
    "mistral": Family(layer_rows=ATTENTION + DENSE_MLP),
    # Qwen3-Next-80B-A3B
    "qwen3_next": Family(
        layer_rows=_HYBRID_ATTENTION + EXPERTS + SHARED_EXPERT,
        delta_rows=_NEXT_DELTA_NET + EXPERTS + SHARED_EXPERT,
        experts=_qwen_next_experts,
    ),
    # The language models of Qwen3.5
    "qwen3_5_text": Family(
        layer_rows=_HYBRID_ATTENTION + DENSE_MLP,
        delta_rows=_QWEN35_DELTA_NET + DENSE_MLP,
    ),
    "qwen3_5_moe_text": Family(
        layer_rows=_HYBRID_ATTENTION + EXPERTS + SHARED_EXPERT,
        delta_rows=_QWEN35_DELTA_NET + EXPERTS + SHARED_EXPERT,
        experts=_qwen35_experts,
        # Its config class has no intermediate_size, and no layer has a dense MLP.
        ffn_key="moe_intermediate_size",
    ),
}
"""`model_type` of config.json -> family"""


def _read(family: Family, config: ConfigReader) -> ModelSpec:
    """Raises ConversionError for settings that are not implemented."""
    config.reject_unsupported(is_dense=family.experts is None)
    moe = None if family.experts is None else family.experts(config)

    is_hybrid = bool(family.delta_rows)
    delta = read_delta(config) if is_hybrid else None
    if not is_hybrid:
        config.layer_types("full_attention")

    hidden_size = config.integer("hidden_size")
    num_heads, num_kv_heads, head_dim = _heads(config, hidden_size)
    theta, scaling = config.rope()
    spec = ModelSpec(
        family=config.family,
        num_layers=config.integer("num_hidden_layers", MAX_LAYERS),
        hidden_size=hidden_size,
        ffn_size=config.integer(family.ffn_key),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config.integer("vocab_size"),
        max_positions=config.integer("max_position_embeddings"),
        tied=config.boolean("tie_word_embeddings"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=config.number("rms_norm_eps"),
        qk_norm=QK_NORM[0] in family.layer_rows,
        qkv_bias=QKV_BIAS[0] in family.layer_rows,
        moe=moe,
        delta=delta,
        rotary_dim=read_rotary_dim(config, head_dim) if is_hybrid else None,
        dtype=config.dtype(),
    )
    config.reject_window(family.window(config), spec.max_context)
    return spec


def _heads(config: ConfigReader, hidden_size: int) -> tuple[int, int, int]:
    """(query heads, key-value heads, size of a head)."""
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.optional_integer("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ConversionError(
            f"config.json: num_key_value_heads={num_kv_heads} does not divide {num_heads} heads"
        )

    head_dim = config.optional_integer("head_dim")
    if head_dim is None and hidden_size % num_heads:
        raise ConversionError(
            f"config.json: num_attention_heads={num_heads} does not divide "
            f"hidden_size={hidden_size}"
        )
    head_dim = head_dim or hidden_size // num_heads
    if head_dim % 2:
        raise wrong_value("head_dim", head_dim, "an even number (rotary positions turn pairs)")
    return num_heads, num_kv_heads, head_dim


_WITH_VISION = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
"""`model_type` of a config that has the language model's in `text_config` -> family"""
_WITH_VISION_CLASS = "ForConditionalGeneration"
VISION_PREFIX = "model.language_model."
"""of the language model's tensors beside a vision tower, in the place of `model.`"""


def language_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model, which a config with a vision tower has in `text_config`.

    Raises:
        ConversionError: `text_config` is malformed, or contradicts the config around it.
    """
    model_type = hf_config.get("model_type")
    family = _WITH_VISION.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        return hf_config
    text = hf_config.get("text_config")
    if not isinstance(text, Mapping):
        raise wrong_value("text_config", text, "an object, the config of the language model")
    if text.get("model_type", family) != family:
        raise wrong_value("model_type in text_config", text["model_type"], repr(family))

    inherited = {}
    for key in ("tie_word_embeddings", "dtype", "torch_dtype"):
        outer = hf_config.get(key)
        inner = text.get(key)
        if outer is not None and inner is not None and inner != outer:
            raise wrong_value(key, outer, f"{shown(inner)} as in text_config; correct one")
        if outer is not None:
            inherited[key] = outer

    classes = []
    if hf_config.get("architectures"):
        classes = _language_classes(hf_config["architectures"])
    return {**text, **inherited, "model_type": family, "architectures": classes}


def _language_classes(architectures: Any) -> list[str]:
    """The language model's class for the class of a model with a vision tower."""
    if not isinstance(architectures, list):
        raise wrong_value("architectures", architectures, "a list of class names")
    return [str(name).replace(_WITH_VISION_CLASS, "ForCausalLM") for name in architectures]


def read_spec(hf_config: Mapping[str, Any]) -> ModelSpec:
    """The architecture that a config.json of transformers 4 or 5 declares. With a vision tower
    beside the language model, that of the language model.

    Raises:
        ConversionError: An unsupported family or feature, a missing key, or a wrong type.
    """
    text = language_config(hf_config)
    if text is not hf_config:
        return replace(read_spec(text), hf_prefix=VISION_PREFIX)
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConversionError(
            f"config.json: model_type={str(model_type)[:60]!r} is not supported; supported: "
            f"{', '.join([*FAMILIES, *_WITH_VISION])} (see docs/families.md to add a family)"
        )
    spec = _read(FAMILIES[model_type], ConfigReader(hf_config, model_type))

    architectures = hf_config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        return spec
    # Servers choose the model by this class, so it must be one of the family's.
    class_name = str(architectures[0])
    prefix = model_type.removesuffix("_text").replace("_", "")
    for suffix in ("ForCausalLM", CRITIC_CLASS):
        if class_name.replace("_", "").lower() == f"{prefix}{suffix}".lower():
            return spec.critic() if suffix == CRITIC_CLASS else spec
    raise wrong_value(
        "architectures",
        architectures,
        f"a language model or a critic of model_type={model_type} (ForCausalLM or {CRITIC_CLASS})",
    )


def load_config(path: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder.

    Raises ConversionError if it is missing or not a JSON object.
    """
    file = Path(path) / "config.json"
    if not file.exists():
        raise ConversionError(f"{file} is missing; give the folder of a Hugging Face checkpoint")
    return read_object(file, error=ConversionError)


def load_spec(path: str | Path) -> ModelSpec:
    """`read_spec` of the config.json in a Hugging Face folder."""
    return read_spec(load_config(path))


def weight_table(spec: ModelSpec) -> WeightTable:
    """The two-way table of every weight of this model."""
    family = FAMILIES[spec.family]
    has_delta_net = (False,) * spec.num_layers
    if spec.delta is not None:
        has_delta_net = spec.delta.layers
    rows = [family.delta_rows if delta else family.layer_rows for delta in has_delta_net]
    return build_table(spec, rows)
