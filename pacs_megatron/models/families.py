"""The model families: the keys of config.json that each one reads or rejects, and the rows of one layer.

config.json -> ModelSpec -> weight table.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pacs_megatron.errors import ConversionError
from pacs_megatron.models.config_reader import MAX_EXPERTS, MAX_LAYERS, ConfigReader, wrong_value
from pacs_megatron.models.decoder import ATTENTION, DENSE_MLP, EXPERTS, MLP_NORM, QK_NORM, QKV_BIAS, read_decoder
from pacs_megatron.models.spec import ModelSpec, MoeSpec
from pacs_megatron.models.table import CRITIC_CLASS, Family, WeightTable, build_table
from pacs_megatron.runtime.json_reader import read_object


def _refuse_attention_bias(config: ConfigReader) -> None:
    config.refuse("attention_bias", unless=(False,), reason="attention has no bias")


def _refuse_qwen_window(config: ConfigReader) -> None:
    """With `use_sliding_window`, Qwen's layers from `max_window_layers` on have a window."""
    is_used = config.boolean("use_sliding_window")
    first = config.optional_integer("max_window_layers") if is_used else None
    is_used = is_used and (first is None or first < config.integer("num_hidden_layers", MAX_LAYERS))
    config.refuse_sliding_window(is_used)


def _qwen2(config: ConfigReader) -> ModelSpec:
    """Qwen2 and Qwen2.5 (and DeepSeek-R1-Distill-Qwen): a bias on q, k and v."""
    _refuse_qwen_window(config)
    return read_decoder(config, qkv_bias=True)


def _qwen3(config: ConfigReader) -> ModelSpec:
    """Qwen3 dense, 0.6B to 32B: a norm on each query and key head, head_dim apart from hidden / heads, no bias."""
    _refuse_qwen_window(config)
    _refuse_attention_bias(config)
    return read_decoder(config, qk_norm=True)


def _qwen3_moe(config: ConfigReader) -> ModelSpec:
    """Qwen3-MoE, 30B-A3B and 235B-A22B: Qwen3's attention, every MLP a softmax top-k mixture without shared experts."""
    _refuse_qwen_window(config)
    _refuse_attention_bias(config)
    config.refuse("decoder_sparse_step", unless=(1,), reason="every layer has experts")
    config.refuse("mlp_only_layers", unless=([],), reason="every layer has experts")
    # transformers 5 reads both keys and keeps the older one when it saves.
    experts_key = "num_experts" if config.optional_integer("num_experts") else "num_local_experts"
    moe = MoeSpec(
        num_experts=config.integer(experts_key, MAX_EXPERTS),
        top_k=config.integer("num_experts_per_tok"),
        expert_ffn_size=config.integer("moe_intermediate_size"),
        norm_topk_prob=config.boolean("norm_topk_prob"),
    )
    if moe.top_k > moe.num_experts:
        raise wrong_value("num_experts_per_tok", moe.top_k, f"at most {experts_key}={moe.num_experts}")
    return read_decoder(config, qk_norm=True, moe=moe)


def _llama(config: ConfigReader) -> ModelSpec:
    """Llama 3.x (and DeepSeek-R1-Distill-Llama): no norms on heads, no biases, `llama3` rope scaling."""
    _refuse_attention_bias(config)
    return read_decoder(config)


def _mistral(config: ConfigReader) -> ModelSpec:
    """Mistral with full attention (7B v0.2 and later, Nemo, Small): Llama's rows, another rule for sliding windows."""
    window = config.optional_integer("sliding_window")
    config.refuse_sliding_window(window is not None and window < config.integer("max_position_embeddings"))
    return read_decoder(config)


FAMILIES = (
    Family(name="qwen2", read=_qwen2, layer_rows=ATTENTION + QKV_BIAS + MLP_NORM + DENSE_MLP),
    Family(name="qwen3", read=_qwen3, layer_rows=ATTENTION + QK_NORM + MLP_NORM + DENSE_MLP),
    Family(name="qwen3_moe", read=_qwen3_moe, layer_rows=ATTENTION + QK_NORM + MLP_NORM + EXPERTS),
    Family(name="llama", read=_llama, layer_rows=ATTENTION + MLP_NORM + DENSE_MLP),
    Family(name="mistral", read=_mistral, layer_rows=ATTENTION + MLP_NORM + DENSE_MLP),
)

VOCAB_MULTIPLE = 128
"""Megatron's vocabulary is padded to a multiple of this at every tensor-parallel size, so that checkpoints reshard."""

_BY_NAME = {family.name: family for family in FAMILIES}


def read_spec(hf_config: Mapping[str, Any]) -> ModelSpec:
    """The architecture that a config.json of transformers 4 or 5 declares.

    Raises ConversionError for an unsupported family or feature, a missing key or a wrong type.
    """
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _BY_NAME:
        raise ConversionError(
            f"config.json: model_type={str(model_type)[:60]!r} is not supported; supported: {', '.join(_BY_NAME)} "
            "(see docs/families.md to add a family)"
        )
    spec = _BY_NAME[model_type].read(ConfigReader(hf_config, model_type))
    architectures = hf_config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if name and not name.lower().startswith(f"{model_type.replace('_', '')}for"):  # servers choose the model by it
        raise wrong_value("architectures", architectures, f"a class of model_type={model_type}")
    return spec.critic() if name.endswith(CRITIC_CLASS) else spec


def load_config(path: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder. Raises ConversionError if it is missing or not a JSON object."""
    file = Path(path) / "config.json"
    if not file.exists():
        raise ConversionError(f"{file} is missing; give the folder of a Hugging Face checkpoint")
    return read_object(file, error=ConversionError)


def load_spec(path: str | Path) -> ModelSpec:
    """`read_spec` of the config.json in a Hugging Face folder."""
    return read_spec(load_config(path))


def weight_table(spec: ModelSpec) -> WeightTable:
    """The two-way table of every weight of this model."""
    return build_table(_BY_NAME[spec.family], spec, VOCAB_MULTIPLE)
