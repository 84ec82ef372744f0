"""Megatron's gated delta net inside this project's layers. Needs Megatron-Core 0.19."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.extensions import transformer_engine as te_extension
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class HeadNorm(torch.nn.Module):
    """RMSNorm of each value head by a weight that all heads share, not shifted by 1.

    Tensor-parallel ranks have different heads, so the backward pass sums the weight's gradient over
    them. Megatron sums it only with sequence parallelism.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, x: Tensor) -> Tensor:
        weight = tensor_parallel.copy_to_tensor_model_parallel_region(self.weight)
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)


class DeltaNet(GatedDeltaNet):
    """Megatron's gated delta net, whose decay is computed in fp32, as by transformers and SGLang.

    Megatron computes exp(A_log) in bf16 where the weights are bf16.
    """

    def _compute_g_and_beta(
        self, log_rate: Tensor, dt_bias: Tensor, alpha: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        rate = log_rate.float().exp()
        return -rate * F.softplus(alpha.float() + dt_bias.float()), beta.sigmoid()

    def _resolve_cu_seqlens(
        self, padded: Tensor | None, actual: Tensor, *_compared: Any, **_options: Any
    ) -> Tensor:
        """The bounds of the samples. Megatron also compares their values on the host, which waits
        for the GPU four times in each layer.
        """
        return actual if padded is None else padded


def replace_attention(layer: ModuleSpec, *, transformer_engine: bool) -> None:
    """Puts a gated delta net in the place of the attention.

    Transformer Engine fuses the norm before it with its first projection, as before an attention.
    """
    in_proj: Any = ColumnParallelLinear
    out_proj: Any = RowParallelLinear
    if transformer_engine:
        in_proj = te_extension.TELayerNormColumnParallelLinear
        out_proj = te_extension.TERowParallelLinear
        layer.submodules.input_layernorm = IdentityOp
    else:
        names = layer.submodules.sharded_state_dict_keys_map
        names["input_layernorm."] = "self_attention.in_proj.layer_norm_"
    layer.submodules.self_attention = ModuleSpec(
        module=DeltaNet,
        submodules=GatedDeltaNetSubmodules(in_proj=in_proj, out_norm=HeadNorm, out_proj=out_proj),
    )
