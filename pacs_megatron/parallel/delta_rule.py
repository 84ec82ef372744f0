"""The causal convolution and the gated delta rule on the CPU.

They stand in for the Triton kernels of flash-linear-attention, with the arguments that Megatron
passes. Both loop over the packed samples, so no token reads another sample's.

Source: Yang, Kautz and Hatamizadeh, "Gated Delta Networks" (arXiv:2412.06464).
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_CHUNK = 64
"""Tokens whose updates of the state are solved at once"""


def normalized(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x` divided by the Euclidean norm of its last dimension."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str,
    cu_seqlens: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """SiLU of a convolution of each channel with its own kernel, which ends at the token itself.

    Args:
        x: [1, t, channels], packed samples.
        weight: [channels, kernel].
        bias: none.
        activation: "silu" or "swish".
        cu_seqlens: [samples + 1], bounds of the samples; None: one sample.

    Returns:
        ([1, t, channels], None).
    """
    assert bias is None and activation in ("silu", "swish")
    outputs = []
    for start, stop in _samples(x.shape[1], cu_seqlens):
        channels_first = x[:, start:stop].transpose(1, 2)
        padded = F.pad(channels_first, (weight.shape[1] - 1, 0))
        found = F.conv1d(padded, weight[:, None], groups=weight.shape[0])
        outputs.append(F.silu(found).transpose(1, 2))
    return torch.cat(outputs, dim=1), None


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None = None,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """The outputs of the recurrence, whose state is 0 at the start of each sample.

    With decay a = exp(g), the state [key, value] of a head becomes
    a S + beta k (v - a k S)^T, and the output is q S / sqrt(size of a key).

    Args:
        query: [1, t, heads, key].
        key: [1, t, heads, key].
        value: [1, t, heads, value].
        g: [1, t, heads], logarithm of the decay, at most 0.
        beta: [1, t, heads], strength of the update, from 0 to 1.
        cu_seqlens: [samples + 1], bounds of the samples; None: one sample.

    Returns:
        ([1, t, heads, value], None), in the dtype of `value`. The arithmetic is float64: in fp32
        the differences of running sums of g lose digits, which the norm of the output multiplies.
    """
    inputs = []
    for x in (query, key, value, g[..., None], beta[..., None]):
        inputs.append(x[0].transpose(0, 1).double())
    inputs[0] = inputs[0] * key.shape[-1] ** -0.5

    outputs = []
    for start, stop in _samples(value.shape[1], cu_seqlens):
        outputs.append(_one_sample(*(x[:, start:stop] for x in inputs)))
    return torch.cat(outputs, dim=1).transpose(0, 1)[None].to(value.dtype), None


def _samples(num_tokens: int, cu_seqlens: Tensor | None) -> Iterator[tuple[int, int]]:
    """(first token, end) of each sample that has tokens."""
    bounds = [0, num_tokens] if cu_seqlens is None else cu_seqlens.tolist()
    for start, stop in itertools.pairwise(bounds):
        if stop > start:
            yield start, stop


def _one_sample(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """[heads, t, value], of one sample's inputs [heads, t, ...], chunk by chunk."""
    state = value.new_zeros(key.shape[0], key.shape[2], value.shape[2])
    outputs = []
    for start in range(0, query.shape[1], _CHUNK):
        chunk = slice(start, start + _CHUNK)
        output, state = _one_chunk(
            state, query[:, chunk], key[:, chunk], value[:, chunk], g[:, chunk], beta[:, chunk]
        )
        outputs.append(output)
    return torch.cat(outputs, dim=1)


def _one_chunk(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """The outputs of a chunk, and the state after it.

    The recurrence adds k_i u_i^T to the state at token i, decayed by exp(G_t - G_i) at token t,
    where G is the running sum of g. So the u solve a triangular system:
    u_t = beta_t (v_t - exp(G_t) k_t S - sum over i < t of exp(G_t - G_i) (k_t k_i) u_i).
    """
    total = g.cumsum(1)
    # [heads, t, i], 0 above the diagonal; the exponent is at most 0 below it.
    decay = (total - total.transpose(1, 2)).tril().exp().tril()
    keys = key.transpose(1, 2)

    system = beta * (key @ keys) * decay
    target = beta * (value - total.exp() * (key @ state))
    # Ones on the diagonal are implied.
    updates = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)

    output = total.exp() * (query @ state) + (query @ keys * decay) @ updates
    rest = total[:, -1:]
    state = rest.exp() * state + (key * (rest - total).exp()).transpose(1, 2) @ updates
    return output, state
