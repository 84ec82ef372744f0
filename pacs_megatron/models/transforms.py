"""Transforms between one or more Hugging Face tensors and one Megatron tensor: exact inverses, no arithmetic.

A transform has the shapes of both sides and the tensor-parallel split of the Megatron side. Dimensions have names, so a
family file reads as a table; `Dims` has their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pacs_megatron.models.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dims:
    """Sizes of the named dimensions of one model."""

    spec: ModelSpec
    padded_vocab: int
    sizes: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        spec = self.spec
        sizes = {
            "hidden": spec.hidden_size,
            "ffn": spec.ffn_size,
            "head_dim": spec.head_dim,
            "heads": spec.num_heads * spec.head_dim,
            "kv_heads": spec.num_kv_heads * spec.head_dim,
            "vocab": spec.vocab_size,
            "padded_vocab": self.padded_vocab,
            "value": 1,
        }
        if spec.moe is not None:
            sizes |= {"experts": spec.moe.num_experts, "expert_ffn": spec.moe.expert_ffn_size}
        object.__setattr__(self, "sizes", sizes)

    def shape(self, names: Sequence[str]) -> Shape:
        return tuple(self.sizes[name] for name in names)


class Transform(Protocol):
    """Shapes are of full tensors of the model of `Dims`."""

    @property
    def tp_dim(self) -> int | None:
        """The dimension that tensor parallelism splits; None: every rank has the whole tensor."""
        ...

    @property
    def tp_parts(self) -> int:
        """Equal parts along `tp_dim` that are split separately (2 for gate and up: each rank has [gate_r; up_r])."""
        ...

    @property
    def in_row_order(self) -> bool:
        """Whether the Hugging Face tensors, concatenated, are the first rows of the Megatron tensor."""
        ...

    def tp_units(self, dims: Dims) -> int:
        """Units that the tensor-parallel size must divide: rows or columns of a part, for qkv the query groups."""
        ...

    def hf_shapes(self, dims: Dims) -> tuple[Shape, ...]: ...

    def megatron_shape(self, dims: Dims) -> Shape: ...

    def to_megatron(self, tensors: Sequence[Tensor], dims: Dims) -> Tensor: ...

    def to_hf(self, tensor: Tensor, dims: Dims) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True, slots=True)
class Plain:
    """The same tensor on both sides."""

    dims: tuple[str, ...]
    tp_dim: int | None = None
    tp_parts: int = field(default=1, init=False)
    in_row_order: bool = field(default=True, init=False)

    def tp_units(self, dims: Dims) -> int:
        return 1 if self.tp_dim is None else dims.sizes[self.dims[self.tp_dim]]

    def hf_shapes(self, dims: Dims) -> tuple[Shape, ...]:
        return (dims.shape(self.dims),)

    def megatron_shape(self, dims: Dims) -> Shape:
        return dims.shape(self.dims)

    def to_megatron(self, tensors: Sequence[Tensor], dims: Dims) -> Tensor:
        return tensors[0]

    def to_hf(self, tensor: Tensor, dims: Dims) -> tuple[Tensor, ...]:
        return (tensor,)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """[vocab, hidden], padded with zero rows to [padded_vocab, hidden]."""

    tp_dim: int = field(default=0, init=False)
    tp_parts: int = field(default=1, init=False)
    in_row_order: bool = field(default=True, init=False)

    def tp_units(self, dims: Dims) -> int:
        return dims.padded_vocab

    def hf_shapes(self, dims: Dims) -> tuple[Shape, ...]:
        return (dims.shape(("vocab", "hidden")),)

    def megatron_shape(self, dims: Dims) -> Shape:
        return dims.shape(("padded_vocab", "hidden"))

    def to_megatron(self, tensors: Sequence[Tensor], dims: Dims) -> Tensor:
        (rows,) = tensors
        num_pad = dims.padded_vocab - rows.shape[0]
        if num_pad == 0:
            return rows
        padded = rows.new_zeros(self.megatron_shape(dims))
        padded[: rows.shape[0]] = rows
        return padded

    def to_hf(self, tensor: Tensor, dims: Dims) -> tuple[Tensor, ...]:
        return (tensor[: dims.spec.vocab_size],)


@dataclass(frozen=True, slots=True)
class Qkv:
    """q, k, v of [heads, ...], [kv_heads, ...] twice, interleaved by query group.

    Megatron's rows are, for each of the `num_kv_heads` groups: its query heads, its key head, its value head. `rest`
    names the remaining dimensions: ("hidden",) for the weight, () for the bias.
    """

    rest: tuple[str, ...]
    tp_dim: int = field(default=0, init=False)
    tp_parts: int = field(default=1, init=False)
    in_row_order: bool = field(default=False, init=False)

    def tp_units(self, dims: Dims) -> int:
        return dims.spec.num_kv_heads

    def hf_shapes(self, dims: Dims) -> tuple[Shape, ...]:
        kv = dims.shape(("kv_heads", *self.rest))
        return (dims.shape(("heads", *self.rest)), kv, kv)

    def megatron_shape(self, dims: Dims) -> Shape:
        rows = dims.sizes["heads"] + 2 * dims.sizes["kv_heads"]
        return (rows, *dims.shape(self.rest))

    def to_megatron(self, tensors: Sequence[Tensor], dims: Dims) -> Tensor:
        import torch

        groups = dims.spec.num_kv_heads
        rest = dims.shape(self.rest)
        return torch.cat([t.reshape(groups, -1, *rest) for t in tensors], dim=1).reshape(self.megatron_shape(dims))

    def to_hf(self, tensor: Tensor, dims: Dims) -> tuple[Tensor, ...]:
        import torch

        spec = dims.spec
        rest = dims.shape(self.rest)
        grouped = tensor.reshape(spec.num_kv_heads, -1, *rest)
        q_rows = spec.num_heads // spec.num_kv_heads * spec.head_dim
        q, k, v = torch.split(grouped, [q_rows, spec.head_dim, spec.head_dim], dim=1)
        return tuple(t.reshape(-1, *rest) for t in (q, k, v))


@dataclass(frozen=True, slots=True)
class GatedUp:
    """gate and up, each [rows, hidden], concatenated along the rows."""

    rows: str
    tp_dim: int = field(default=0, init=False)
    tp_parts: int = field(default=2, init=False)
    in_row_order: bool = field(default=True, init=False)

    def tp_units(self, dims: Dims) -> int:
        return dims.sizes[self.rows]

    def hf_shapes(self, dims: Dims) -> tuple[Shape, ...]:
        shape = dims.shape((self.rows, "hidden"))
        return (shape, shape)

    def megatron_shape(self, dims: Dims) -> Shape:
        return (2 * dims.sizes[self.rows], dims.sizes["hidden"])

    def to_megatron(self, tensors: Sequence[Tensor], dims: Dims) -> Tensor:
        import torch

        return torch.cat(list(tensors), dim=0)

    def to_hf(self, tensor: Tensor, dims: Dims) -> tuple[Tensor, ...]:
        gate, up = tensor.chunk(2, dim=0)
        return gate, up
