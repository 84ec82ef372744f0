"""The weight table: maps every Megatron tensor to its Hugging Face tensors and back.

No other list of names exists. Megatron names are those of the *local* layer spec, with global layer
and expert numbers; `canonical_name` maps the names of Transformer Engine's spec to them. A
transform converts exactly in both directions, without arithmetic. It has the full shapes of both
sides and the tensor-parallel split of the Megatron side.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from pacs_megatron.errors import ConversionError
from pacs_megatron.models.config_reader import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
Sizes = Mapping[str, int]
"""Name of a dimension -> its size"""
Place = Literal["embedding", "layer", "final_norm", "output"]

VOCAB_MULTIPLE = 128
"""Megatron's vocabulary is padded to a multiple of this at every tensor-parallel size, so that
checkpoints can be resharded.
"""
CRITIC_CLASS = "ForTokenClassification"
"""Suffix of the transformers class name in a critic's config.json.

Its layer `score` has one label, the value before the next token. verl has critics of this class
too.
"""
TE_LAYER_NAMES: Mapping[str, str] = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Transformer Engine fuses a norm into the linear layer that follows: its name in a layer -> the
local spec's name.
"""
_TE_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$")
_LAYER = re.compile(r"decoder\.layers\.\d+\.")


def sizes_of(spec: ModelSpec, padded_vocab: int) -> Sizes:
    """The sizes of the named dimensions of one model."""
    sizes = {
        "hidden": spec.hidden_size,
        "ffn": spec.ffn_size,
        "head_dim": spec.head_dim,
        "heads": spec.num_heads * spec.head_dim,
        "kv_heads": spec.num_kv_heads * spec.head_dim,
        "groups": spec.num_kv_heads,
        "vocab": spec.vocab_size,
        "padded_vocab": padded_vocab,
        "one": 1,
    }
    if spec.moe is not None:
        sizes["experts"] = spec.moe.num_experts
        sizes["expert_ffn"] = spec.moe.expert_ffn_size
        sizes["shared_ffn"] = spec.moe.shared_ffn_size
    if spec.delta is not None:
        delta = spec.delta
        sizes["delta_groups"] = delta.num_key_heads
        sizes["delta_heads"] = delta.num_value_heads
        sizes["delta_keys"] = delta.num_key_heads * delta.key_head_dim
        sizes["delta_values"] = delta.num_value_heads * delta.value_head_dim
        sizes["delta_value_head"] = delta.value_head_dim
        sizes["delta_kernel"] = delta.conv_kernel
    return sizes


def _shape(sizes: Sizes, names: Sequence[str]) -> Shape:
    return tuple(sizes[name] for name in names)


class Transform(Protocol):
    """One Megatron tensor of the Hugging Face tensors it is made of, and back, without arithmetic.

    `sizes` are those of `sizes_of`.
    """

    @property
    def tp_dim(self) -> int | None:
        """The dimension that tensor parallelism splits; None: every rank has the whole tensor."""

    @property
    def part_names(self) -> tuple[str, ...]:
        """Suffixes of the keys of a checkpoint that has each part as a tensor; empty: it has one
        tensor.
        """

    def parts(self, sizes: Sizes) -> tuple[int, ...]:
        """Lengths along `tp_dim` (0 without one) of the parts that are split separately."""

    def tp_units(self, sizes: Sizes) -> int:
        """Units that the tensor-parallel size must divide: rows or columns of a part, or heads."""

    def hf_shapes(self, sizes: Sizes) -> tuple[Shape, ...]: ...

    def megatron_shape(self, sizes: Sizes) -> Shape: ...

    def to_megatron(self, tensors: Sequence[Tensor], sizes: Sizes) -> Tensor: ...

    def to_hf(self, tensor: Tensor, sizes: Sizes) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True, slots=True)
class Concat:
    """`tp_parts` tensors of one shape, concatenated along the rows; the vocabulary is padded with
    zero rows.
    """

    dims: tuple[str, ...]
    """Names of the dimensions of one Hugging Face tensor"""
    tp_dim: int | None = None
    """The dimension that tensor parallelism splits; None: every rank has the whole tensor"""
    tp_parts: int = 1
    """Equal parts along `tp_dim` that are split separately (2 for gate and up: each rank has
    [gate_r; up_r]).
    """
    part_names: ClassVar[tuple[str, ...]] = ()

    def parts(self, sizes: Sizes) -> tuple[int, ...]:
        length = self.megatron_shape(sizes)[self.tp_dim or 0]
        return (length // self.tp_parts,) * self.tp_parts

    def tp_units(self, sizes: Sizes) -> int:
        """Units that the tensor-parallel size must divide: rows or columns of a part, for qkv the
        query groups.
        """
        if self.tp_dim is None:
            return 1
        return self.parts(sizes)[0]

    def hf_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        return (_shape(sizes, self.dims),) * self.tp_parts

    def megatron_shape(self, sizes: Sizes) -> Shape:
        rows, *columns = _shape(sizes, self.dims)
        if self.dims[0] == "vocab":
            return (sizes["padded_vocab"], *columns)
        return (rows * self.tp_parts, *columns)

    def to_megatron(self, tensors: Sequence[Tensor], sizes: Sizes) -> Tensor:
        import torch

        first = tensors[0]
        padding = self.megatron_shape(sizes)[0] - sum(tensor.shape[0] for tensor in tensors)
        if padding:
            zeros = first.new_zeros(padding, *first.shape[1:])
            return torch.cat([*tensors, zeros])
        return torch.cat(list(tensors)) if len(tensors) > 1 else first

    def to_hf(self, tensor: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
        num_rows = sizes[self.dims[0]] * self.tp_parts
        return tensor[:num_rows].chunk(self.tp_parts)


@dataclass(frozen=True, slots=True)
class Qkv:
    """q, k, v of [heads, ...], [kv_heads, ...] twice, interleaved by query group.

    Megatron's rows are, for each of the `num_kv_heads` groups: its query heads, its key head, its
    value head.
    """

    column_dims: tuple[str, ...]
    """Names of the dimensions after the rows: ("hidden",) for the weight, () for the bias"""
    tp_dim: ClassVar = 0
    part_names: ClassVar[tuple[str, ...]] = ()

    def parts(self, sizes: Sizes) -> tuple[int, ...]:
        return (self.megatron_shape(sizes)[0],)

    def tp_units(self, sizes: Sizes) -> int:
        return sizes["groups"]

    def hf_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        columns = _shape(sizes, self.column_dims)
        return tuple((sizes[rows], *columns) for rows in ("heads", "kv_heads", "kv_heads"))

    def megatron_shape(self, sizes: Sizes) -> Shape:
        num_rows = sum(rows for rows, *_ in self.hf_shapes(sizes))
        return (num_rows, *_shape(sizes, self.column_dims))

    def to_megatron(self, tensors: Sequence[Tensor], sizes: Sizes) -> Tensor:
        import torch

        # [groups, rows of one group, ...]
        grouped = [tensor.reshape(sizes["groups"], -1, *tensor.shape[1:]) for tensor in tensors]
        return torch.cat(grouped, dim=1).reshape(self.megatron_shape(sizes))

    def to_hf(self, tensor: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
        columns = tensor.shape[1:]
        grouped = tensor.reshape(sizes["groups"], -1, *columns)
        rows_of_group = [shape[0] // sizes["groups"] for shape in self.hf_shapes(sizes)]
        parts = grouped.split(rows_of_group, dim=1)  # type: ignore[no-untyped-call]
        return tuple(part.reshape(-1, *columns) for part in parts)


def canonical_name(megatron_name: str) -> str:
    """The table's name of a parameter of either layer spec (local or Transformer Engine); layer
    numbers are kept.
    """
    match = _LAYER.match(megatron_name)
    if match is None:
        return megatron_name
    prefix = megatron_name[: match.end()]
    name = megatron_name[match.end() :]

    grouped_expert = _TE_GROUPED_EXPERT.match(name)
    if grouped_expert is not None:
        linear, expert = grouped_expert.groups()
        return f"{prefix}mlp.experts.local_experts.{expert}.{linear}.weight"
    return prefix + TE_LAYER_NAMES.get(name, name)


@dataclass(frozen=True, slots=True)
class WeightRow:
    """One line of a family's table, inside a layer. `{e}` is replaced by the expert's number."""

    megatron: str
    hf: tuple[str, ...]
    transform: Transform
    saved_as: str | None = None
    """Name in a checkpoint, if it differs: both layer specs save a norm that Transformer Engine
    fuses under its name there, so each loads the other's checkpoint.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One Megatron tensor of one model and the Hugging Face tensors it is made of."""

    megatron_name: str
    """Local spec's name in the full model, e.g. `decoder.layers.7.self_attention.linear_qkv.weight`
    """
    hf_names: tuple[str, ...]
    hf_shapes: tuple[Shape, ...]
    megatron_shape: Shape
    """Full (not split by tensor parallelism), vocabulary padded"""
    place: Place
    layer: int | None
    """Global number, from 0"""
    expert: int | None
    """Global number, from 0"""
    checkpoint_name: str
    """Key in a Megatron checkpoint, without a prefix; the experts of a layer have one"""
    transform: Transform = field(repr=False)
    sizes: Sizes = field(repr=False)

    @property
    def checkpoint_shapes(self) -> dict[str, Shape]:
        """Key in a checkpoint (without a prefix) -> shape of the whole tensor.

        One key, [experts, ...] where experts are stacked. A tensor whose parts have keys of their
        own is these tensors, one below the other.
        """
        if self.expert is not None:
            return {self.checkpoint_name: (self.sizes["experts"], *self.megatron_shape)}
        if not self.transform.part_names:
            return {self.checkpoint_name: self.megatron_shape}

        _, *columns = self.megatron_shape
        lengths = self.transform.parts(self.sizes)
        shapes = {}
        for name, rows in zip(self.transform.part_names, lengths, strict=True):
            shapes[f"{self.checkpoint_name}.{name}"] = (rows, *columns)
        return shapes

    def to_megatron(self, tensors: Sequence[Tensor]) -> Tensor:
        """The full Megatron tensor; may share memory with its inputs.

        Args:
            tensors: The Hugging Face tensors, of `hf_shapes`, in the order of `hf_names`.

        Returns:
            `megatron_shape`, same dtype.

        Raises:
            ConversionError: Wrong count, shapes or dtypes.
        """
        self.check(tensors)
        return self.transform.to_megatron(tensors, self.sizes)

    def check(self, tensors: Sequence[Tensor]) -> None:
        """Raises ConversionError unless these are the Hugging Face tensors of this entry: count,
        shapes, one dtype.
        """
        if len(tensors) != len(self.hf_names):
            raise ConversionError(
                f"{self.megatron_name}: got {len(tensors)} tensors, expected {len(self.hf_names)}"
            )
        for name, shape, tensor in zip(self.hf_names, self.hf_shapes, tensors, strict=True):
            _check_shape(name, tuple(tensor.shape), shape)

        dtypes = [tensor.dtype for tensor in tensors]
        if len(set(dtypes)) > 1:
            names = ", ".join(self.hf_names)
            raise ConversionError(
                f"{names}: dtypes differ ({', '.join(map(str, dtypes))}), but they form one "
                "Megatron tensor"
            )

    def to_hf(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """The Hugging Face tensors in the order of `hf_names`; may share memory with the input.

        Args:
            tensor: `megatron_shape`.

        Returns:
            Tensors of `hf_shapes`, same dtype.
        """
        _check_shape(self.megatron_name, tuple(tensor.shape), self.megatron_shape)
        return self.transform.to_hf(tensor, self.sizes)

    def split_tp(self, full: Tensor, tp: int) -> list[Tensor]:
        """The shards of a full Megatron tensor, rank by rank; views or copies.

        Args:
            full: `megatron_shape`.
            tp: Number of ranks; for tensors of experts, of expert tensor parallelism.

        Returns:
            `tp` tensors of `shard_shape(tp)`.
        """
        import torch

        _check_shape(self.megatron_name, tuple(full.shape), self.megatron_shape)
        self.shard_shape(tp)  # raises where `tp` does not divide the tensor
        dim = self.transform.tp_dim
        if dim is None:
            return [full] * tp

        parts = full.split(self.transform.parts(self.sizes), dim=dim)  # type: ignore[no-untyped-call]
        shards_of_parts = [part.chunk(tp, dim=dim) for part in parts]
        if len(parts) == 1:
            return list(shards_of_parts[0])
        return [torch.cat(shards, dim=dim) for shards in zip(*shards_of_parts, strict=True)]

    def merge_tp(self, shards: Sequence[Tensor]) -> Tensor:
        """The full Megatron tensor of all ranks' shards; inverse of `split_tp`.

        Args:
            shards: Tensors of `shard_shape(len(shards))`, in rank order.
        """
        import torch

        shape = self.shard_shape(len(shards))
        for shard in shards:
            _check_shape(self.megatron_name, tuple(shard.shape), shape)
        dim = self.transform.tp_dim
        if dim is None or len(shards) == 1:
            return shards[0]

        lengths = [length // len(shards) for length in self.transform.parts(self.sizes)]
        parts_of_shards = [shard.split(lengths, dim=dim) for shard in shards]  # type: ignore[no-untyped-call]
        pieces: list[Tensor] = []
        for shards_of_part in zip(*parts_of_shards, strict=True):
            pieces += shards_of_part
        return torch.cat(pieces, dim=dim)

    def shard_shape(self, tp: int) -> Shape:
        """Shape of one rank's shard.

        Raises ConversionError where `tp` does not divide its rows or columns (qkv: KV heads).
        """
        dim = self.transform.tp_dim
        if dim is None:
            return self.megatron_shape
        units = self.transform.tp_units(self.sizes)
        if units % tp:
            raise ConversionError(
                f"{self.megatron_name}: tp={tp} does not divide its {units} units (rows, columns "
                f"or heads) along dimension {dim}; use a tensor-parallel size that divides "
                f"{units}"
            )
        shape = list(self.megatron_shape)
        shape[dim] //= tp
        return tuple(shape)


class WeightTable:
    """All entries of one model: embedding, layers ascending, final norm, output layer (absent when
    tied).
    """

    def __init__(self, spec: ModelSpec, padded_vocab: int, entries: Sequence[Entry]) -> None:
        self.spec = spec
        self.padded_vocab = padded_vocab
        self.entries = tuple(entries)
        self.by_megatron = {entry.megatron_name: entry for entry in self.entries}
        """`megatron_name` -> entry; map Transformer Engine's names with `canonical_name` first"""
        self.by_hf: dict[str, Entry] = {}
        for entry in self.entries:
            self.by_hf.update(dict.fromkeys(entry.hf_names, entry))

        num_hf = sum(len(entry.hf_names) for entry in self.entries)
        if len(self.by_megatron) != len(self.entries) or len(self.by_hf) != num_hf:
            raise ConversionError(
                f"the weight table of family {spec.family} names a tensor twice; fix its rows"
            )

    @property
    def num_parameters(self) -> int:
        """Exact, without vocabulary padding; tied embeddings count once."""
        total = 0
        for entry in self.entries:
            total += sum(math.prod(shape) for shape in entry.hf_shapes)
        return total


_EMBEDDING = WeightRow(
    "embedding.word_embeddings.weight",
    ("embed_tokens.weight",),
    Concat(("vocab", "hidden"), tp_dim=0),
)
_FINAL_NORM = WeightRow("decoder.final_layernorm.weight", ("norm.weight",), Concat(("hidden",)))
_OUTPUT = WeightRow(
    "output_layer.weight", ("lm_head.weight",), Concat(("vocab", "hidden"), tp_dim=0)
)
_VALUE = (
    WeightRow("output_layer.weight", ("score.weight",), Concat(("one", "hidden"))),
    WeightRow("output_layer.bias", ("score.bias",), Concat(("one",))),
)
"""The critic's output layer"""


def build_table(spec: ModelSpec, rows_of_layers: Sequence[Sequence[WeightRow]]) -> WeightTable:
    """Expands the rows of each layer over its experts."""
    padded_vocab = math.ceil(spec.vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    sizes = sizes_of(spec, padded_vocab)

    prefix = spec.hf_prefix
    entries = [_entry(_EMBEDDING, sizes, "embedding", prefix)]
    for layer, rows in enumerate(rows_of_layers):
        for row in rows:
            experts: Sequence[int | None] = (None,)
            if spec.moe is not None and "{e}" in row.megatron:
                experts = range(spec.moe.num_experts)
            entries += [_entry(row, sizes, "layer", prefix, layer, expert) for expert in experts]

    entries.append(_entry(_FINAL_NORM, sizes, "final_norm", prefix))
    if spec.head == "value":
        entries += [_entry(row, sizes, "output") for row in _VALUE]
    elif not spec.tied:
        entries.append(_entry(_OUTPUT, sizes, "output"))
    return WeightTable(spec, padded_vocab, entries)


def _entry(
    row: WeightRow,
    sizes: Sizes,
    place: Place,
    hf_prefix: str = "",
    layer: int | None = None,
    expert: int | None = None,
) -> Entry:
    megatron_prefix = ""
    if layer is not None:
        megatron_prefix = f"decoder.layers.{layer}."
        hf_prefix = f"{hf_prefix}layers.{layer}."
    saved_as = row.saved_as or row.megatron.replace("local_experts.{e}.", "experts.")
    return Entry(
        megatron_name=megatron_prefix + row.megatron.replace("{e}", str(expert)),
        checkpoint_name=megatron_prefix + saved_as,
        hf_names=tuple(hf_prefix + name.replace("{e}", str(expert)) for name in row.hf),
        hf_shapes=row.transform.hf_shapes(sizes),
        megatron_shape=row.transform.megatron_shape(sizes),
        place=place,
        layer=layer,
        expert=expert,
        transform=row.transform,
        sizes=sizes,
    )


def _check_shape(name: str, got: Shape, expected: Shape) -> None:
    if got != expected:
        raise ConversionError(
            f"{name}: shape is {list(got)}, expected {list(expected)} from config.json; "
            "the weights and the config belong to different models"
        )
