"""Llama 3.x (and DeepSeek-R1-Distill-Llama): no norms on heads, no biases, `llama3` rope scaling."""

from collections.abc import Sequence

from pacs_megatron.models.config_reader import ConfigReader
from pacs_megatron.models.decoder import ATTENTION, DENSE_MLP, MLP_NORM, read_decoder
from pacs_megatron.models.spec import ModelSpec
from pacs_megatron.models.table import Family, Row


def _read(config: ConfigReader) -> ModelSpec:
    config.refuse("attention_bias", unless=(False,), reason="attention has no bias")
    return read_decoder(config)


def _layer_rows(spec: ModelSpec) -> Sequence[Row]:
    return ATTENTION + MLP_NORM + DENSE_MLP


FAMILY = Family(name="llama", model_types=("llama",), read=_read, layer_rows=_layer_rows)
