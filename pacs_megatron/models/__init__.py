"""Model families: a checkpoint's config as a ModelSpec, and one two-way table of weight names.

Does not import torch.
"""

from pacs_megatron.models.config_reader import DeltaSpec, ModelSpec, MoeSpec
from pacs_megatron.models.families import (
    VISION_PREFIX,
    language_config,
    load_config,
    load_spec,
    read_spec,
    weight_table,
)
from pacs_megatron.models.table import Entry, WeightTable, canonical_name

__all__ = [
    "VISION_PREFIX",
    "DeltaSpec",
    "Entry",
    "ModelSpec",
    "MoeSpec",
    "WeightTable",
    "canonical_name",
    "language_config",
    "load_config",
    "load_spec",
    "read_spec",
    "weight_table",
]
