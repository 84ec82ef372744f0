"""The family of a checkpoint: config.json -> ModelSpec -> weight table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pacs_megatron.errors import ConversionError
from pacs_megatron.models.config_reader import ConfigReader
from pacs_megatron.models.families import FAMILIES
from pacs_megatron.models.spec import ModelSpec
from pacs_megatron.models.table import CRITIC_CLASS, WeightTable, build_table
from pacs_megatron.runtime.json_reader import read_object

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
    is_critic = isinstance(architectures, list) and bool(architectures) and str(architectures[0]).endswith(CRITIC_CLASS)
    return spec.critic() if is_critic else spec


def load_config(path: str | Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder. Raises ConversionError if it is missing or not a JSON object."""
    file = Path(path) / "config.json"
    if not file.exists():
        raise ConversionError(f"{file} is missing; give the folder of a Hugging Face checkpoint")
    return read_object(file, error=ConversionError)


def load_spec(path: str | Path) -> ModelSpec:
    """`read_spec` of the config.json in a Hugging Face folder."""
    return read_spec(load_config(path))


def weight_table(spec: ModelSpec, *, vocab_multiple: int = VOCAB_MULTIPLE) -> WeightTable:
    """The two-way table of every weight of this model."""
    return build_table(_BY_NAME[spec.family], spec, vocab_multiple)


def num_parameters(spec: ModelSpec) -> int:
    """Exact count of the Hugging Face checkpoint's parameters; tied embeddings count once."""
    return weight_table(spec).num_parameters
