"""Real Transformer Engine modules on a host without a GPU.

Constructors, parameters, attributes, state dicts, FP8 recipe state and FusedAdam are Transformer
Engine's own; forwards and kernels are torch's. Import this module before `pacs_megatron` and
`megatron`: the CUDA branch of the policy then runs on the CPU. With FP8 the products are emulated,
see `fp8_emulation`.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import inspect
import itertools
import os
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "1"
os.environ["TORCH_COMPILE_DISABLE"] = (
    "1"  # Megatron and Transformer Engine compile fused functions; here that costs minutes
)

import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from torch import Tensor
from transformer_engine.pytorch import distributed, quantization
from transformer_engine.pytorch.distributed import (
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)
from transformer_engine.pytorch.optimizers import fused_adam
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from pacs_megatron.parallel import cpu_redirects
from pacs_megatron.policy import precision
from pacs_megatron.runtime import environment
from tests.te.fp8_emulation import product

ENGINE = environment.parse_version(importlib.metadata.version("transformer-engine"))
MEGATRON = environment.parse_version(importlib.metadata.version("megatron-core"))
assert ENGINE is not None and MEGATRON is not None
MACHINE = precision.Machine(
    cuda=True,
    capability=(9, 0),
    cuda_version=(13, 0),
    transformer_engine=ENGINE,
    apex="none",
    megatron=MEGATRON,
)
CALLS: dict[str, int] = {}
"""Forwards of each kind of module, so that a test can see that Transformer Engine's modules ran."""


def _counted(kind: str) -> None:
    CALLS[kind] = CALLS.get(kind, 0) + 1


# --------------------------------------------------------------------------------------------------
# modules
@contextlib.contextmanager
def _prepared(module: Any, num_gemms: int = 1) -> Iterator[None]:
    """`prepare_forward` of Transformer Engine's base module without its check for a CUDA tensor."""
    if not FP8GlobalStateManager.is_fp8_enabled():
        module.init_fp8_metadata(num_gemms=num_gemms)
        yield
        return
    if module.fp8_initialized and in_fp8_activation_recompute_phase():
        delayed = module.fp8_meta["recipe"].delayed()
        FP8GlobalStateManager.get_old_fp8_meta_tensors_for_recompute(module.fp8_meta)
        yield
        if delayed:
            FP8GlobalStateManager.restore_fp8_meta_tensors(module.fp8_meta)
        return
    module.init_fp8_metadata(num_gemms=num_gemms)
    if module.fp8_meta["recipe"].delayed():
        if module.sequence_parallel:
            assert module.fp8_meta["recipe"].reduce_amax
        FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(module.fp8_meta)
        # Transformer Engine 2.15 and later keep the scales of a module in evaluation mode too.
        is_kept = module.training or ENGINE >= (2, 15)
        if is_kept and is_fp8_activation_recompute_enabled():
            FP8GlobalStateManager.copy_forward_fp8_meta_tensors_for_recompute(module.fp8_meta)
    yield


def _linear(
    module: Any, x: Tensor, weight: Tensor, is_first_microbatch: bool | None, gemm: int = 0
) -> Tensor:
    if FP8GlobalStateManager.is_fp8_enabled():
        return product(module, x, weight, is_first_microbatch, gemm)
    return F.linear(x, weight)


def _columns(module: Any, x: Tensor) -> Tensor:
    from megatron.core import tensor_parallel

    if module.tp_size == 1:
        return x
    if module.sequence_parallel:
        if (
            FP8GlobalStateManager.is_fp8_enabled()
            and module.fp8_meta["recipe"].float8_block_scaling()
        ):
            # transformer_engine/pytorch/utils.py, assert_dim_for_all_gather
            tokens = x[..., 0].numel()
            width = x.shape[-1]
            assert tokens % 128 == 0 and width % 128 == 0, (
                f"an all-gather in blocks of 128 got {tuple(x.shape)}"
            )
        gathered: Tensor = tensor_parallel.gather_from_sequence_parallel_region(x)
        return gathered
    copied: Tensor = tensor_parallel.copy_to_tensor_model_parallel_region(x)
    return copied


def _layernorm_linear(
    self: Any, inp: Tensor, is_first_microbatch: bool | None = None, **_options: Any
) -> Tensor:
    _counted("LayerNormLinear")
    with _prepared(self):
        normed = F.rms_norm(inp, (inp.shape[-1],), self.layer_norm_weight, self.eps)
        out = _linear(self, _columns(self, normed), self.weight, is_first_microbatch)
    return out + self.bias if self.use_bias else out


def _te_linear(
    self: Any, inp: Tensor, is_first_microbatch: bool | None = None, **_options: Any
) -> Tensor:
    from megatron.core import tensor_parallel

    _counted("Linear")
    with _prepared(self):
        x = _columns(self, inp) if self.parallel_mode == "column" else inp
        out = _linear(self, x, self.weight, is_first_microbatch)
    if self.parallel_mode == "row" and self.tp_size > 1:
        reduce = (
            tensor_parallel.reduce_scatter_to_sequence_parallel_region
            if self.sequence_parallel
            else tensor_parallel.reduce_from_tensor_model_parallel_region
        )
        out = reduce(out)
    return out + self.bias if self.use_bias else out


def _grouped_linear(
    self: Any,
    inp: Tensor,
    m_splits: Tensor | list[int],
    is_first_microbatch: bool | None = None,
    **_options: Any,
) -> Tensor:
    _counted("GroupedLinear")
    sizes = [int(size) for size in m_splits]
    assert len(sizes) == self.num_gemms
    pieces = torch.split(inp.reshape(-1, inp.shape[-1]), sizes)
    with _prepared(self, self.num_gemms):
        return torch.cat(
            [
                _linear(self, x, getattr(self, f"weight{i}"), is_first_microbatch, i)
                for i, x in enumerate(pieces)
            ]
        )


def _rms_norm(self: Any, x: Tensor) -> Tensor:
    _counted("RMSNorm")
    return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def _attention(self: Any, q: Tensor, k: Tensor, v: Tensor, *_args: Any, **options: Any) -> Tensor:
    """Packed sequences (`thd`) only, causal inside of each."""
    _counted("DotProductAttention")
    assert options["qkv_format"] == "thd" and options["attn_mask_type"] == "padding_causal"
    assert q.dim() == 3 and options["cu_seqlens_q"].dtype == torch.int32
    bounds = options["cu_seqlens_q"].tolist()
    assert bounds[-1] == q.shape[0], "the last bound is the number of tokens"
    outs = []
    for start, stop in itertools.pairwise(bounds):
        one = [t[start:stop].transpose(0, 1)[None] for t in (q, k, v)]
        attended = F.scaled_dot_product_attention(
            *one, is_causal=True, scale=self.unfused_attention.softmax_scale, enable_gqa=True
        )
        outs.append(attended[0].transpose(0, 1))
    return torch.cat(outs).reshape(q.shape[0], -1)


# --------------------------------------------------------------------------------------------------
# kernels
def _multi_tensor_adam(
    _chunk: int,
    _overflow: Tensor,
    lists: list[list[Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    _mode: int,
    bias_correction: int,
    weight_decay: float,
    *_rest: Any,
) -> None:
    correct1 = 1 - beta1**step if bias_correction else 1.0
    correct2 = 1 - beta2**step if bias_correction else 1.0
    for grad, param, mean, variance, *masters in zip(*lists, strict=True):
        g = grad.float()
        master = (masters or [param.float()])[0]
        # Transformer Engine 2.15 and later pass bf16 moments, which the kernel reads and writes.
        new_mean = mean.float().mul_(beta1).add_(g, alpha=1 - beta1)
        new_variance = variance.float().mul_(beta2).addcmul_(g, g, value=1 - beta2)
        root = (new_variance / correct2).sqrt()
        update = (new_mean / correct1) / (root + eps) + weight_decay * master
        mean.copy_(new_mean)
        variance.copy_(new_variance)
        master.copy_(master - lr * update)
        param.copy_(master.to(param.dtype))


def _permute(
    tokens: Tensor, routing_map: Tensor, num_out_tokens: int | None = None, **_options: Any
) -> tuple[Tensor, Tensor]:
    """Tokens [t, h] in the order of their experts, and the row of each: int64 [n]."""
    _counted("permute")
    rows = routing_map.bool().t().nonzero()[:, 1]
    assert num_out_tokens in (None, len(rows))
    return tokens.index_select(0, rows), rows


def _permute_with_probs(
    tokens: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_permute`; probs [t, experts] become [n], in the same order."""
    permuted, rows = _permute(tokens, routing_map, num_out_tokens)
    return permuted, probs.t().masked_select(routing_map.bool().t()), rows


def _unpermute(
    tokens: Tensor, rows: Tensor, *, restore_shape: Any, merging_probs: Any = None, **_options: Any
) -> Tensor:
    """[t, h]: the sum of each token's rows in fp32, always in the same order, as the kernel's."""
    _counted("unpermute")
    assert merging_probs is None
    total = torch.zeros(restore_shape, dtype=torch.float32)
    return total.index_add(0, rows, tokens.float()).to(tokens.dtype)


def _sort_chunks(tokens: Tensor, sizes: Tensor, order: Tensor) -> Tensor:
    """The chunks of these sizes in another order."""
    chunks = torch.split(tokens, sizes.tolist())
    return torch.cat([chunks[index] for index in order.tolist()])


def _sort_chunks_with_probs(
    tokens: Tensor, probs: Tensor, sizes: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    return _sort_chunks(tokens, sizes, order), _sort_chunks(probs, sizes, order)


def _replace_forwards() -> None:
    te.LayerNormLinear.forward = _layernorm_linear
    te.Linear.forward = _te_linear
    te.GroupedLinear.forward = _grouped_linear
    te.RMSNorm.forward = _rms_norm
    te.DotProductAttention.forward = _attention
    kernels = {name: getattr(tex, name) for name in dir(tex) if not name.startswith("__")}
    fused_adam.tex = type(
        "tex", (), kernels | {"multi_tensor_adam": staticmethod(_multi_tensor_adam)}
    )


class _Properties:
    major = 9
    minor = 0
    multi_processor_count = 132
    name = "NVIDIA H200"


def _redirect_torch() -> None:
    """Transformer Engine's modules get the project's stand-in for `torch`, which claims an H200."""
    stand_in = cpu_redirects._STAND_IN
    cuda: Any = stand_in.cuda
    cuda.is_available = lambda: True
    cuda.is_current_stream_capturing = lambda: False
    cuda.get_device_capability = lambda *_args: (9, 0)
    cuda.get_device_properties = lambda *_args: _Properties
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine") and getattr(module, "torch", None) is torch:
            module.__dict__["torch"] = stand_in
    for check in ("check_fp8_support", "check_fp8_block_scaling_support"):
        setattr(quantization, check, lambda: (True, ""))
    tex.fused_multi_row_padding = tex.fused_multi_row_unpadding = _copy_rows
    distributed._get_cuda_rng_state = lambda *_args, **_options: torch.get_rng_state()
    distributed._set_cuda_rng_state = lambda state, *_args, **_options: torch.set_rng_state(state)
    cpu_redirects._CUDA_ONLY = ("apex", "amp_C")


def _copy_rows(
    source: Tensor, target: Tensor, source_rows: list[int], target_rows: list[int]
) -> None:
    """The kernel of Fp8Padding and Fp8Unpadding: the rows of each expert, with rows of zeros at
    their end or without.
    """
    target.zero_()
    for given, placed in zip(source.split(source_rows), target.split(target_rows), strict=True):
        rows = min(len(given), len(placed))
        placed[:rows].copy_(given[:rows])


def _patch_megatron() -> None:
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.optimizer import clip_grads, optimizer
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.utils import (
        local_multi_tensor_applier,
        local_multi_tensor_l2_norm,
        local_multi_tensor_scale,
    )

    for module in (clip_grads, optimizer):
        module.multi_tensor_applier = local_multi_tensor_applier
        module.multi_tensor_scale_impl = local_multi_tensor_scale
    clip_grads.l2_norm_impl = local_multi_tensor_l2_norm
    moe_utils.te_general_gemm = None
    moe_utils.fused_permute = _permute
    moe_utils.fused_permute_with_probs = _permute_with_probs
    moe_utils.fused_unpermute = _unpermute
    moe_utils.fused_sort_chunks_by_index = _sort_chunks
    moe_utils.fused_sort_chunks_by_index_with_probs = _sort_chunks_with_probs

    def fused_rope(
        t: Tensor,
        bounds: Tensor,
        freqs: Tensor,
        cp_size: int = 1,
        cp_rank: int = 0,
        interleaved: bool = False,
    ) -> Tensor:
        assert not interleaved

        class Group:
            size = staticmethod(lambda: cp_size)
            rank = staticmethod(lambda: cp_rank)

        rotated: Tensor = rope_utils._apply_rotary_pos_emb_thd(t, bounds, freqs, cp_group=Group)
        return rotated

    rope_utils.fused_apply_rotary_pos_emb_thd = fused_rope


def _off_load_to_the_cpu() -> None:
    """Every tensor is on the CPU here; Megatron's choice of the tensors to move goes by their
    device.
    """
    from megatron.core.optimizer.cpu_offloading import hybrid_optimizer

    hybrid = hybrid_optimizer.HybridDeviceOptimizer
    source = textwrap.dedent(inspect.getsource(hybrid._get_sub_optimizer_param_groups))
    changes = {
        "if param.is_cuda:\n            ": "if not cpu_copy:\n            ",
        "param.is_cuda": "True",
        ".pin_memory()": "",
    }
    for old, new in changes.items():
        assert old in source, old
        source = source.replace(old, new)
    exec(source, hybrid_optimizer.__dict__)  # noqa: S102  (Megatron's own text)
    hybrid._get_sub_optimizer_param_groups = hybrid_optimizer.__dict__[
        "_get_sub_optimizer_param_groups"
    ]
    start = hybrid._init_sub_optimizers

    def without_pinned_memory(self: Any) -> None:
        self.pin_cpu_grads = False
        start(self)

    hybrid._init_sub_optimizers = without_pinned_memory


def install() -> None:
    """Once a process, before Megatron is imported."""
    assert "megatron.core" not in sys.modules, "import tests.te.stand_ins before megatron"
    _redirect_torch()
    _replace_forwards()
    precision.inspect_machine = lambda: MACHINE
    # Transformer Engine's attention has no fp32; its stand-in has, so fp32 can be compared with the
    # local layers.
    precision.uses_transformer_engine = lambda _dtype, _machine: True
    cpu_redirects.install()
    importlib.import_module("pacs_megatron.policy.model")
    _patch_megatron()
    _off_load_to_the_cpu()


install()
