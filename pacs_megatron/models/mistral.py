"""Mistral with full attention (7B v0.2 and later, Nemo, Small): Llama's rows, another rule for sliding windows."""

from collections.abc import Sequence

from pacs_megatron.models.config_reader import ConfigReader
from pacs_megatron.models.decoder import ATTENTION, DENSE_MLP, MLP_NORM, read_decoder
from pacs_megatron.models.spec import ModelSpec
from pacs_megatron.models.table import Family, Row


def _read(config: ConfigReader) -> ModelSpec:
    window = config.optional_integer("sliding_window")
    config.refuse_sliding_window(window is not None and window < config.integer("max_position_embeddings"))
    return read_decoder(config)


def _layer_rows(spec: ModelSpec) -> Sequence[Row]:
    return ATTENTION + MLP_NORM + DENSE_MLP


FAMILY = Family(name="mistral", model_types=("mistral",), read=_read, layer_rows=_layer_rows)
