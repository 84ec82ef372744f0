"""Run configuration: schema, YAML composition, overrides and checks.

Imports neither torch nor Megatron.
"""

from pacs_megatron.config.load import LoadedConfig, load_config
from pacs_megatron.config.schema import RunConfig

__all__ = ["LoadedConfig", "RunConfig", "load_config"]
