"""Qwen2 and Qwen2.5 (and DeepSeek-R1-Distill-Qwen): a bias on q, k and v."""

from collections.abc import Sequence

from pacs_megatron.models.config_reader import ConfigReader
from pacs_megatron.models.decoder import ATTENTION, DENSE_MLP, MLP_NORM, QKV_BIAS, qwen_window_in_use, read_decoder
from pacs_megatron.models.spec import ModelSpec
from pacs_megatron.models.table import Family, Row


def _read(config: ConfigReader) -> ModelSpec:
    config.refuse_sliding_window(qwen_window_in_use(config))
    return read_decoder(config, qkv_bias=True)


def _layer_rows(spec: ModelSpec) -> Sequence[Row]:
    return ATTENTION + QKV_BIAS + MLP_NORM + DENSE_MLP


FAMILY = Family(name="qwen2", model_types=("qwen2",), read=_read, layer_rows=_layer_rows)
