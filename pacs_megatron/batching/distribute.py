"""Sends each data-parallel replica its share of rank 0's samples, over gloo: to its head, then to its other ranks."""

import numpy as np

from pacs_megatron.batching.split import plan_microbatches, split_by_group
from pacs_megatron.batching.tables import select_tokens, tokens_from_arrays, tokens_to_arrays
from pacs_megatron.contracts import MiniBatch, SampleFacts, TokenBuffers
from pacs_megatron.parallel.groups import Rank
from pacs_megatron.parallel.transfer import broadcast_arrays, receive_arrays, send_arrays


def cut_step(
    facts: SampleFacts,
    tokens: TokenBuffers | None,
    rank: Rank,
    *,
    updates_per_step: int,
    tokens_per_microbatch: int,
) -> list[MiniBatch]:
    """The mini-batches of a step, each with its plan and this rank's share of the tokens. Collective.

    Args:
        facts: of all admitted samples, on every rank.
        tokens: of all of them, on rank 0; None elsewhere.
    """
    minibatches = []
    for rows in split_by_group(facts, updates_per_step):
        selected = facts.select(rows)
        plan = plan_microbatches(selected, layout=rank.layout, tokens_per_microbatch=tokens_per_microbatch)
        mine = _share(tokens, rows, plan.owners(selected.num_samples), rank)
        minibatches.append(MiniBatch(facts=selected, tokens=mine, plan=plan))
    return minibatches


def _share(tokens: TokenBuffers | None, rows: np.ndarray, owners: np.ndarray, rank: Rank) -> TokenBuffers:
    """Rank 0 sends each head its samples; every head broadcasts to its replica."""
    own = None
    if rank.rank == 0:
        assert tokens is not None
        for replica, head in enumerate(rank.heads):
            members = np.flatnonzero(owners == replica)
            share = tokens_to_arrays(select_tokens(tokens, rows[members], members))
            if head == 0:
                own = share
            else:
                send_arrays(share, dst=head, group=rank.control)
    elif rank.is_head:
        own = receive_arrays(src=0, group=rank.control)
    return tokens_from_arrays(broadcast_arrays(own, src=rank.model_parallel_ranks[0], group=rank.model_parallel))
