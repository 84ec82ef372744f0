"""flash-linear-attention on fake CUDA: its kernels of gated delta nets, which only allocate.

Shapes and saved tensors are those of flash-linear-attention 0.4.2. Megatron-Core imports the names.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_CHUNK = 64
"""Tokens of a chunk; the forward pass saves one row of them for each token and head"""


class _Convolution(torch.autograd.Function):
    """Saves the input; bytes, no matrix product."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        if x.shape[-1] != weight.shape[0]:
            raise ValueError(f"causal_conv1d: {list(x.shape)} with {list(weight.shape)}")
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _Normalized(torch.autograd.Function):
    """Saves the output, and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        ctx.save_for_backward(y, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.empty_like(gradient)


class _DeltaRule(torch.autograd.Function):
    """Saves its inputs, the running sums of g and a chunk's triangular matrices."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor
    ) -> Tensor:
        tokens = query.shape[:3]
        same = query.shape == key.shape and value.shape[:3] == tokens
        if not same or g.shape != tokens or beta.shape != tokens:
            shapes = [list(x.shape) for x in (query, key, value, g, beta)]
            raise ValueError(f"chunk_gated_delta_rule: {shapes}")
        sums = torch.empty_like(g, dtype=torch.float32)
        matrices = key.new_empty(*tokens, _CHUNK)
        ctx.save_for_backward(query, key, value, sums, beta, matrices, g)
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, beta, _, g = ctx.saved_tensors
        return tuple(torch.empty_like(x) for x in (query, key, value, g, beta))


def _causal_conv1d(x: Tensor, weight: Tensor, **_options: Any) -> tuple[Tensor, None]:
    return _Convolution.apply(x, weight), None  # type: ignore[no-untyped-call]


def _l2norm(x: Tensor, **_options: Any) -> Any:
    return _Normalized.apply(x)  # type: ignore[no-untyped-call]


def _chunk_gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, g: Tensor, beta: Tensor, **_options: Any
) -> tuple[Tensor, None]:
    output = _DeltaRule.apply(query, key, value, g, beta)  # type: ignore[no-untyped-call]
    return output, None


def install() -> None:
    """Replaces the package `fla` in this process, before the first import of Megatron."""
    _module("fla")
    _module("fla.modules")
    _module("fla.ops")
    _module("fla.modules.convolution", causal_conv1d=_causal_conv1d)
    _module("fla.modules.l2norm", l2norm=_l2norm)
    _module("fla.ops.gated_delta_rule", chunk_gated_delta_rule=_chunk_gated_delta_rule)


def _module(name: str, **functions: Callable[..., Any]) -> None:
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    vars(module).update(functions)
    sys.modules[name] = module
