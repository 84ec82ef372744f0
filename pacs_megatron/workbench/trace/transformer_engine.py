"""Transformer Engine on fake CUDA: its own Python code, with kernels that only allocate.

Its modules, autograd functions, what they save and their collectives run unchanged. Each compiled
kernel that a step calls in bf16 or in FP8 (scales of blocks, of whole tensors, delayed) is replaced
by a function that checks devices and shapes, and allocates the outputs.
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from pacs_megatron.workbench.trace.mode import DeviceMixError, FakeCuda
from pacs_megatron.workbench.trace.seconds import IN_FP8

CUDNN_VERSION = (9, 15, 0)
_BUFFERS = ("rowwise_data", "rowwise_scale_inv", "columnwise_data", "columnwise_scale_inv")
"""of a tensor with scales of blocks; its attributes have a leading underscore"""
_BUFFERS_OF_WHOLE = ("data", "transpose", "scale_inv")
"""of a tensor with one scale; its attributes have a leading underscore"""
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
        self._check("rmsnorm_fwd", x, weight)
        dtype = _dtype(out_dtype, x.dtype)
        if quantizer is not None:
            out = self.quantize(x, quantizer, out)
        elif out is None:
            out = self._new("rmsnorm_fwd", x.shape, dtype)
        self._work("rmsnorm_fwd", 0, x, out)
        rows = x.numel() // x.shape[-1]
        return out, None, self._new("rmsnorm_fwd", (rows,), torch.float32)

    def rmsnorm_bwd(self, dz: Any, x: Any, rsigma: Any, gamma: Any, *_rest: Any) -> Any:
        self._check("rmsnorm_bwd", dz, x, rsigma, gamma)
        self._work("rmsnorm_bwd", 0, dz, x, dz)
        of_x = self._new("rmsnorm_bwd", x.shape, dz.dtype)
        of_gamma = self._new("rmsnorm_bwd", gamma.shape, gamma.dtype)
        return of_x, of_gamma

    # -------------------------------------------------------------------------------------- FP8
    def quantize(self, tensor: Any, quantizer: Any, output: Any = None, _noop: Any = None) -> Any:
        self._check("quantize", tensor)
        if output is None:
            output = self._quantized(tensor.shape, tensor.dtype, quantizer)
        elif tuple(output.size()) != tuple(tensor.shape):
            raise ValueError(f"quantize: {list(tensor.shape)} into {list(output.size())}")
        self._work("quantize", 0, tensor, output)
        return output

    def split_quantize(
        self, tensor: Any, sizes: Sequence[int], quantizers: Sequence[Any], **_options: Any
    ) -> list[Any]:
        self._check("split_quantize", tensor)
        outputs = [
            self._quantized((size, *tensor.shape[1:]), tensor.dtype, quantizer)
            for size, quantizer in zip(sizes, quantizers, strict=True)
        ]
        # One call from Python. Its kernels, one for each expert, are launched in C++.
        self._work("split_quantize", 0, tensor, *outputs)
        return outputs

    def create_empty_quantized_tensor(
        self, quantizer: Any, shape: Sequence[int], dtype: torch.dtype, *_rest: Any
    ) -> Any:
        return self._quantized(shape, dtype, quantizer)

    def fp8_transpose(self, data: Any, _dtype: Any, *, out: Any = None) -> Any:
        self._check("fp8_transpose", data, out)
        if out is None:
            shape = (data.shape[-1], *data.shape[:-1])
            out = self._new("fp8_transpose", shape, data.dtype)
        self._work("fp8_transpose", 0, data, out)
        return out

    def swap_first_dims(self, tensor: Any, *, out: Any = None) -> Any:
        self._check("swap_first_dims", tensor, out)
        if out is None:
            shape = (tensor.shape[1], tensor.shape[0], *tensor.shape[2:])
            out = self._new("swap_first_dims", shape, tensor.dtype)
        self._work("swap_first_dims", 0, tensor, out)
        return out

    def fused_multi_row_padding(self, tensor: Any, out: Any, *_rows: Any) -> None:
        self._check("fused_multi_row_padding", tensor, out)
        self._work("fused_multi_row_padding", 0, tensor, out)

    def fused_multi_row_unpadding(self, tensor: Any, out: Any, *_rows: Any) -> None:
        self.fused_multi_row_padding(tensor, out)

    def fused_amax_and_scale_update_after_reduction(self, amax: Any, *_rest: Any) -> None:
        """Of delayed scaling, after all updates of a step."""
        self._check("fused_amax_and_scale_update_after_reduction", amax)
        self._work("fused_amax_and_scale_update_after_reduction", 0, amax)

    def _quantized(self, shape: Sequence[int], dtype: torch.dtype, quantizer: Any) -> Any:
        """Data and scales of blocks, whose shapes the quantizer computes, or of a whole tensor.

        Raises NotImplementedError for a quantizer with other scales.
        """
        from transformer_engine.pytorch.tensor import float8_blockwise_tensor as blockwise
        from transformer_engine.pytorch.tensor import float8_tensor as whole

        if isinstance(quantizer, whole.Float8Quantizer | whole.Float8CurrentScalingQuantizer):
            return self._quantized_whole(shape, dtype, quantizer)
        if not isinstance(quantizer, blockwise.Float8BlockQuantizer):
            raise NotImplementedError(
                f"fake CUDA has no kernels of {type(quantizer).__name__}: MXFP8 and NVFP4 are not "
                "of Hopper"
            )
        buffers: dict[str, Any] = dict.fromkeys(_BUFFERS)
        if quantizer.rowwise_usage:
            scales = quantizer.get_scale_shape(shape, columnwise=False)
            buffers["rowwise_data"] = self._new("quantize", shape, torch.uint8)
            buffers["rowwise_scale_inv"] = self._new("quantize", scales, torch.float32)
        if quantizer.columnwise_usage:
            columns = quantizer.get_columnwise_shape(shape)
            scales = quantizer.get_scale_shape(shape, columnwise=True)
            buffers["columnwise_data"] = self._new("quantize", columns, torch.uint8)
            buffers["columnwise_scale_inv"] = self._new("quantize", scales, torch.float32)

        options: dict[str, Any] = {
            "fp8_dtype": quantizer.dtype,
            "quantizer": quantizer,
            "is_2D_scaled": quantizer.block_scaling_dim == 2,
        }
        if hasattr(quantizer, "all_gather_usage"):  # until Transformer Engine 2.15
            import transformer_engine_torch as tex

            formats = tex.Float8BlockScaleTensorFormat
            is_compact = quantizer.all_gather_usage
            options["data_format"] = formats.COMPACT if is_compact else formats.GEMM_READY
        else:
            options["fake_dtype"] = dtype
        if quantizer.internal:
            return blockwise.Float8BlockwiseQTensorStorage(**buffers, **options)
        return blockwise.Float8BlockwiseQTensor(
            shape=tuple(shape), dtype=dtype, **buffers, **options
        )

    def _quantized_whole(self, shape: Sequence[int], dtype: torch.dtype, quantizer: Any) -> Any:
        """Data and one scale. Hopper's products need a transposed copy for the other operand."""
        from transformer_engine.pytorch.tensor import float8_tensor as whole

        scale_inv = self._new("quantize", (1,), torch.float32)
        if getattr(quantizer, "with_amax_reduction", False):
            # Inside the kernel, over the ranks that have parts of the tensor.
            dist.all_reduce(scale_inv, dist.ReduceOp.MAX, group=quantizer.amax_reduction_group)

        data = None
        transpose = None
        if quantizer.rowwise_usage:
            data = self._new("quantize", shape, torch.uint8)
        if quantizer.columnwise_usage:
            transpose = self._new("quantize", (shape[-1], *shape[:-1]), torch.uint8)

        options: dict[str, Any] = {
            "data": data,
            "data_transpose": transpose,
            "fp8_scale_inv": scale_inv,
            "fp8_dtype": quantizer.dtype,
            "quantizer": quantizer,
        }
        storage = whole.Float8TensorStorage
        if quantizer.internal:
            if "fake_dtype" in inspect.signature(storage.__new__).parameters:
                options["fake_dtype"] = dtype
            return storage(**options)
        return whole.Float8Tensor(shape=tuple(shape), dtype=dtype, **options)

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
        self._check("generic_gemm", a, b, out, bias)
        rows_a, columns_a = _matrix(a)
        rows_b, columns_b = _matrix(b)
        inner_a = columns_a if transpose_a else rows_a
        inner_b = rows_b if transpose_b else columns_b
        if inner_a != inner_b:
            raise ValueError(f"generic_gemm: {list(a.size())} and {list(b.size())} do not fit")

        shape = [columns_b] if transpose_b else list(b.size()[:-1])
        shape.append(rows_a if transpose_a else columns_a)
        if out is None:
            dtype = _dtype(out_dtype, getattr(a, "dtype", torch.bfloat16))
            if quantizer is not None:
                out = self._quantized(shape, dtype, quantizer)
            else:
                out = self._new("generic_gemm", shape, dtype)
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
        # Transformer Engine starts one product for each expert.
        self._work("te_general_grouped_gemm", flops, *a, *b, *(out or []), kernels=len(a))
        return rest[2]  # the bias

    # -------------------------------------------------------------------------------- attention
    def get_fused_attn_backend(self, *args: Any) -> Any:
        import transformer_engine_torch as tex

        backend = tex.NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen
        if len(args) == 1:  # from Transformer Engine 2.20 on: one object, and a message beside
            return backend, ""
        return backend

    def fused_attn_fwd(self, max_q: int, max_kv: int, training: bool, *rest: Any, **_o: Any) -> Any:
        """`rest` has options, whose number depends on the version, and then the tensors."""
        bounds_q, bounds_kv, q, k, v = _leading_tensors(rest, 5)
        self._check("fused_attn_fwd", bounds_q, bounds_kv, q, k, v)
        out = self._new("fused_attn_fwd", (*q.shape[:-1], v.shape[-1]), q.dtype)
        lens = self._lens(bounds_q, max_q), self._lens(bounds_kv, max_kv)
        flops = _attention_flops(q, *lens, is_causal=_is_causal(rest))
        self._work("fused_attn_fwd", flops, q, k, v, out)
        if not training:
            return [out]
        # With cuDNN from 9.6 on, the statistics of packed samples are [tokens, heads, 1].
        statistics = self._new("fused_attn_fwd", (q.shape[0], q.shape[1], 1), torch.float32)
        state = self._new("fused_attn_fwd", (2,), torch.int64)
        return [out, statistics, state]

    def fused_attn_bwd(self, max_q: int, max_kv: int, *rest: Any, **_options: Any) -> Any:
        bounds_q, bounds_kv, q, k, v, out, of_out = _leading_tensors(rest, 7)
        self._check("fused_attn_bwd", bounds_q, bounds_kv, q, k, v, out, of_out)
        lens = self._lens(bounds_q, max_q), self._lens(bounds_kv, max_kv)
        flops = _FLOPS_OF_BACKWARD * _attention_flops(q, *lens, is_causal=_is_causal(rest))
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

    # ---------------------------------------------------- attention over context-parallel ranks
    def thd_read_half_tensor(self, tensor: Any, bounds: Any, _half: int) -> Any:
        """[tokens, heads, dim], or keys and values together [2, tokens, heads, dim]."""
        self._check("thd_read_half_tensor", tensor, bounds)
        shape = list(tensor.shape)
        shape[-3] //= 2
        half = self._new("thd_read_half_tensor", shape, tensor.dtype)
        self._work("thd_read_half_tensor", 0, half, half)
        return half

    def thd_read_second_half_lse(self, sums: Any, bounds: Any, is_packed: bool, length: int) -> Any:
        """Of [heads, tokens], or of [samples, heads, tokens]."""
        self._check("thd_read_second_half_lse", sums, bounds)
        shape = [sums.shape[0], length] if is_packed else [*sums.shape[:2], length]
        half = self._new("thd_read_second_half_lse", shape, sums.dtype)
        self._work("thd_read_second_half_lse", 0, half, half)
        return half

    def thd_second_half_lse_correction(self, sums: Any, of_step: Any, bounds: Any, *_: Any) -> None:
        self._check("thd_second_half_lse_correction", sums, of_step, bounds)
        self._work("thd_second_half_lse_correction", 0, of_step, of_step, of_step)

    def thd_out_correction(
        self, out: Any, of_step: Any, sums: Any, new: Any, sums_of_step: Any, bounds: Any, *_: Any
    ) -> None:
        self._check("thd_out_correction", out, of_step, sums, new, sums_of_step, bounds)
        self._work("thd_out_correction", 0, of_step, of_step, of_step, sums, new)

    def thd_grad_correction(self, gradient: Any, of_step: Any, bounds: Any, *_: Any) -> None:
        self._check("thd_grad_correction", gradient, of_step, bounds)
        self._work("thd_grad_correction", 0, gradient, of_step, gradient)

    def thd_get_partitioned_indices(self, bounds: Any, tokens: int, ranks: int, _rank: int) -> Any:
        self._check("thd_get_partitioned_indices", bounds)
        return self._new("thd_get_partitioned_indices", (tokens // ranks,), torch.int32)

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

    def _work(self, kernel: str, flops: float, *tensors: Any, kernels: int = 1) -> None:
        sizes = [tensor.numel() * tensor.element_size() for tensor in _plain(tensors)]
        is_fp8 = flops > 0 and any(_is_quantized(tensor) for tensor in tensors)
        name = f"te.{kernel}{IN_FP8}" if is_fp8 else f"te.{kernel}"
        self._mode.work.add(self._mode.phase, name, flops, sum(sizes), kernels)

    def _check(self, kernel: str, *tensors: Any) -> None:
        """A kernel takes pointers: one to host memory is an illegal access."""
        for tensor in _plain(tensors):
            if tensor.numel() and not tensor.is_cuda:
                raise DeviceMixError(f"te.{kernel}: a CPU tensor {list(tensor.shape)}")

    def _lens(self, bounds: Any, longest: int) -> torch.Tensor:
        """Lengths of packed samples by their bounds; all the longest where these are not known."""
        known = self._mode.shadow(bounds)
        if known is None:
            return torch.full((bounds.numel() - 1,), float(longest), dtype=torch.float64)
        lens: torch.Tensor = known.diff().double()
        return lens


_NAMES = (
    "rmsnorm_fwd",
    "rmsnorm_bwd",
    "quantize",
    "split_quantize",
    "create_empty_quantized_tensor",
    "fp8_transpose",
    "swap_first_dims",
    "fused_multi_row_padding",
    "fused_multi_row_unpadding",
    "fused_amax_and_scale_update_after_reduction",
    "generic_gemm",
    "te_general_grouped_gemm",
    "get_fused_attn_backend",
    "fused_attn_fwd",
    "fused_attn_bwd",
    "fused_rope_forward",
    "fused_rope_backward",
    "thd_read_half_tensor",
    "thd_read_second_half_lse",
    "thd_second_half_lse_correction",
    "thd_out_correction",
    "thd_grad_correction",
    "thd_get_partitioned_indices",
    "multi_tensor_adam",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
)


def replace_kernels(mode: FakeCuda) -> None:
    """Replaces the kernels for the rest of this process; before the first import of Megatron."""
    # Loads the library that transformer_engine_torch needs.
    import transformer_engine.pytorch  # noqa: F401
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    kernels = Kernels(mode)
    for name in _NAMES:
        if hasattr(tex, name):  # `create_empty_quantized_tensor` is new in 2.20
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
    _reject_old_permutation()


def _reject_old_permutation() -> None:
    """Of experts' tokens: in Transformer Engine 2.11 no custom operator, but Triton's kernels."""
    from transformer_engine.pytorch import permutation

    if hasattr(permutation, "moe_permute_mask_map_forward"):
        return

    def reject(*_args: Any) -> None:
        raise NotImplementedError(
            "a trace of experts needs a Transformer Engine whose permutation is a custom operator, "
            "as in 2.20; install the versions of requirements/gpu.txt"
        )

    permutation.triton_permutation.make_row_id_map = reject


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


def _is_quantized(tensor: Any) -> bool:
    return hasattr(tensor, "_rowwise_data") or hasattr(tensor, "_scale_inv")


def _plain(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors, and the buffers of quantized ones."""
    plain: list[torch.Tensor] = []
    for tensor in tensors:
        names: tuple[str, ...] = ()
        if hasattr(tensor, "_rowwise_data"):
            names = _BUFFERS
        elif hasattr(tensor, "_scale_inv"):
            names = _BUFFERS_OF_WHOLE

        if names:
            buffers = [getattr(tensor, f"_{name}") for name in names]
            plain.extend(buffer for buffer in buffers if buffer is not None)
        elif isinstance(tensor, torch.Tensor):
            plain.append(tensor)
    return plain


def _is_causal(options: Sequence[Any]) -> bool:
    """By the kind of mask among a kernel's options."""
    import transformer_engine_torch as tex

    masks = [option for option in options if isinstance(option, tex.NVTE_Mask_Type)]
    return any("CAUSAL" in str(mask) for mask in masks)


def _attention_flops(
    q: Any, lens: torch.Tensor, lens_kv: torch.Tensor, *, is_causal: bool
) -> float:
    """Of two products over packed samples, with a causal mask half of each."""
    pairs = float((lens * lens_kv).sum())
    return (2 if is_causal else 4) * pairs * int(q.shape[-2]) * int(q.shape[-1])


def _leading_tensors(args: Sequence[Any], count: int) -> list[Any]:
    """The first `count` tensors among the arguments."""
    return [value for value in args if isinstance(value, torch.Tensor)][:count]


def _matrix(tensor: Any) -> tuple[int, int]:
    shape = tuple(tensor.size())
    return math.prod(shape[:-1]), shape[-1]


def _dtype(value: Any, default: torch.dtype) -> torch.dtype:
    if value is None:
        return default
    if isinstance(value, torch.dtype):
        return value
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    dtype: torch.dtype = TE_DType_To_Torch[value]
    return dtype
