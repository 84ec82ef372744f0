"""Apex's product that adds a weight's gradient to a buffer, computed by torch."""

import amp_C
from torch import Tensor


def wgrad_gemm_accum_fp32(input_2d: Tensor, d_output_2d: Tensor, d_weight: Tensor) -> None:
    """d_weight [out, in], fp32, += d_output [tokens, out]^T input [tokens, in].

    The product is fp32 inside, as on a GPU.
    """
    amp_C.CALLS["wgrad_gemm_accum_fp32"] += 1
    x = input_2d.reshape(-1, input_2d.shape[-1])
    y = d_output_2d.reshape(-1, d_output_2d.shape[-1])
    d_weight.add_(y.float().t() @ x.float())


def wgrad_gemm_accum_fp16(input_2d: Tensor, d_output_2d: Tensor, d_weight: Tensor) -> None:
    """Megatron-Core calls it for buffers of 16 bits, which this project does not have."""
    raise AssertionError("the gradient buffers are fp32")
