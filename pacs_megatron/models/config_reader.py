"""The architecture of a checkpoint, and the reader of its config.json, which rejects unsupported
settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pacs_megatron.errors import ConversionError, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A mixture-of-experts MLP; every layer has one."""

    num_experts: int
    top_k: int
    expert_ffn_size: int
    norm_topk_prob: bool
    """Divide the chosen experts' probabilities by their sum"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU; no
    bias but on q, k and v.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    """Intermediate size of the dense MLP; unused where `moe` is set"""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    """Rows of the Hugging Face embedding, without Megatron's padding"""
    max_positions: int
    tied: bool
    """The output layer is the embedding"""
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None = field(hash=False)
    """None, or `rope_type` (`linear` or `llama3`) with its numbers."""
    norm_eps: float
    qk_norm: bool
    """RMSNorm over head_dim on queries and keys, before the rotation"""
    qkv_bias: bool
    moe: MoeSpec | None
    head: Literal["tokens", "value"] = "tokens"
    """Output of the last layer: logits of the vocabulary, or a critic's value"""
    dtype: str
    """As the config declares it: `float32`, `bfloat16` or `float16`"""

    def critic(self) -> "ModelSpec":
        """The architecture of a critic: a value in the place of the output layer."""
        return replace(self, head="value", tied=False)


_DEFAULT_THETA = 10000.0
"""transformers' default of every supported family, for configs without the key"""
_SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""`rope_type` -> its keys"""
_RANGES = {
    "rms_norm_eps": (1e-20, 0.1),
    "rope_theta": (1.0, 1e15),
    "factor": (1.0, 2.0**20),
    "low_freq_factor": (2.0**-20, 2.0**20),
    "high_freq_factor": (2.0**-20, 2.0**20),
}
"""Key of a float -> its least and largest value"""
_DTYPES = ("float32", "bfloat16", "float16")

MAX_SIZE = 2**31
"""Maximum size of a dimension; the product of two such sizes fits into 64 bits."""
MAX_LAYERS = 2**12
MAX_EXPERTS = 2**14
"""Maximum number of layers or experts; the weight table and the plan have a row for each."""


class ConfigReader:
    """Typed access to one model's config; every error names the key, its value and the expected
    value.
    """

    def __init__(self, config: Mapping[str, Any], family: str) -> None:
        self.config = config
        self.family = family

    def integer(self, key: str, limit: int = MAX_SIZE) -> int:
        """A positive integer."""
        return _integer(key, self._required(key), limit)

    def optional_integer(self, key: str) -> int | None:
        """None where the key is missing or null."""
        return None if self.config.get(key) is None else self.integer(key)

    def number(self, key: str) -> float:
        """A float in its range."""
        return _number(key, self._required(key))

    def boolean(self, key: str) -> bool:
        """False where the key is missing or null, as in transformers."""
        value = self.config.get(key)
        if not isinstance(value, bool | None):
            raise wrong_value(key, value, "true or false")
        return bool(value)

    def reject(self, key: str, *, unless: tuple[Any, ...], reason: str) -> None:
        """Raises ConversionError if the key has a value outside `unless`; a missing or null key
        passes.
        """
        value = self.config.get(key)
        if value is not None and value not in unless:
            place = f"config.json: {key}={shown(value)}"
            allowed = " or ".join(map(repr, unless))
            raise ConversionError(
                f"{place} is not supported for {self.family} ({reason}); supported: {allowed}"
            )

    def reject_sliding_window(self, window_in_use: bool) -> None:
        """Raises ConversionError for a sliding window: the policy has full attention only.

        `layer_types`, where present, takes precedence over `window_in_use`.
        """
        layer_types = self.config.get("layer_types")
        if layer_types is not None:
            num_layers = self.integer("num_hidden_layers", MAX_LAYERS)
            if not isinstance(layer_types, list) or len(layer_types) != num_layers:
                raise wrong_value(
                    "layer_types", layer_types, f"one entry for each of {num_layers} layers"
                )
            window_in_use = any(kind != "full_attention" for kind in layer_types)
        if window_in_use:
            raise ConversionError(
                "config.json: sliding-window attention "
                f"(sliding_window={self.config.get('sliding_window')!r}) is not supported for "
                f"{self.family}; use a checkpoint with full attention"
            )

    def rope(self) -> tuple[float, dict[str, Any] | None]:
        """(theta, scaling); scaling is None or has `rope_type` and that type's numbers."""
        parameters = self._rope_parameters()
        theta = self._rope_theta(parameters)

        kind = parameters.get("rope_type", parameters.get("type"))
        if kind is None or kind == "default":
            return theta, None
        if not isinstance(kind, str) or kind not in _SCALINGS:
            raise _unsupported("rope_type", kind, ("default", *_SCALINGS))
        missing = [key for key in _SCALINGS[kind] if key not in parameters]
        if missing:
            raise ConversionError(f"config.json: rope_type={kind!r} lacks {', '.join(missing)}")

        scaling = {key: parameters[key] for key in _SCALINGS[kind]}
        for key, value in scaling.items():
            if key in _RANGES:
                _number(key, value)
            else:
                _integer(key, value, MAX_SIZE)
        if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
            raise wrong_value(
                "high_freq_factor", scaling["high_freq_factor"], "more than low_freq_factor"
            )
        return theta, {"rope_type": kind} | scaling

    def _rope_parameters(self) -> Mapping[str, Any]:
        """The object of rotary positions, empty if there is none.

        transformers 5 writes `rope_parameters`; 4 writes `rope_theta` and an optional
        `rope_scaling`. Both keys must agree, because transformers reads the second one.
        """
        newer = self.config.get("rope_parameters")
        older = self.config.get("rope_scaling")
        if newer is not None and older is not None and older != newer:
            expected = f"what rope_parameters has ({shown(newer)}); remove one of them"
            raise wrong_value("rope_scaling", older, expected)

        parameters: Any = older if newer is None else newer
        if parameters is None:
            return {}
        if not isinstance(parameters, Mapping):
            raise ConversionError(
                f"config.json: rope parameters are {shown(parameters)}, expected an object"
            )
        return parameters

    def _rope_theta(self, parameters: Mapping[str, Any]) -> float:
        """The base of the rotation's frequencies.

        It is in the object (transformers 5), at the top (transformers 4), or in both places, which
        must agree: transformers reads the first one, other programs the second.
        """
        thetas = []
        for source in (parameters, self.config):
            if source.get("rope_theta") is not None:
                thetas.append(_number("rope_theta", source["rope_theta"]))

        if not thetas:
            return _DEFAULT_THETA
        if thetas[0] != thetas[-1]:
            raise wrong_value(
                "rope_theta",
                thetas[-1],
                f"{shown(thetas[0])} as in rope_parameters; remove one of them",
            )
        return thetas[0]

    def dtype(self) -> str:
        """transformers 5 writes `dtype`, 4 `torch_dtype`; with neither key transformers loads
        float32.
        """
        value = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        name = str(value).removeprefix("torch.")
        if name not in _DTYPES:
            raise _unsupported("dtype", value, _DTYPES)
        return name

    def _required(self, key: str) -> Any:
        if self.config.get(key) is None:
            raise ConversionError(
                f"config.json: {key} is missing; a {self.family} checkpoint has it"
            )
        return self.config[key]


def wrong_value(key: str, value: Any, expected: str) -> ConversionError:
    """The error of a key's value."""
    return ConversionError(f"config.json: {key}={shown(value)}, expected {expected}")


def _unsupported(key: str, value: Any, supported: tuple[str, ...]) -> ConversionError:
    return ConversionError(
        f"config.json: {key}={shown(value)} is not supported; supported: {', '.join(supported)}"
    )


def _integer(key: str, value: Any, limit: int) -> int:
    # `type`, not `isinstance`: a bool is an int.
    if type(value) is not int or not 1 <= value <= limit:
        raise wrong_value(key, value, f"a positive integer of at most {limit}")
    return value


def _number(key: str, value: Any) -> float:
    low, high = _RANGES[key]
    if type(value) not in (int, float) or not low <= value <= high:  # false for NaN
        raise wrong_value(key, value, f"a number from {low:g} to {high:g}")
    return float(value)
