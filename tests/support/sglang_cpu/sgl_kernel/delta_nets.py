"""CPU replacement of SGLang's kernels for gated delta nets and gated attention.

SGLang's own need a CPU with AMX. These follow the papers (Yang et al., arXiv:2412.06464) token by
token, in fp32. `tests/integration/sglang/weights/test_checksums_hybrids.py` compares a server that
runs them with transformers.
"""

from typing import Any

import torch

Tensor = torch.Tensor
NORM_EPS = 1e-6
"""Of the lengths of queries and keys"""


def causal_conv1d_fn_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    activation: str,
    conv_states: Tensor,
    has_initial_state: Tensor,
    cache_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens_cpu: Any = None,
) -> Tensor:
    """Convolves the new tokens of each request, after the tokens that its state remembers.

    Args:
        x: [channels, tokens], one request after the other.
        weight: [channels, width].
        bias: [channels].
        activation: of the result.
        conv_states: [slots, channels, width - 1]; changed.
        has_initial_state: [requests], whether the slot has tokens of the same request.
        cache_indices: [requests], slots.
        query_start_loc: [requests + 1], first token of each request.
        seq_lens_cpu: not needed.

    Returns:
        [channels, tokens].
    """
    bounds = query_start_loc.tolist()
    out = torch.zeros_like(x)
    for number, slot in enumerate(cache_indices.tolist()):
        begin, end = bounds[number : number + 2]
        state = conv_states[slot]
        if not has_initial_state[number]:
            state.zero_()
        out[:, begin:end] = _convolved(x[:, begin:end], state, weight, bias, activation)
    return out


def causal_conv1d_update_cpu(
    x: Tensor,
    conv_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    *,
    conv_state_indices: Tensor,
) -> Tensor:
    """As `causal_conv1d_fn_cpu` with one new token of each request: x is [requests, channels]."""
    out = torch.empty_like(x)
    for number, slot in enumerate(conv_state_indices.tolist()):
        new = x[number][:, None]
        out[number] = _convolved(new, conv_states[slot], weight, bias, activation)[:, 0]
    return out


def _convolved(
    new: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """The convolution of `new` [channels, tokens] after `state`, which then has the last tokens."""
    assert activation in ("silu", "swish")
    width = weight.shape[1]
    seen = torch.cat([state.to(new.dtype), new], dim=1)
    state.copy_(seen[:, seen.shape[1] - (width - 1) :])
    windows = seen.float().unfold(1, width, 1)
    total = (windows * weight.float()[:, None]).sum(-1)
    if bias is not None:
        total = total + bias.float()[:, None]
    return torch.nn.functional.silu(total).to(new.dtype)


def chunk_gated_delta_rule_cpu(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    cu_seqlens: Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, None, None]:
    """The delta rule over the new tokens of each request.

    Args:
        q: [1, tokens, key heads, key dim].
        k: as q.
        v: [1, tokens, value heads, value dim].
        g: float32 [1, tokens, value heads], logarithm of the decay.
        beta: [1, tokens, value heads], strength of the update.
        initial_state: float32 [slots, value heads, value dim, key dim]; changed.
        initial_state_indices: [requests], slots.
        cu_seqlens: [requests + 1], first token of each request.
        head_first: False.
        use_qk_l2norm_in_kernel: True.

    Returns:
        [1, tokens, value heads, value dim], and two values that the CPU backend does not read.
    """
    assert not head_first
    assert use_qk_l2norm_in_kernel
    heads = v.shape[2]
    query = _of_value_heads(q[0], heads) * q.shape[-1] ** -0.5
    key = _of_value_heads(k[0], heads)
    value = v[0].float()
    decay = g[0].float().exp()
    strength = beta[0].float()

    out = torch.empty_like(v)
    bounds = cu_seqlens.tolist()
    for number, slot in enumerate(initial_state_indices.tolist()):
        state = initial_state[slot].float()
        for token in range(bounds[number], bounds[number + 1]):
            state = state * decay[token][:, None, None]
            read = torch.einsum("hvk,hk->hv", state, key[token])
            change = (value[token] - read) * strength[token][:, None]
            state = state + torch.einsum("hv,hk->hvk", change, key[token])
            out[0, token] = torch.einsum("hvk,hk->hv", state, query[token]).to(v.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    return out, None, None


def _of_value_heads(x: Tensor, heads: int) -> Tensor:
    """float32 [tokens, value heads, key dim] of length 1, from [tokens, key heads, key dim]."""
    wide = x.float()
    length = (wide.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
    return (wide * length).repeat_interleave(heads // x.shape[1], dim=1)


def _gates(log_rate: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [1, tokens, value heads]: logarithm of the decay, and strength of the update."""
    rate = log_rate.float().exp()
    log_decay = -rate * torch.nn.functional.softplus(a.float() + bias.float())
    return log_decay[None], b.float().sigmoid()[None]


def _decode(
    log_rate: Tensor,
    bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    states: Tensor,
    slots: Tensor,
    bounds: Tensor,
    normalised: bool,
    beta: float,
    threshold: float,
) -> Tensor:
    """Gates and delta rule of one new token of each request."""
    assert beta == 1.0
    g, strength = _gates(log_rate, a, b, bias)
    out, _, _ = chunk_gated_delta_rule_cpu(
        q=q,
        k=k,
        v=v,
        g=g,
        beta=strength,
        initial_state=states,
        initial_state_indices=slots,
        cu_seqlens=bounds,
        head_first=False,
        use_qk_l2norm_in_kernel=normalised,
    )
    return out


def _split(
    qkvz: Tensor, ba: Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values together; gates [tokens, value heads, value dim]; b; a."""
    values = value_heads * value_dim
    qkv, z = qkvz.split([2 * key_heads * key_dim + values, values], dim=-1)
    b, a = ba.split([value_heads, value_heads], dim=-1)
    gates = z.reshape(len(z), value_heads, value_dim)
    return qkv.contiguous(), gates.contiguous(), b.contiguous(), a.contiguous()


def _zero_centred(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / its root mean square * (1 + weight)."""
    wide = x.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * (1.0 + weight.float())).to(x.dtype)


def _query_and_key_norms(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Each [tokens * heads, head dim]."""
    query = _zero_centred(q.reshape(-1, head_dim), q_weight, eps)
    return query, _zero_centred(k.reshape(-1, head_dim), k_weight, eps)


def _query_and_key_norms_with_gate(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `_query_and_key_norms`, and the gates; a head's gate comes after its query."""
    q, gate = q_gate.reshape(-1, num_heads, 2 * head_dim).chunk(2, dim=-1)
    query, key = _query_and_key_norms(q, k, q_weight, k_weight, eps, head_dim)
    return query, key, gate.reshape(-1, head_dim).contiguous()


def _gated(x: Tensor, gate: Tensor) -> None:
    """Multiplies x by the sigmoid of the gate, in place."""
    x.mul_(gate.reshape(x.shape).float().sigmoid().to(x.dtype))


def _gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """The norm of a head of a delta net, times weight, then times the SiLU of the gate."""
    wide = x.float()
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    gates = torch.nn.functional.silu(gate.float())
    return (wide * scale * weight.float() * gates).to(x.dtype)


OPERATORS: dict[str, tuple[str, Any]] = {
    "fused_gdn_gating_cpu": (
        "(Tensor A_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)",
        _gates,
    ),
    "fused_sigmoid_gating_delta_rule_update_cpu": (
        "(Tensor A_log, Tensor dt_bias, Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, "
        "Tensor(a!) initial_state_source, Tensor initial_state_indices, Tensor cu_seqlens, "
        "bool use_qk_l2norm_in_kernel, float softplus_beta, float softplus_threshold) -> Tensor",
        _decode,
    ),
    "fused_qkvzba_split_reshape_cat_contiguous_cpu": (
        "(Tensor qkvz, Tensor ba, int key_heads, int value_heads, int key_dim, int value_dim) -> "
        "(Tensor, Tensor, Tensor, Tensor)",
        _split,
    ),
    "fused_qk_gemma_rmsnorm_cpu": (
        "(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim) -> "
        "(Tensor, Tensor)",
        _query_and_key_norms,
    ),
    "fused_qk_gemma_rmsnorm_with_gate_cpu": (
        "(Tensor q_gate, Tensor k, Tensor q_weight, Tensor k_weight, float eps, int head_dim, "
        "int num_heads) -> (Tensor, Tensor, Tensor)",
        _query_and_key_norms_with_gate,
    ),
    "fused_sigmoid_mul_cpu": ("(Tensor(a!) x, Tensor gate) -> ()", _gated),
    "fused_rmsnorm_gated_cpu": (
        "(Tensor x, Tensor weight, Tensor gate, float eps) -> Tensor",
        _gated_norm,
    ),
}
"""Name of a `torch.ops.sgl_kernel` -> its arguments and its function"""

_library = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name, (_schema, _function) in OPERATORS.items():
    _library.define(f"{_name}{_schema}")
    _library.impl(_name, _function, "CompositeExplicitAutograd")
