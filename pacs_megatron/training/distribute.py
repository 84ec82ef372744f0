"""Cuts a step into mini-batches and sends each data-parallel replica its share of the tokens.

The shares travel over gloo: rank 0 -> the first rank of a replica -> its other ranks.
"""

import numpy as np

from pacs_megatron.batching.split import plan_with_groups, split_by_group
from pacs_megatron.batching.tables import select_tokens, tokens_to_arrays
from pacs_megatron.config.schema import BatchOptions
from pacs_megatron.contracts import MiniBatch, SampleFacts, TokenBuffers
from pacs_megatron.objectives.shared.base import Objective
from pacs_megatron.parallel.groups import Rank
from pacs_megatron.parallel.transfer import (
    broadcast_buffer,
    pack_arrays,
    receive_buffer,
    send_buffer,
    unpack_arrays,
)


def cut_step(
    facts: SampleFacts,
    tokens: TokenBuffers | None,
    rank: Rank,
    batch: BatchOptions,
    objective: Objective,
) -> list[MiniBatch]:
    """The mini-batches of a step, each with its plan and this rank's share of the tokens.

    Collective.

    Args:
        facts: all admitted samples, on every rank.
        tokens: all admitted samples, on rank 0; None elsewhere.
        rank: this rank.
        batch: the number of updates, the tokens of a micro-batch, and whether groups stay together.
        objective: its coupling and statistics determine whether it needs whole groups.
    """
    minibatches = []
    for index, rows in enumerate(split_by_group(facts, batch.updates_per_step)):
        selected = facts.select(rows)
        needs_groups = objective.coupling == "group" and any(
            objective.statistics(update) for update in batch.updates_of(index)
        )
        plan = plan_with_groups(
            selected,
            rank.layout,
            batch.tokens_per_microbatch,
            batch.groups if needs_groups else "apart",
        )
        owners = plan.owners(selected.num_samples)
        share = _receive_share(tokens, rows, owners, rank)
        minibatch = MiniBatch(
            facts=selected,
            rows=rows,
            tokens=share,
            plan=plan,
            index=index,
            routes=_routes_by_row(share),
        )
        minibatches.append(minibatch)
    return minibatches


def _receive_share(
    tokens: TokenBuffers | None, rows: np.ndarray, owners: np.ndarray, rank: Rank
) -> TokenBuffers:
    """This rank's tokens of a mini-batch. Collective.

    Rank 0 sends them to the first rank of each replica, which broadcasts the same bytes to the
    replica.

    Args:
        tokens: all samples of the step, on rank 0; None elsewhere.
        rows: int64 [n], the rows of the mini-batch in the facts of the step.
        owners: int64 [n], the replica of each row.
        rank: this rank.
    """
    buffer = None
    if rank.rank == 0:
        assert tokens is not None
        for replica, head in enumerate(rank.heads):
            members = np.flatnonzero(owners == replica)
            selected = tokens_to_arrays(select_tokens(tokens, rows[members], members))
            packed = pack_arrays(selected)
            if head == 0:
                buffer = packed
            else:
                send_buffer(packed, dst=head, group=rank.control)
    elif rank.is_head:
        buffer = receive_buffer(src=0, group=rank.control)

    shared = broadcast_buffer(buffer, src=rank.model_parallel_ranks[0], group=rank.model_parallel)
    return TokenBuffers(**unpack_arrays(shared))


def _routes_by_row(tokens: TokenBuffers) -> dict[int, np.ndarray] | None:
    """Row of the mini-batch -> the sampler's experts; None if they were not recorded."""
    if tokens.routes is None:
        return None
    return {int(row): tokens.routes_of(position) for position, row in enumerate(tokens.index)}
