"""Splits a step into mini-batches and mini-batches into micro-batches. Deterministic: every rank computes the same."""

from itertools import pairwise

import numpy as np

from pacs_megatron.contracts import Layout, MicroBatchPlan, SampleFacts
from pacs_megatron.errors import ConfigError


def split_by_group(facts: SampleFacts, num_minibatches: int) -> list[np.ndarray]:
    """Rows (int64, ascending) of each mini-batch; whole groups, and sizes differ by at most one group.

    With fewer groups than mini-batches the last mini-batches are left out, so none is empty.
    """
    num_groups = facts.num_groups
    if num_groups == 0:
        return []
    bounds = np.linspace(0, num_groups, min(num_minibatches, num_groups) + 1).round().astype(np.int64)
    return [np.flatnonzero((facts.groups >= start) & (facts.groups < stop)) for start, stop in pairwise(bounds)]


def plan_microbatches(
    facts: SampleFacts,
    *,
    layout: Layout,
    tokens_per_microbatch: int,
    rows: np.ndarray | None = None,
    owner_of_row: np.ndarray | None = None,
) -> MicroBatchPlan:
    """Deal the samples to the data-parallel ranks and pack each rank's share into micro-batches within the token budget.

    Longest first to the least loaded rank, then first fit: within 4/3 of the best balance. Siblings may be on different
    ranks. `rows` restricts the plan to some samples (default: all); `owner_of_row` (int64 [n]) keeps each sample on the
    rank that has its tokens. Empty micro-batches are added where the layout needs equal counts on all ranks, or a multiple
    of the pipeline's size; a rank without samples gets at least one.

    Raises ConfigError when one sample exceeds the budget.
    """
    lens = facts.lens
    rows = np.arange(facts.num_samples) if rows is None else rows
    if len(rows) and int(lens[rows].max()) > tokens_per_microbatch:
        worst = int(rows[int(lens[rows].argmax())])
        raise ConfigError(
            f"batch.tokens_per_microbatch={tokens_per_microbatch} is smaller than sample {facts.ids[worst]} with "
            f"{int(lens[worst])} tokens; raise it to data.max_prompt_tokens + the response limit"
        )
    order = rows[np.argsort(-lens[rows], kind="stable")]
    load = np.zeros(layout.dp, dtype=np.int64)
    shares: list[list[int]] = [[] for _ in range(layout.dp)]
    for row in order:
        rank = int(load.argmin()) if owner_of_row is None else int(owner_of_row[row])
        shares[rank].append(int(row))
        load[rank] += lens[row]
    packed = [_first_fit(share, lens, tokens_per_microbatch) for share in shares]
    counts = [-(-max(len(batches), 1) // layout.microbatch_multiple) * layout.microbatch_multiple for batches in packed]
    if layout.needs_equal_microbatches:
        counts = [max(counts)] * layout.dp
    return MicroBatchPlan(
        by_dp_rank=tuple(
            tuple(batches + [np.empty(0, dtype=np.int64)] * (count - len(batches)))
            for batches, count in zip(packed, counts, strict=True)
        )
    )


def _first_fit(share: list[int], lens: np.ndarray, budget: int) -> list[np.ndarray]:
    """Rows of one rank, longest first, into bins of at most `budget` tokens; rows ascend inside a bin."""
    bins: list[list[int]] = []
    space: list[int] = []
    for row in share:
        need = int(lens[row])
        for k, free in enumerate(space):
            if need <= free:
                bins[k].append(row)
                space[k] -= need
                break
        else:
            bins.append([row])
            space.append(budget - need)
    return [np.array(sorted(rows), dtype=np.int64) for rows in bins]
