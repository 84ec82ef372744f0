"""Base class of the schema's sections."""

from pydantic import BaseModel, ConfigDict


class Options(BaseModel):
    """Base class: strict types, no unknown keys, immutable, finite numbers."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
