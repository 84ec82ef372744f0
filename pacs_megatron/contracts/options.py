"""Base class of the schema's sections."""

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

MAX_SECONDS = 10**8
"""Longer times overflow timers of the kernel and of Python."""


class Options(BaseModel):
    """Base class: strict types, no unknown keys, immutable, finite numbers."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    @field_validator("*")
    @classmethod
    def _limit_seconds(cls, value: Any, info: ValidationInfo) -> Any:
        is_seconds = (info.field_name or "").endswith("_s") and isinstance(value, int | float)
        if is_seconds and value > MAX_SECONDS:
            raise ValueError(f"expected at most {MAX_SECONDS} seconds, got {value:g}; lower it")
        return value
