"""Hybrids: models with gated delta nets in some layers and gated attention in the others.

Qwen3-Next and Qwen3.5, as transformers 5.19 defines them. The module has what they add to the keys
of config.json, and the rows of their weights; `families.py` joins them to families, and
`policy/gated_delta.py` computes the layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pacs_megatron.errors import ConversionError
from pacs_megatron.models.config_reader import MAX_LAYERS, ConfigReader, DeltaSpec, wrong_value
from pacs_megatron.models.table import Concat, Qkv, Shape, Sizes, WeightRow

if TYPE_CHECKING:
    from torch import Tensor

_DEFAULT_INTERVAL = 4
_DEFAULT_ROTARY_FACTOR = 0.25
"""transformers' values of `full_attention_interval` and `partial_rotary_factor`"""
_DELTA_NET = "linear_attention"
_ATTENTION = "full_attention"


def read_delta(config: ConfigReader) -> DeltaSpec:
    """The delta nets that a config.json declares.

    Raises:
        ConversionError: A type of layer that is not supported, a missing key, a wrong value.
    """
    num_key_heads = config.integer("linear_num_key_heads")
    num_value_heads = config.integer("linear_num_value_heads")
    if num_value_heads % num_key_heads:
        raise wrong_value(
            "linear_num_value_heads",
            num_value_heads,
            f"a multiple of linear_num_key_heads={num_key_heads}",
        )
    return DeltaSpec(
        layers=tuple(kind == _DELTA_NET for kind in _layer_types(config)),
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_head_dim=config.integer("linear_key_head_dim"),
        value_head_dim=config.integer("linear_value_head_dim"),
        conv_kernel=config.integer("linear_conv_kernel_dim"),
    )


def _layer_types(config: ConfigReader) -> list[str]:
    """`layer_types`, or attention in every `full_attention_interval`-th layer."""
    layer_types = config.layer_types(_DELTA_NET, _ATTENTION)
    if layer_types is None:
        interval = config.optional_integer("full_attention_interval") or _DEFAULT_INTERVAL
        layer_types = []
        for number in range(1, config.integer("num_hidden_layers", MAX_LAYERS) + 1):
            layer_types.append(_DELTA_NET if number % interval else _ATTENTION)

    if _DELTA_NET not in layer_types:
        raise ConversionError(
            f"config.json: no layer of this {config.family} has a gated delta net (layer_types, "
            "full_attention_interval); such a model is not supported, use a hybrid one"
        )
    return layer_types


def read_rotary_dim(config: ConfigReader, head_dim: int) -> int:
    """Elements of a head that positions rotate."""
    return config.rotary_dim(head_dim, _DEFAULT_ROTARY_FACTOR)


@dataclass(frozen=True, slots=True)
class GatedQkv(Qkv):
    """`Qkv` where each query head of Hugging Face is followed by its gate head.

    Megatron's rows are, for each group: its query heads, their gate heads, its key head, its value
    head.
    """

    def hf_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        queries, keys, values = Qkv.hf_shapes(self, sizes)
        return (2 * queries[0], *queries[1:]), keys, values

    def to_megatron(self, tensors: Sequence["Tensor"], sizes: Sizes) -> "Tensor":
        queries, keys, values = tensors
        heads = queries.reshape(sizes["groups"], -1, 2, sizes["head_dim"], *queries.shape[1:])
        ordered = heads.transpose(1, 2).reshape(queries.shape)
        return Qkv.to_megatron(self, [ordered, keys, values], sizes)

    def to_hf(self, tensor: "Tensor", sizes: Sizes) -> "tuple[Tensor, ...]":
        queries, keys, values = Qkv.to_hf(self, tensor, sizes)
        kinds = queries.reshape(sizes["groups"], 2, -1, sizes["head_dim"], *queries.shape[1:])
        return kinds.transpose(1, 2).reshape(queries.shape), keys, values


@dataclass(frozen=True, slots=True)
class DeltaConvolution:
    """The kernels of queries, keys and values, one below the other on both sides.

    Tensor parallelism splits each of them, by heads.
    """

    tp_dim: ClassVar = 0
    part_names: ClassVar = ("query", "key", "value")

    def parts(self, sizes: Sizes) -> tuple[int, ...]:
        return sizes["delta_keys"], sizes["delta_keys"], sizes["delta_values"]

    def tp_units(self, sizes: Sizes) -> int:
        return sizes["delta_groups"]

    def hf_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        return (self.megatron_shape(sizes),)

    def megatron_shape(self, sizes: Sizes) -> Shape:
        return (sum(self.parts(sizes)), 1, sizes["delta_kernel"])

    def to_megatron(self, tensors: Sequence["Tensor"], sizes: Sizes) -> "Tensor":
        return tensors[0]

    def to_hf(self, tensor: "Tensor", sizes: Sizes) -> "tuple[Tensor, ...]":
        return (tensor,)


@dataclass(frozen=True, slots=True)
class DeltaProjection:
    """The input projections of a delta net. Megatron's rows: queries, keys, values, gate of the
    output (z), strength (beta) and decay (alpha) of the update.

    Tensor parallelism splits each of them, by heads.
    """

    grouped: bool
    """Hugging Face's order. Qwen3-Next: two tensors, [queries, keys, values, z] and [beta, alpha],
    interleaved by key head. Otherwise four: [queries, keys, values], z, beta, alpha.
    """
    tp_dim: ClassVar = 0
    part_names: ClassVar = ("query", "key", "value", "z", "beta", "alpha")

    def parts(self, sizes: Sizes) -> tuple[int, ...]:
        keys = sizes["delta_keys"]
        values = sizes["delta_values"]
        heads = sizes["delta_heads"]
        return keys, keys, values, values, heads, heads

    def tp_units(self, sizes: Sizes) -> int:
        return sizes["delta_groups"]

    def _rows_of_hf(self, sizes: Sizes) -> tuple[tuple[int, ...], ...]:
        """The parts of each Hugging Face tensor."""
        parts = self.parts(sizes)
        if self.grouped:
            return parts[:4], parts[4:]
        return parts[:3], parts[3:4], parts[4:5], parts[5:]

    def hf_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        return tuple((sum(rows), sizes["hidden"]) for rows in self._rows_of_hf(sizes))

    def megatron_shape(self, sizes: Sizes) -> Shape:
        return (sum(self.parts(sizes)), sizes["hidden"])

    def to_megatron(self, tensors: Sequence["Tensor"], sizes: Sizes) -> "Tensor":
        import torch

        if not self.grouped:
            return torch.cat(list(tensors))
        groups = sizes["delta_groups"]
        hidden = sizes["hidden"]
        pieces: list[Tensor] = []
        for tensor, rows in zip(tensors, self._rows_of_hf(sizes), strict=True):
            rows_of_group = [number // groups for number in rows]
            by_group = tensor.reshape(groups, -1, hidden)
            for part in by_group.split(rows_of_group, dim=1):  # type: ignore[no-untyped-call]
                pieces.append(part.reshape(-1, hidden))
        return torch.cat(pieces)

    def to_hf(self, tensor: "Tensor", sizes: Sizes) -> "tuple[Tensor, ...]":
        import torch

        if not self.grouped:
            lengths = [sum(rows) for rows in self._rows_of_hf(sizes)]
            return tuple(tensor.split(lengths))  # type: ignore[no-untyped-call]
        groups = sizes["delta_groups"]
        hidden = sizes["hidden"]
        parts = list(tensor.split(self.parts(sizes)))  # type: ignore[no-untyped-call]
        tensors = []
        for rows in self._rows_of_hf(sizes):
            by_group = [parts.pop(0).reshape(groups, -1, hidden) for _ in rows]
            tensors.append(torch.cat(by_group, dim=1).reshape(-1, hidden))
        return tuple(tensors)


GATED_QKV = WeightRow(
    "self_attention.linear_qkv.weight",
    ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    GatedQkv(("hidden",)),
)
DELTA_NET = (
    WeightRow(
        "input_layernorm.weight",
        ("input_layernorm.weight",),
        Concat(("hidden",)),
        saved_as="self_attention.in_proj.layer_norm_weight",
    ),
    WeightRow("self_attention.conv1d.weight", ("linear_attn.conv1d.weight",), DeltaConvolution()),
    WeightRow(
        "self_attention.dt_bias", ("linear_attn.dt_bias",), Concat(("delta_heads",), tp_dim=0)
    ),
    WeightRow("self_attention.A_log", ("linear_attn.A_log",), Concat(("delta_heads",), tp_dim=0)),
    WeightRow(
        "self_attention.out_norm.weight",
        ("linear_attn.norm.weight",),
        Concat(("delta_value_head",)),
    ),
    WeightRow(
        "self_attention.out_proj.weight",
        ("linear_attn.out_proj.weight",),
        Concat(("hidden", "delta_values"), tp_dim=1),
    ),
)
"""The rows of a layer with a delta net, without its input projection and its MLP"""
SHARED_EXPERT_GATE = WeightRow(
    "mlp.shared_experts.gate_weight",
    ("mlp.shared_expert_gate.weight",),
    Concat(("one", "hidden")),
)


def delta_in_proj(*, grouped: bool) -> WeightRow:
    """The row of a delta net's input projection; `grouped` as in `DeltaProjection`."""
    names: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    if grouped:
        names = ("in_proj_qkvz", "in_proj_ba")
    return WeightRow(
        "self_attention.in_proj.weight",
        tuple(f"linear_attn.{name}.weight" for name in names),
        DeltaProjection(grouped),
    )
