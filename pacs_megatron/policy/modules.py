"""Layers for the local layer spec: an RMSNorm with sequence parallelism, attention over packed sequences, and their split by
context parallelism.

Megatron's torch norm does not support sequence parallelism, and its local attention no packed (THD) input. With
Transformer Engine neither of these layers is used.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

_MAX_PADDING_FACTOR = 2.0
"""Sequences are padded to one batch if that costs at most this factor in tokens; otherwise one call each."""


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm over the last dimension; its gradient is summed over a sequence-parallel group."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron sums the gradients of parameters with this attribute over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def with_fp32_output(norm: type) -> type:
    """The final norm of `precision.head: fp32`: Megatron's `norm` with its parameters and state; the output is fp32."""

    class Fp32Output:
        def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float) -> Any:
            module = norm(config=config, hidden_size=hidden_size, eps=eps)
            module.forward = lambda x: F.rms_norm(x.float(), (hidden_size,), module.weight.float(), eps)
            return module

    return Fp32Output


# Context parallelism splits every packed sequence over the ranks in Transformer Engine's order. A sequence of length L (a
# multiple of 2 cp) is split into 2 cp chunks; rank r has chunks r and 2 cp - 1 - r, so causal attention costs every rank the
# same.
def zigzag_index(bounds: Sequence[int], cp: int) -> Tensor:
    """int64 [cp, t / cp]: positions of each rank, in its local order, of sequences with bounds [n + 1]."""
    shares: list[list[Tensor]] = [[] for _ in range(cp)]
    for start, stop in itertools.pairwise(bounds):
        chunks = torch.arange(start, stop).chunk(2 * cp)
        assert (stop - start) % (2 * cp) == 0, "sequences are padded to a multiple of 2 cp"
        if stop == start:
            continue
        for rank in range(cp):
            shares[rank] += [chunks[rank], chunks[2 * cp - 1 - rank]]
    return torch.stack([torch.cat(share) for share in shares])


class _GatherSequence(torch.autograd.Function):
    """Local tokens -> the whole packed sequence on every rank; backward sums over the ranks and takes the local part."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, index: Tensor, group: dist.ProcessGroup) -> Tensor:
        shares = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(shares, local.contiguous(), group=group)
        full = local.new_empty(index.numel(), *local.shape[1:])
        for rank, share in enumerate(shares):
            full[index[rank]] = share
        ctx.save_for_backward(index)
        ctx.group = group
        return full

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        total = grads[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[index[ctx.group.rank()]], None, None


def gather_sequence(local: Tensor, index: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[t / cp, ...] of every rank -> [t, ...] in packed order; `index` of `zigzag_index`. Collective; differentiable."""
    full: Tensor = _GatherSequence.apply(local, index, group)  # type: ignore[no-untyped-call]
    return full


class PackedAttention(MegatronModule):
    """Causal attention over packed sequences with torch's scaled_dot_product_attention.

    With context parallelism every rank gathers and computes the whole sequence, which is exact but not economical: this
    is the CPU path. On a GPU, Transformer Engine passes keys and values around the ring.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale
        self.cp_group = parallel_state.get_context_parallel_group()

    def forward(  # noqa: PLR0913  (Megatron's signature)
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """query [t, heads, d], key and value [t, kv heads, d] -> [t, heads * d]; sequences by `cu_seqlens_q`."""
        assert packed_seq_params is not None, "the policy always packs"
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        cp = self.cp_group.size()
        if cp > 1:
            index = zigzag_index(bounds, cp).to(query.device)
            query, key, value = (gather_sequence(x, index, self.cp_group) for x in (query, key, value))
        lens = [stop - start for start, stop in itertools.pairwise(bounds)]
        if len(lens) * max(lens) <= _MAX_PADDING_FACTOR * bounds[-1]:
            out = self._padded(query, key, value, bounds, lens)
        else:
            out = self._one_by_one(query, key, value, bounds)
        if cp > 1:
            out = out.index_select(0, index[self.cp_group.rank()])
        return out.reshape(out.shape[0], -1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped
        )

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int], lens: list[int]) -> Tensor:
        """One call for all sequences. Padding follows each sequence, where the causal mask hides it."""
        num, longest = len(lens), max(lens)
        sequence = torch.repeat_interleave(torch.arange(num), torch.tensor(lens))
        slot = sequence * longest + torch.arange(bounds[-1]) - torch.tensor(bounds)[sequence]
        slot = slot.to(query.device)

        def pad(x: Tensor) -> Tensor:
            padded = x.new_zeros(num * longest, *x.shape[1:]).index_copy(0, slot, x)
            return padded.view(num, longest, *x.shape[1:]).transpose(1, 2)

        out = self._attend(pad(query), pad(key), pad(value)).transpose(1, 2)
        return out.reshape(num * longest, *query.shape[1:]).index_select(0, slot)

    def _one_by_one(self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int]) -> Tensor:
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        parts = [
            self._attend(query[:, :, start:stop], key[:, :, start:stop], value[:, :, start:stop])
            for start, stop in itertools.pairwise(bounds)
            if stop > start
        ]
        return torch.cat(parts, dim=2).squeeze(0).transpose(0, 1)
