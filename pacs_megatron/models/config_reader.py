"""Reads config.json of transformers 4 and 5 into plain values; refuses settings that the model would compute wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pacs_megatron.errors import ConversionError

_DEFAULT_THETA = 10000.0
"""transformers' default of every supported family, for configs without the key"""
_SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_DTYPES = ("float32", "bfloat16", "float16")

MAX_LAYERS, MAX_EXPERTS = 2**12, 2**14
"""The weight table and the plan have a row for each."""


class ConfigReader:
    """Typed access to one model's config; every error names the key, its value and the expected value."""

    def __init__(self, config: Mapping[str, Any], family: str) -> None:
        self.config = config
        self.family = family

    def integer(self, key: str, limit: int = 2**40) -> int:
        """A positive integer up to `limit`."""
        value = self._required(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise ConversionError(f"config.json: {key}={value!r}, expected a positive integer of at most {limit}")
        return value

    def optional_integer(self, key: str) -> int | None:
        """None where the key is missing or null."""
        return None if self.config.get(key) is None else self.integer(key)

    def number(self, key: str) -> float:
        value = self._required(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConversionError(f"config.json: {key}={value!r}, expected a number")
        return float(value)

    def boolean(self, key: str, *, missing: bool) -> bool:
        """`missing`: transformers' value for an absent key."""
        value = self.config.get(key)
        if value is None:
            return missing
        if not isinstance(value, bool):
            raise ConversionError(f"config.json: {key}={value!r}, expected true or false")
        return value

    def refuse(self, key: str, *, unless: tuple[Any, ...], reason: str) -> None:
        """A missing or null key passes; any value outside `unless` is refused."""
        value = self.config.get(key)
        if value is not None and value not in unless:
            allowed = " or ".join(repr(v) for v in unless)
            raise ConversionError(
                f"config.json: {key}={value!r} is not supported for {self.family} ({reason}); supported: {allowed}"
            )

    def refuse_sliding_window(self, window_in_use: bool) -> None:
        """The policy has full attention only. `layer_types`, where present, takes precedence over `window_in_use`."""
        layer_types = self.config.get("layer_types")
        if layer_types is not None:
            window_in_use = any(kind != "full_attention" for kind in layer_types)
        if window_in_use:
            raise ConversionError(
                f"config.json: sliding-window attention (sliding_window={self.config.get('sliding_window')!r}) "
                f"is not supported for {self.family}; use a checkpoint with full attention"
            )

    def rope(self) -> tuple[float, dict[str, Any] | None]:
        """(theta, scaling); scaling is None or has `rope_type` and that type's numbers."""
        # transformers 5 writes `rope_parameters`; 4 writes `rope_theta` and an optional `rope_scaling`.
        parameters = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        if not isinstance(parameters, Mapping):
            raise ConversionError(f"config.json: rope parameters are {parameters!r}, expected an object")
        theta = parameters.get("rope_theta", self.config.get("rope_theta"))
        theta = _DEFAULT_THETA if theta is None else float(theta)
        kind = parameters.get("rope_type", parameters.get("type"))
        if kind is None or kind == "default":
            return theta, None
        if kind not in _SCALINGS:
            raise ConversionError(
                f"config.json: rope_type={kind!r} is not supported; supported: default, {', '.join(_SCALINGS)}"
            )
        missing = [key for key in _SCALINGS[kind] if key not in parameters]
        if missing:
            raise ConversionError(f"config.json: rope_type={kind!r} lacks {', '.join(missing)}")
        return theta, {"rope_type": kind} | {key: parameters[key] for key in _SCALINGS[kind]}

    def dtype(self) -> str:
        """transformers 5 writes `dtype`, 4 `torch_dtype`; with neither key transformers loads float32."""
        value = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        name = str(value).removeprefix("torch.")
        if name not in _DTYPES:
            raise ConversionError(f"config.json: dtype={value!r} is not supported; supported: {', '.join(_DTYPES)}")
        return name

    def _required(self, key: str) -> Any:
        if self.config.get(key) is None:
            raise ConversionError(f"config.json: {key} is missing; a {self.family} checkpoint has it")
        return self.config[key]
