"""Model families: a checkpoint's config as a ModelSpec, and one two-way table of weight names. Does not import torch."""

from pacs_megatron.models.families import VOCAB_MULTIPLE, load_config, load_spec, read_spec, weight_table
from pacs_megatron.models.spec import ModelSpec, MoeSpec
from pacs_megatron.models.table import TE_LAYER_NAMES, Entry, WeightTable, canonical_name

__all__ = [
    "TE_LAYER_NAMES",
    "VOCAB_MULTIPLE",
    "Entry",
    "ModelSpec",
    "MoeSpec",
    "WeightTable",
    "canonical_name",
    "load_config",
    "load_spec",
    "read_spec",
    "weight_table",
]
