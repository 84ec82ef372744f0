"""Emulated FP8 matrix products (quantisation only): values are cast to `torch.float8_*` and back,
products run in fp32.

Recipes and their state are Transformer Engine's own: scales and amax histories of delayed scaling
live in the module's `fp8_meta` and are updated by Transformer Engine's Python code
(`NVTE_UNFUSED_FP8_UPDATE=1`). Not emulated: rounding of the accumulator, and the kernels
themselves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
BLOCK = 128


def _cast(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` rounded to `dtype` at `scale`, back in fp32."""
    limit = torch.finfo(dtype).max
    return (values * scale).clamp(-limit, limit).to(dtype).float() / scale


def per_tensor(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Current scaling: the largest absolute value becomes the format's maximum."""
    amax = values.abs().amax() if values.numel() else values.new_zeros(())
    return _cast(values, torch.where(amax > 0, torch.finfo(dtype).max / amax, 1.0), dtype)


def blockwise(values: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    """Blocks of `rows` x 128 over the last two dimensions; scales are powers of two, as the
    recipe's default.
    """
    height, width = values.shape
    padded = F.pad(values, (0, -width % BLOCK, 0, -height % rows))
    blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // BLOCK, BLOCK)
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scale = torch.where(
        amax > 0, torch.exp2(torch.floor(torch.log2(torch.finfo(dtype).max / amax))), 1.0
    )
    return _cast(blocks, scale, dtype).reshape(padded.shape)[:height, :width]


class Quantizer:
    """One module's casts under the recipe that is active now.

    `gemm` numbers the products of a grouped module.
    """

    def __init__(self, module: Any, gemm: int = 0) -> None:
        self.recipe = FP8GlobalStateManager.get_fp8_recipe()
        fp8_format = self.recipe.fp8_format.name
        self.forward_dtype = E5M2 if fp8_format == "E5M2" else E4M3
        self.backward_dtype = E4M3 if fp8_format == "E4M3" else E5M2
        self._meta = module.fp8_meta
        self._gemm = gemm

    def _delayed(self, values: Tensor, key: str, index: int, dtype: torch.dtype) -> Tensor:
        state = self._meta[key]
        state.amax_history[0][index].copy_(
            torch.maximum(state.amax_history[0][index], values.abs().amax())
        )
        return _cast(values, state.scale[index].clone(), dtype)

    def input(self, values: Tensor) -> Tensor:
        """[t, k] as the forward product and the gradient of the weight see it."""
        if self.recipe.delayed():
            return self._delayed(values, "scaling_fwd", 3 * self._gemm, self.forward_dtype)
        if self.recipe.float8_block_scaling():
            return blockwise(values, self.forward_dtype, 1)
        return per_tensor(values, self.forward_dtype)

    def weight(self, values: Tensor) -> Tensor:
        """[n, k]."""
        if self.recipe.delayed():
            return self._delayed(values, "scaling_fwd", 3 * self._gemm + 1, self.forward_dtype)
        if self.recipe.float8_block_scaling():
            return blockwise(values, self.forward_dtype, BLOCK)
        return per_tensor(values, self.forward_dtype)

    def gradient(self, values: Tensor) -> Tensor:
        """[t, n], the gradient of the output."""
        if self.recipe.delayed():
            return self._delayed(values, "scaling_bwd", 2 * self._gemm, self.backward_dtype)
        if self.recipe.float8_block_scaling():
            return blockwise(values, self.backward_dtype, 1)
        return per_tensor(values, self.backward_dtype)


class _Product(torch.autograd.Function):
    """x [t, k], weight [n, k] -> [t, n],
    all three products of the layer with quantised operands.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, quantised: Tensor, quantizer: Quantizer, is_first: bool
    ) -> Tensor:
        x8 = quantizer.input(x.detach().float())
        ctx.save_for_backward(x8, quantised)
        ctx.quantizer = quantizer
        ctx.is_first = is_first
        ctx.dtypes = (x.dtype, weight.dtype)
        return (x8 @ quantised.t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x8, weight8 = ctx.saved_tensors
        grad8 = ctx.quantizer.gradient(grads[0].float())
        if ctx.is_first and ctx.quantizer.recipe.delayed():
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)
        return (
            (grad8 @ weight8).to(ctx.dtypes[0]),
            (grad8.t() @ x8).to(ctx.dtypes[1]),
            None,
            None,
            None,
        )


def product(
    module: Any, x: Tensor, weight: Tensor, is_first_microbatch: bool | None, gemm: int = 0
) -> Tensor:
    """x @ weight.T as the recipe computes it, with the quantised weight kept from the first
    micro-batch on.
    """
    if x.numel() == 0:
        return F.linear(x, weight)
    flat = x.reshape(-1, x.shape[-1])
    # transformer_engine/pytorch/utils.py, assert_dim_for_fp8_exec: the reasons for padding tokens.
    assert flat.shape[0] % 8 == 0 and flat.shape[1] % 16 == 0, (
        f"FP8 needs aligned shapes, got {tuple(flat.shape)}"
    )
    quantizer = Quantizer(module, gemm)
    cache = module.__dict__.setdefault("_emulated_weights", {})
    if is_first_microbatch is False and gemm in cache:
        quantised = cache[gemm]
    else:
        quantised = quantizer.weight(weight.detach().float())
        if is_first_microbatch is not None:
            cache[gemm] = quantised
    is_first = torch.is_grad_enabled() and FP8GlobalStateManager.is_first_fp8_module()
    out: Tensor = _Product.apply(flat, weight, quantised, quantizer, is_first)  # type: ignore[no-untyped-call]
    return out.reshape(*x.shape[:-1], weight.shape[0])
