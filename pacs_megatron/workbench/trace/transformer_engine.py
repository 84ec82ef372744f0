"""Transformer Engine on fake CUDA: its own Python code, with kernels that only allocate.

Its modules, autograd functions, what they save and their collectives run unchanged. Each compiled
kernel that a bf16 step calls is replaced by a function that checks devices and shapes, and
allocates the outputs.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from pacs_megatron.workbench.trace.mode import DeviceMixError, FakeCuda

CUDNN_VERSION = (9, 15, 0)
_FLOPS_OF_BACKWARD = 2.5
"""of attention, in units of the forward: five matrix products instead of two"""


class Kernels:
    """The replaced kernels; each method has the name of the kernel."""

    def __init__(self, mode: FakeCuda) -> None:
        self._mode = mode

    # ----------------------------------------------------------------------------------- norms
    def rmsnorm_fwd(
        self,
        x: Any,
        weight: Any,
        _eps: float,
        out: Any,
        quantizer: Any,
        out_dtype: Any,
        *_rest: Any,
    ) -> Any:
        _without_fp8(quantizer)
        self._check("rmsnorm_fwd", x, weight)
        if out is None:
            out = self._new("rmsnorm_fwd", x.shape, _dtype(out_dtype, x.dtype))
        self._work("rmsnorm_fwd", 0, x, out)
        rows = x.numel() // x.shape[-1]
        return out, None, self._new("rmsnorm_fwd", (rows,), torch.float32)

    def rmsnorm_bwd(self, dz: Any, x: Any, rsigma: Any, gamma: Any, *_rest: Any) -> Any:
        self._check("rmsnorm_bwd", dz, x, rsigma, gamma)
        self._work("rmsnorm_bwd", 0, dz, x, dz)
        of_x = self._new("rmsnorm_bwd", x.shape, dz.dtype)
        of_gamma = self._new("rmsnorm_bwd", gamma.shape, gamma.dtype)
        return of_x, of_gamma

    # --------------------------------------------------------------------------------- products
    def generic_gemm(  # noqa: PLR0913  (the kernel's own signature)
        self,
        a: Any,
        transpose_a: bool,
        b: Any,
        transpose_b: bool,
        out: Any,
        quantizer: Any,
        out_dtype: Any,
        bias: Any,
        _bias_dtype: Any,
        _gelu: bool,
        _gelu_in: Any,
        grad: bool,
        *_rest: Any,
        **_options: Any,
    ) -> Any:
        _without_fp8(quantizer)
        self._check("generic_gemm", a, b, out, bias)
        rows_a, columns_a = _matrix(a)
        rows_b, columns_b = _matrix(b)
        inner_a = columns_a if transpose_a else rows_a
        inner_b = rows_b if transpose_b else columns_b
        if inner_a != inner_b:
            raise ValueError(f"generic_gemm: {list(a.shape)} and {list(b.shape)} do not fit")

        shape = [columns_b] if transpose_b else list(b.shape[:-1])
        shape.append(rows_a if transpose_a else columns_a)
        if out is None:
            out = self._new("generic_gemm", shape, _dtype(out_dtype, a.dtype))
        elif out.numel() != math.prod(shape):
            raise ValueError(f"generic_gemm: out {list(out.shape)}, expected {shape}")
        self._work("generic_gemm", 2 * math.prod(shape) * inner_a, a, b, out)

        of_bias = None
        if grad and bias is not None:
            of_bias = self._new("generic_gemm", (columns_b,), bias.dtype)
        return out, of_bias, None, None

    def te_general_grouped_gemm(
        self, a: Any, transpose_a: bool, b: Any, transpose_b: bool, out: Any, *rest: Any
    ) -> Any:
        flops = 0.0
        for left, right in zip(a, b, strict=True):
            self._check("te_general_grouped_gemm", left, right)
            rows, columns = _matrix(left)
            right_rows, right_columns = _matrix(right)
            flops += 2 * rows * columns * (right_columns if transpose_b else right_rows)
        self._work("te_general_grouped_gemm", flops, *a, *b, *(out or []))
        return rest[2]  # the bias

    # -------------------------------------------------------------------------------- attention
    def get_fused_attn_backend(self, *args: Any) -> Any:
        import transformer_engine_torch as tex

        backend = tex.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
        if len(args) == 1:  # from Transformer Engine 2.20 on: one object, and a message beside
            return backend, ""
        return backend

    def fused_attn_fwd(
        self, max_q: int, _max_kv: int, training: bool, *rest: Any, **_o: Any
    ) -> Any:
        """`rest` has options, whose number depends on the version, and then the tensors."""
        bounds_q, bounds_kv, q, k, v = _leading_tensors(rest, 5)
        self._check("fused_attn_fwd", bounds_q, bounds_kv, q, k, v)
        out = self._new("fused_attn_fwd", (*q.shape[:-1], v.shape[-1]), q.dtype)
        self._work("fused_attn_fwd", self._attention_flops(max_q, q, bounds_q), q, k, v, out)
        if not training:
            return [out]
        # With cuDNN from 9.6 on, the statistics of packed samples are [tokens, heads, 1].
        statistics = self._new("fused_attn_fwd", (q.shape[0], q.shape[1], 1), torch.float32)
        state = self._new("fused_attn_fwd", (2,), torch.int64)
        return [out, statistics, state]

    def fused_attn_bwd(self, max_q: int, _max_kv: int, *rest: Any, **_options: Any) -> Any:
        bounds_q, bounds_kv, q, k, v, out, of_out = _leading_tensors(rest, 7)
        self._check("fused_attn_bwd", bounds_q, bounds_kv, q, k, v, out, of_out)
        flops = _FLOPS_OF_BACKWARD * self._attention_flops(max_q, q, bounds_q)
        self._work("fused_attn_bwd", flops, q, k, v, out, of_out)
        gradients = [
            self._new("fused_attn_bwd", tensor.shape, tensor.dtype) for tensor in (q, k, v)
        ]
        return [*gradients, None, None]

    def fused_rope_forward(self, t: Any, freqs: Any, _start: Any, _layout: Any, *rest: Any) -> Any:
        self._check("fused_rope_forward", t, freqs, rest[1])
        self._work("fused_rope_forward", 0, t, t)
        return self._new("fused_rope_forward", t.shape, t.dtype)

    def fused_rope_backward(self, t: Any, freqs: Any, _start: Any, _layout: Any, *rest: Any) -> Any:
        return self.fused_rope_forward(t, freqs, _start, _layout, *rest)

    # -------------------------------------------------------------------------------- optimizer
    def multi_tensor_adam(self, _chunk: int, overflow: Any, lists: Any, *_rest: Any) -> None:
        for tensors in zip(*lists, strict=True):
            self._check("multi_tensor_adam", overflow, *tensors)
            if len({tensor.numel() for tensor in tensors}) != 1:
                shapes = [list(tensor.shape) for tensor in tensors]
                raise ValueError(f"multi_tensor_adam: {shapes} differ")
        read = itertools.chain.from_iterable(lists)
        written = itertools.chain.from_iterable(lists[1:])
        self._work("multi_tensor_adam", 0, *read, *written)

    def multi_tensor_l2norm(
        self, _chunk: int, overflow: Any, lists: Any, per_tensor: bool = False, *_rest: Any
    ) -> Any:
        self._check("multi_tensor_l2norm", overflow, *lists[0])
        self._work("multi_tensor_l2norm", 0, *lists[0])
        count = len(lists[0]) if per_tensor else 0
        total = self._new("multi_tensor_l2norm", (1,), torch.float32)
        return total, self._new("multi_tensor_l2norm", (count,), torch.float32)

    def multi_tensor_scale(self, _chunk: int, overflow: Any, lists: Any, *_rest: Any) -> None:
        for tensors in zip(*lists, strict=True):
            self._check("multi_tensor_scale", overflow, *tensors)
        self._work("multi_tensor_scale", 0, *itertools.chain.from_iterable(lists))

    # ---------------------------------------------------------------------------------- helpers
    def _new(self, kernel: str, shape: Sequence[int], dtype: torch.dtype) -> Any:
        return self._mode.empty(shape, dtype, f"te.{kernel}")

    def _work(self, kernel: str, flops: float, *tensors: Any) -> None:
        sizes = [
            tensor.numel() * tensor.element_size()
            for tensor in tensors
            if isinstance(tensor, torch.Tensor)
        ]
        self._mode.work.add(self._mode.phase, f"te.{kernel}", flops, sum(sizes))

    def _check(self, kernel: str, *tensors: Any) -> None:
        """A kernel takes pointers: one to host memory is an illegal access."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.numel() and not tensor.is_cuda:
                raise DeviceMixError(f"te.{kernel}: a CPU tensor {list(tensor.shape)}")

    def _attention_flops(self, max_q: int, q: Any, bounds: Any) -> float:
        """Of causal attention over packed samples: half of two products each."""
        known = self._mode.shadow(bounds)
        lens = torch.tensor([float(max_q)]) if known is None else known.diff().double()
        return 2 * float(lens.square().sum()) * int(q.shape[-2]) * int(q.shape[-1])


_NAMES = (
    "rmsnorm_fwd",
    "rmsnorm_bwd",
    "generic_gemm",
    "te_general_grouped_gemm",
    "get_fused_attn_backend",
    "fused_attn_fwd",
    "fused_attn_bwd",
    "fused_rope_forward",
    "fused_rope_backward",
    "multi_tensor_adam",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
)


def replace_kernels(mode: FakeCuda) -> None:
    """Replaces the kernels for the rest of this process; before the first import of Megatron."""
    import transformer_engine.pytorch  # noqa: F401  # loads the library that transformer_engine_torch needs
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    kernels = Kernels(mode)
    for name in _NAMES:
        _replace_everywhere(getattr(tex, name), name, getattr(kernels, name), tex)

    for module in _modules():
        if hasattr(module, "get_cudnn_version"):
            module.get_cudnn_version = lambda: CUDNN_VERSION

    # TE compares addresses, and accepts tensors of the exact class only.
    FakeTensor.data_ptr = _data_ptr  # type: ignore[method-assign, assignment]
    choose = utils.get_attention_backend

    def choose_for_fakes(params: Any) -> Any:
        params.qkv_type = torch.Tensor
        return choose(params)

    utils.get_attention_backend = choose_for_fakes


def _modules() -> list[Any]:
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("transformer_engine")
    ]


def _replace_everywhere(old: Any, name: str, new: Callable[..., Any], owner: Any) -> None:
    setattr(owner, name, new)
    for module in _modules():  # `from transformer_engine_torch import ...`
        if getattr(module, name, None) is old:
            setattr(module, name, new)


def _data_ptr(self: FakeTensor) -> int:
    return int(self.untyped_storage()._cdata + self.storage_offset() * self.element_size())


def _without_fp8(quantizer: Any) -> None:
    if quantizer is not None:
        raise NotImplementedError("fake CUDA has no quantizers of Transformer Engine yet")


def _leading_tensors(args: Sequence[Any], count: int) -> list[Any]:
    """The first `count` tensors among the arguments."""
    return [value for value in args if isinstance(value, torch.Tensor)][:count]


def _matrix(tensor: Any) -> tuple[int, int]:
    columns = tensor.shape[-1]
    return (tensor.numel() // columns if tensor.dim() else 1), columns


def _dtype(value: Any, default: torch.dtype) -> torch.dtype:
    if value is None:
        return default
    if isinstance(value, torch.dtype):
        return value
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    dtype: torch.dtype = TE_DType_To_Torch[value]
    return dtype
