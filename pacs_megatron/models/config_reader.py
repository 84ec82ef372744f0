"""The architecture of a checkpoint, and the reader of its config.json, which rejects unsupported
settings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pacs_megatron.errors import ConversionError, shown
from pacs_megatron.models.config_keys import (
    DEFAULTS,
    NEUTRAL_ROPE_KEYS,
    OPTIONAL_ROPE_KEYS,
    ROPE_KEYS,
    ROPE_KEYS_IN,
    rejected_keys,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """A mixture-of-experts MLP; every layer has one."""

    num_experts: int
    top_k: int
    expert_ffn_size: int
    norm_topk_prob: bool
    """Divide the chosen experts' probabilities by their sum"""
    shared_ffn_size: int = 0
    """Intermediate size of the shared expert, which every token passes, with a gate; 0: none"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """Gated delta nets in the place of some layers' attention (Yang et al., arXiv:2412.06464).

    A model with them is a hybrid: the attention of its other layers has a gate at its output, and
    its norms multiply by 1 + weight, except the delta net's own, which multiplies by its weight.
    """

    layers: tuple[bool, ...]
    """Whether each layer has a delta net"""
    num_key_heads: int
    """Heads of queries and keys"""
    num_value_heads: int
    """A multiple of `num_key_heads`: each key head serves as many value heads"""
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    """Tokens that the causal convolution of queries, keys and values reads"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU; no
    bias but on q, k and v. Where `delta` is set, a hybrid.
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
    """None, or `rope_type` (`linear`, `llama3` or `yarn`) with its numbers."""
    norm_eps: float
    qk_norm: bool
    """RMSNorm over head_dim on queries and keys, before the rotation"""
    qkv_bias: bool
    moe: MoeSpec | None
    delta: DeltaSpec | None = None
    rotary_dim: int | None = None
    """Elements of a head that positions rotate, the first ones; None: all"""
    head: Literal["tokens", "value"] = "tokens"
    """Output of the last layer: logits of the vocabulary, or a critic's value"""
    hf_prefix: str = "model."
    """of the names in Hugging Face, except the output layer's"""
    dtype: str
    """As the config declares it: `float32`, `bfloat16` or `float16`"""

    @property
    def max_context(self) -> int:
        """Maximum length of a sequence, in tokens.

        With `linear` scaling `max_positions` is the length before scaling, with `llama3` and `yarn`
        the one after it.
        """
        scaling = self.rope_scaling
        if scaling is not None and scaling["rope_type"] == "linear":
            return int(self.max_positions * float(scaling["factor"]))
        return self.max_positions

    def critic(self) -> "ModelSpec":
        """The architecture of a critic: a value in the place of the output layer."""
        return replace(self, head="value", tied=False)


_DEFAULT_THETA = 10000.0
"""transformers' default of every supported family, for configs without the key"""
_RANGES = {
    "rms_norm_eps": (1e-20, 0.1),
    "rope_theta": (1.0, 1e15),
    "factor": (1.0, 2.0**20),
    "low_freq_factor": (2.0**-20, 2.0**20),
    "high_freq_factor": (2.0**-20, 2.0**20),
    "beta_fast": (2.0**-20, 2.0**20),
    "beta_slow": (2.0**-20, 2.0**20),
    "mscale": (2.0**-20, 2.0**20),
    "mscale_all_dim": (2.0**-20, 2.0**20),
    "partial_rotary_factor": (2.0**-20, 1.0),
}
"""Key of a float -> its least and largest value"""
BETA_FAST = 32.0
BETA_SLOW = 1.0
"""YaRN's rotations within the original context: dimensions with more keep their frequency, those
with fewer are divided by the factor
"""
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
        self.config = {**DEFAULTS[family], **config}
        self.family = family
        self._written = frozenset(config)

    def integer(self, key: str, limit: int = MAX_SIZE) -> int:
        """A positive integer."""
        return _integer(key, self._required(key), limit)

    def optional_integer(self, key: str) -> int | None:
        """None where the key is missing or null."""
        return None if self.config.get(key) is None else self.integer(key)

    def count(self, key: str) -> int:
        """An integer of at least 0."""
        value = self._required(key)
        return 0 if type(value) is int and value == 0 else self.integer(key)

    def number(self, key: str) -> float:
        """A float in its range."""
        return _number(key, self._required(key))

    def boolean(self, key: str) -> bool:
        """False where the key is missing or null, as in transformers."""
        value = self.config.get(key)
        if not isinstance(value, bool | None):
            raise wrong_value(key, value, "true or false")
        return bool(value)

    def reject_unsupported(self, *, is_dense: bool) -> None:
        """Raises ConversionError for a key of `config_keys.REJECTED` without a neutral value."""
        for key, rule in rejected_keys(self.family, is_dense=is_dense).items():
            value = self.config.get(key)
            if value is None or any(_is_same(value, neutral) for neutral in rule.unless):
                continue
            fix = "use another checkpoint"
            if rule.unless:
                fix = f"supported: {' or '.join(map(repr, rule.unless))}"
            raise ConversionError(
                f"config.json: {key}={shown(value)} is not supported for {self.family} "
                f"({rule.reason}); {fix}"
            )

    def layer_types(self, *supported: str) -> list[str] | None:
        """`layer_types`, one a layer; None where the key is missing or null.

        Raises ConversionError for another number of layers, or a type that is not supported.
        """
        layer_types = self.config.get("layer_types")
        if layer_types is None:
            return None
        num_layers = self.integer("num_hidden_layers", MAX_LAYERS)
        if not isinstance(layer_types, list) or len(layer_types) != num_layers:
            raise wrong_value(
                "layer_types", layer_types, f"one entry for each of {num_layers} layers"
            )
        other_types = [kind for kind in layer_types if kind not in supported]
        if other_types:
            names = " and ".join(kind.replace("_", " ") for kind in supported)
            raise ConversionError(
                f"config.json: layer_types has {shown(other_types[0])}, which is not supported "
                f"for {self.family} (a sliding-window or another attention); use a checkpoint "
                f"with {names}"
            )
        return layer_types

    def reject_window(self, window: int | None, max_context: int) -> None:
        """Raises ConversionError if a layer's attention has a window that hides something.

        Args:
            window: sliding window that some layer uses, in tokens; None if no layer uses one.
            max_context: maximum length of a sequence; a window of at least this length hides
                nothing.
        """
        if window is not None and window < max_context:
            written = "" if "sliding_window" in self._written else ", transformers' default"
            raise ConversionError(
                f"config.json: sliding-window attention (sliding_window={window}{written}) is not "
                f"supported for {self.family} with sequences of up to {max_context} tokens; use a "
                "checkpoint with full attention"
            )

    def rope(self) -> tuple[float, dict[str, Any] | None]:
        """(theta, scaling); scaling is None or has `rope_type` and that type's numbers."""
        parameters = self._rope_parameters()
        theta = self._rope_theta(parameters)
        kind = _rope_type(parameters)
        self._check_rope_keys(parameters, kind)
        if kind == "default":
            return theta, None

        missing = [key for key in ROPE_KEYS[kind] if parameters.get(key) is None]
        if missing:
            raise ConversionError(f"config.json: rope_type={kind!r} lacks {', '.join(missing)}")
        scaling = {key: parameters[key] for key in ROPE_KEYS[kind]}
        for key in OPTIONAL_ROPE_KEYS.get(kind, ()):
            if parameters.get(key) is not None:
                scaling[key] = parameters[key]
        for key, value in scaling.items():
            if key == "truncate":
                if not isinstance(value, bool):
                    raise wrong_value(key, value, "true or false")
            elif key in _RANGES:
                _number(key, value)
            else:
                _integer(key, value, MAX_SIZE)
        if kind == "llama3" and scaling["low_freq_factor"] >= scaling["high_freq_factor"]:
            raise wrong_value(
                "high_freq_factor", scaling["high_freq_factor"], "more than low_freq_factor"
            )
        if kind == "yarn":
            _check_yarn(scaling)
        self._check_original_positions(scaling)
        return theta, {"rope_type": kind} | scaling

    def rotary_dim(self, head_dim: int, default: float) -> int:
        """Elements of a head that positions rotate: `partial_rotary_factor` of them.

        The key is in the rope parameters, at the top, or in both places, which must agree.
        """
        key = "partial_rotary_factor"
        factors = []
        for source in (self._rope_parameters(), self.config):
            if source.get(key) is not None:
                factors.append(_number(key, source[key]))
        factors = factors or [default]
        if factors[0] != factors[-1]:
            raise wrong_value(
                key, factors[-1], f"{factors[0]} as in the rope parameters; remove one of them"
            )
        rotary_dim = int(head_dim * factors[0])
        if rotary_dim < 2 or rotary_dim % 2:
            raise wrong_value(
                key, factors[0], f"an even number of the {head_dim} elements of a head"
            )
        return rotary_dim

    def _check_rope_keys(self, parameters: Mapping[str, Any], kind: str) -> None:
        """Raises ConversionError for a key that this type of rotation does not use."""
        used = {"rope_type", "type", "rope_theta", *ROPE_KEYS[kind]}
        used.update(OPTIONAL_ROPE_KEYS.get(kind, ()))
        used |= ROPE_KEYS_IN.get(self.family, {}).keys()
        for key, value in parameters.items():
            if key in used or value is None:
                continue
            if isinstance(value, Mapping):
                raise ConversionError(
                    f"config.json: rope parameters by layer type ({key[:60]!r}) are not supported "
                    f"for {self.family} (all layers rotate alike); write the object of "
                    f"{key[:60]!r} in their place if all layers have this type"
                )
            if key not in NEUTRAL_ROPE_KEYS or not _is_same(value, NEUTRAL_ROPE_KEYS[key]):
                raise ConversionError(
                    f"config.json: rope parameters have {key[:60]}={shown(value)}, which is not "
                    f"supported with rope_type={kind}; remove it if the weights were trained "
                    "without it"
                )

    def _check_original_positions(self, scaling: Mapping[str, Any]) -> None:
        """Raises ConversionError if the key at the top, which transformers and SGLang prefer, has
        another value than the one of the rotation.
        """
        key = "original_max_position_embeddings"
        outer = self.config.get(key)
        if key in scaling and outer is not None and outer != scaling[key]:
            raise wrong_value(
                key, outer, f"{scaling[key]} as in the rope parameters; remove one of them"
            )

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
            if "rope_theta" in source:
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
        newer = self.config.get("dtype")
        older = self.config.get("torch_dtype")
        if newer is not None and older is not None and newer != older:
            raise wrong_value("torch_dtype", older, f"{shown(newer)} as dtype has; remove one")

        value = newer or older or "float32"
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


def _rope_type(parameters: Mapping[str, Any]) -> str:
    """The kind of scaling. Both of its keys must agree: transformers 4 and 5 prefer different
    ones.
    """
    kinds = [parameters[key] for key in ("rope_type", "type") if key in parameters]
    if not kinds:
        return "default"
    if kinds[0] != kinds[-1]:
        raise wrong_value("type", kinds[-1], f"{shown(kinds[0])} as in rope_type; remove one")
    kind = kinds[0]
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        raise _unsupported("rope_type", kind, tuple(ROPE_KEYS))
    return kind


def _check_yarn(scaling: Mapping[str, Any]) -> None:
    """Raises ConversionError for numbers that contradict each other."""
    fast = scaling.get("beta_fast", BETA_FAST)
    slow = scaling.get("beta_slow", BETA_SLOW)
    if slow >= fast:
        raise wrong_value("beta_slow", slow, f"less than beta_fast={fast}")
    # transformers and servers use one of them alone in different ways.
    if ("mscale" in scaling) != ("mscale_all_dim" in scaling):
        raise ConversionError(
            "config.json: rope parameters have one of mscale and mscale_all_dim; write both or none"
        )


def _is_same(value: Any, neutral: Any) -> bool:
    """Equality, where true is not 1."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


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
