"""Qwen3-MoE, 30B-A3B and 235B-A22B: Qwen3's attention, every MLP a softmax top-k mixture without shared experts."""

from collections.abc import Sequence

from pacs_megatron.models.config_reader import MAX_EXPERTS, ConfigReader, wrong_value
from pacs_megatron.models.decoder import ATTENTION, EXPERTS, MLP_NORM, QK_NORM, qwen_window_in_use, read_decoder
from pacs_megatron.models.spec import ModelSpec, MoeSpec
from pacs_megatron.models.table import Family, Row


def _read(config: ConfigReader) -> ModelSpec:
    config.refuse_sliding_window(qwen_window_in_use(config))
    config.refuse("attention_bias", unless=(False,), reason="attention has no bias")
    config.refuse("decoder_sparse_step", unless=(1,), reason="every layer has experts")
    config.refuse("mlp_only_layers", unless=([],), reason="every layer has experts")
    # transformers 5 reads both keys and keeps the older one when it saves.
    experts_key = "num_experts" if config.optional_integer("num_experts") else "num_local_experts"
    moe = MoeSpec(
        num_experts=config.integer(experts_key, MAX_EXPERTS),
        top_k=config.integer("num_experts_per_tok"),
        expert_ffn_size=config.integer("moe_intermediate_size"),
        norm_topk_prob=config.boolean("norm_topk_prob", missing=False),
    )
    if moe.top_k > moe.num_experts:
        raise wrong_value("num_experts_per_tok", moe.top_k, f"at most {experts_key}={moe.num_experts}")
    return read_decoder(config, qk_norm=True, moe=moe)


def _layer_rows(spec: ModelSpec) -> Sequence[Row]:
    return ATTENTION + QK_NORM + MLP_NORM + EXPERTS


FAMILY = Family(name="qwen3_moe", model_types=("qwen3_moe",), read=_read, layer_rows=_layer_rows)
