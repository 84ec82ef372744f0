"""The zigzag cut of packed sequences over context-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pacs_megatron.policy.model import gather_sequence, zigzag_index
from tests.support.ranks import run_ranks


def test_every_rank_holds_a_chunk_from_the_front_and_its_mirror_from_the_back() -> None:
    index = zigzag_index([0, 8, 8, 12], 2)
    assert index.tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    for cp in (2, 3, 4):
        index = zigzag_index([0, 24, 48], cp)
        assert sorted(index.flatten().tolist()) == list(range(48))
        causal_work = (index % 24 + 1).sum(1)
        assert len(set(causal_work.tolist())) == 1, "causal attention costs every rank the same"


def test_gather_restores_the_order_and_sums_gradients() -> None:
    index = zigzag_index([0, 8, 12], 2)
    full = torch.arange(24.0).reshape(12, 2)

    def on_rank(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
        local = full[index[rank]].clone().requires_grad_(True)
        whole = gather_sequence(local, index, dist.group.WORLD)
        (whole * (rank + 1)).sum().backward()
        assert local.grad is not None
        return whole.detach(), local.grad

    for whole, grad in run_ranks(on_rank, 2):
        assert torch.equal(whole, full)
        assert torch.equal(grad, torch.full_like(grad, 3.0))
