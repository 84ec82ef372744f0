"""Transforms between one or more Hugging Face tensors and one Megatron tensor: exact inverses, no arithmetic.

A transform has the full shapes of both sides and the tensor-parallel split of the Megatron side. Dimensions have names, so
the rows of a family read as a table; `sizes_of` has their sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pacs_megatron.models.spec import ModelSpec

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
Sizes = Mapping[str, int]


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
        "value": 1,
    }
    return (
        sizes if spec.moe is None else sizes | {"experts": spec.moe.num_experts, "expert_ffn": spec.moe.expert_ffn_size}
    )


def _shape(sizes: Sizes, names: Sequence[str]) -> Shape:
    return tuple(sizes[name] for name in names)


@dataclass(frozen=True, slots=True)
class Rows:
    """`tp_parts` tensors of one shape, concatenated along the rows; the vocabulary is padded with zero rows."""

    dims: tuple[str, ...]
    tp_dim: int | None = None  # The dimension that tensor parallelism splits; None: every rank has the whole tensor
    tp_parts: int = 1
    """Equal parts along `tp_dim` that are split separately (2 for gate and up: each rank has [gate_r; up_r])."""

    def tp_units(self, sizes: Sizes) -> int:
        """Units that the tensor-parallel size must divide: rows or columns of a part, for qkv the query groups."""
        return 1 if self.tp_dim is None else self.megatron_shape(sizes)[self.tp_dim] // self.tp_parts

    def hf_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        return (_shape(sizes, self.dims),) * self.tp_parts

    def megatron_shape(self, sizes: Sizes) -> Shape:
        rows, *rest = _shape(sizes, self.dims)
        return (sizes["padded_vocab"] if self.dims[0] == "vocab" else rows * self.tp_parts, *rest)

    def to_megatron(self, tensors: Sequence[Tensor], sizes: Sizes) -> Tensor:
        import torch

        padding = self.megatron_shape(sizes)[0] - sum(tensor.shape[0] for tensor in tensors)
        zeros = [tensors[0].new_zeros(padding, *tensors[0].shape[1:])] if padding else []
        return torch.cat([*tensors, *zeros]) if len(tensors) > 1 or padding else tensors[0]

    def to_hf(self, tensor: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
        return tensor[: sizes[self.dims[0]] * self.tp_parts].chunk(self.tp_parts)


@dataclass(frozen=True, slots=True)
class Qkv:
    """q, k, v of [heads, ...], [kv_heads, ...] twice, interleaved by query group.
    Megatron's rows are, for each of the `num_kv_heads` groups: its query heads, its key head, its value head. `rest`
    names the remaining dimensions: ("hidden",) for the weight, () for the bias."""

    rest: tuple[str, ...]
    tp_dim: ClassVar = 0
    tp_parts: ClassVar = 1

    def tp_units(self, sizes: Sizes) -> int:
        return sizes["groups"]

    def hf_shapes(self, sizes: Sizes) -> tuple[Shape, ...]:
        return tuple(_shape(sizes, (rows, *self.rest)) for rows in ("heads", "kv_heads", "kv_heads"))

    def megatron_shape(self, sizes: Sizes) -> Shape:
        return (sizes["heads"] + 2 * sizes["kv_heads"], *_shape(sizes, self.rest))

    def to_megatron(self, tensors: Sequence[Tensor], sizes: Sizes) -> Tensor:
        import torch

        grouped = [tensor.reshape(sizes["groups"], -1, *tensor.shape[1:]) for tensor in tensors]
        return torch.cat(grouped, dim=1).reshape(self.megatron_shape(sizes))

    def to_hf(self, tensor: Tensor, sizes: Sizes) -> tuple[Tensor, ...]:
        grouped = tensor.reshape(sizes["groups"], -1, *tensor.shape[1:])
        rows = [shape[0] // sizes["groups"] for shape in self.hf_shapes(sizes)]
        return tuple(part.reshape(-1, *tensor.shape[1:]) for part in grouped.split(rows, dim=1))  # type: ignore[no-untyped-call]


Transform = Rows | Qkv
