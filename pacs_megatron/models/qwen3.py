"""Qwen3 dense, 0.6B to 32B: a norm on each query and key head, head_dim apart from hidden / heads, no bias."""

from collections.abc import Sequence

from pacs_megatron.models.config_reader import ConfigReader
from pacs_megatron.models.decoder import ATTENTION, DENSE_MLP, MLP_NORM, QK_NORM, qwen_window_in_use, read_decoder
from pacs_megatron.models.spec import ModelSpec
from pacs_megatron.models.table import Family, Row


def _read(config: ConfigReader) -> ModelSpec:
    config.refuse_sliding_window(qwen_window_in_use(config))
    config.refuse("attention_bias", unless=(False,), reason="attention has no bias")
    return read_decoder(config, qk_norm=True)


def _layer_rows(spec: ModelSpec) -> Sequence[Row]:
    return ATTENTION + QK_NORM + MLP_NORM + DENSE_MLP


FAMILY = Family(name="qwen3", model_types=("qwen3",), read=_read, layer_rows=_layer_rows)
