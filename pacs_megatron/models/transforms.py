"""Transforms between one or more Hugging Face tensors and one Megatron tensor: exact inverses, no arithmetic.

A transform has the shapes of both sides and the tensor-parallel split of the Megatron side. Dimensions have names, so a
family file reads as a table; `Dims` has their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
            "value": 1,
        }
        if spec.moe is not None:
            sizes |= {"experts": spec.moe.num_experts, "expert_ffn": spec.moe.expert_ffn_size}
        object.__setattr__(self, "sizes", sizes)

    def shape(self, names: Sequence[str]) -> Shape:
        return tuple(self.sizes[name] for name in names)


@dataclass(frozen=True, slots=True)
class Rows:
    """`tp_parts` tensors of one shape, concatenated along the rows; the vocabulary is padded with zero rows."""

    dims: tuple[str, ...]
    tp_dim: int | None = None
    """The dimension that tensor parallelism splits; None: every rank has the whole tensor."""
    tp_parts: int = 1
    """Equal parts along `tp_dim` that are split separately (2 for gate and up: each rank has [gate_r; up_r])."""

    def tp_units(self, dims: Dims) -> int:
        """Units that the tensor-parallel size must divide: rows or columns of a part, for qkv the query groups."""
        return 1 if self.tp_dim is None else self.megatron_shape(dims)[self.tp_dim] // self.tp_parts

    def hf_shapes(self, dims: Dims) -> tuple[Shape, ...]:
        return (dims.shape(self.dims),) * self.tp_parts

    def megatron_shape(self, dims: Dims) -> Shape:
        rows, *rest = dims.shape(self.dims)
        return (dims.padded_vocab if self.dims[0] == "vocab" else rows * self.tp_parts, *rest)

    def to_megatron(self, tensors: Sequence[Tensor], dims: Dims) -> Tensor:
        import torch

        padding = self.megatron_shape(dims)[0] - sum(tensor.shape[0] for tensor in tensors)
        zeros = [tensors[0].new_zeros(padding, *tensors[0].shape[1:])] if padding else []
        return torch.cat([*tensors, *zeros]) if len(tensors) > 1 or padding else tensors[0]

    def to_hf(self, tensor: Tensor, dims: Dims) -> tuple[Tensor, ...]:
        rows = dims.sizes[self.dims[0]]
        return tuple(tensor[part * rows : (part + 1) * rows] for part in range(self.tp_parts))


@dataclass(frozen=True, slots=True)
class Qkv:
    """q, k, v of [heads, ...], [kv_heads, ...] twice, interleaved by query group.

    Megatron's rows are, for each of the `num_kv_heads` groups: its query heads, its key head, its value head. `rest`
    names the remaining dimensions: ("hidden",) for the weight, () for the bias.
    """

    rest: tuple[str, ...]
    tp_dim: int = field(default=0, init=False)
    tp_parts: int = field(default=1, init=False)

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


Transform = Rows | Qkv
"""Shapes and tensors are full (not split by tensor parallelism), of the model of `Dims`."""
