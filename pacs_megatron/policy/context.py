"""Context parallelism: splits every packed sequence over the ranks in Transformer Engine's order.

A sequence of length L (a multiple of 2 cp) is split into 2 cp chunks; rank r has chunks r and 2 cp - 1 - r, so causal
attention costs every rank the same.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


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
