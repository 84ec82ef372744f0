"""The kernels that SGLang's backend of gated delta nets imports from here (see delta_nets.py)."""

from sglang.kernels.ops.attention.fla import layernorm_gated

from sgl_kernel.delta_nets import (
    causal_conv1d_fn_cpu,
    causal_conv1d_update_cpu,
    chunk_gated_delta_rule_cpu,
)

__all__ = ["causal_conv1d_fn_cpu", "causal_conv1d_update_cpu", "chunk_gated_delta_rule_cpu"]

# Otherwise this norm is a Triton kernel on CPUs without AMX.
layernorm_gated._use_cpu = True
