"""Cuts a step into mini-batches and sends each data-parallel replica its share of the tokens, over
gloo.
"""

import numpy as np

from pacs_megatron.batching.split import plan_with_groups, split_by_group
from pacs_megatron.batching.tables import select_tokens, tokens_to_arrays
from pacs_megatron.config.schema import BatchOptions
from pacs_megatron.contracts import MiniBatch, SampleFacts, TokenBuffers
from pacs_megatron.objectives.shared.base import Objective
from pacs_megatron.parallel.groups import Rank
from pacs_megatron.parallel.transfer import broadcast_arrays, receive_arrays, send_arrays


def cut_step(
    facts: SampleFacts,
    tokens: TokenBuffers | None,
    rank: Rank,
    batch: BatchOptions,
    objective: Objective,
) -> list[MiniBatch]:
    """The mini-batches of a step, each with its plan and this rank's share of the tokens.

    Collective.

    `facts`: all admitted samples, on every rank; `tokens`: all admitted samples, on rank 0, None
    elsewhere. The coupling and the statistics of the objective determine whether groups stay
    together.
    """
    minibatches = []
    for index, rows in enumerate(split_by_group(facts, batch.updates_per_step)):
        selected = facts.select(rows)
        depends_on_groups = objective.coupling == "group" and any(
            map(objective.statistics, batch.updates_of(index))
        )
        groups = batch.groups if depends_on_groups else "apart"
        plan = plan_with_groups(selected, rank.layout, batch.tokens_per_microbatch, groups)
        mine = _share(tokens, rows, plan.owners(selected.num_samples), rank)
        routes = None
        if mine.routes is not None:
            routes = {int(row): mine.routes_of(position) for position, row in enumerate(mine.index)}
        minibatches.append(
            MiniBatch(facts=selected, tokens=mine, plan=plan, index=index, routes=routes)
        )
    return minibatches


def _share(
    tokens: TokenBuffers | None, rows: np.ndarray, owners: np.ndarray, rank: Rank
) -> TokenBuffers:
    """This rank's tokens.

    Rank 0 sends them to the first rank of each replica, which broadcasts to the replica.
    """
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
    return TokenBuffers(
        **broadcast_arrays(own, src=rank.model_parallel_ranks[0], group=rank.model_parallel)
    )
