"""Splits a step into mini-batches and mini-batches into micro-batches.

Every rank computes the same split from the same facts.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from pacs_megatron.contracts import Layout, MicroBatchPlan, SampleFacts
from pacs_megatron.errors import ConfigError

_PADDING = np.empty(0, dtype=np.int64)
"""rows of a padding micro-batch"""


def split_by_group(facts: SampleFacts, num_minibatches: int) -> list[np.ndarray]:
    """The rows of each mini-batch, which has whole groups.

    The numbers of groups differ by at most one. With fewer groups than mini-batches the list has
    one mini-batch for each group, so none is empty.

    Args:
        facts: the n samples of a step, with group numbers from 0 to `num_groups` - 1.
        num_minibatches: the largest number of mini-batches.

    Returns:
        int64 [rows of the mini-batch], ascending, for each mini-batch.
    """
    num_groups = facts.num_groups
    if num_groups == 0:
        return []

    count = min(num_minibatches, num_groups)
    bounds = np.linspace(0, num_groups, count + 1).round().astype(np.int64)

    minibatches = []
    for start, stop in pairwise(bounds):
        is_inside = (facts.groups >= start) & (facts.groups < stop)
        minibatches.append(np.flatnonzero(is_inside))
    return minibatches


def plan_microbatches(
    facts: SampleFacts,
    *,
    layout: Layout,
    tokens_per_microbatch: int,
    keep_groups: bool = False,
    rows: np.ndarray | None = None,
    owner_of_row: np.ndarray | None = None,
) -> MicroBatchPlan:
    """Assigns samples to the data-parallel ranks and packs each rank's share into micro-batches.

    The longest item (a sample, or a group that stays together) goes first, to the rank with the
    fewest tokens. This is the LPT rule, whose largest load is within 4/3 of the best one (Graham
    1969, "Bounds on multiprocessing timing anomalies"). Packing is first fit.

    The plan has empty micro-batches where the layout needs them, and at least one micro-batch on a
    rank without samples.

    Args:
        facts: the n samples of a mini-batch.
        layout: sizes of the parallel axes.
        tokens_per_microbatch: the largest number of tokens (prompt and response) in a micro-batch.
        keep_groups: keep every group that fits the budget in one micro-batch. Such a micro-batch
            has whole groups only.
        rows: int64 [m], the samples to plan; None for all n.
        owner_of_row: int64 [n], the data-parallel rank that has the tokens of each sample; None to
            balance the ranks.

    Raises:
        ConfigError: if a sample exceeds the budget.
    """
    lens = facts.lens
    if rows is None:
        rows = np.arange(facts.num_samples)
    _check_budget(facts, rows, tokens_per_microbatch)

    items, together = _items(facts, rows, tokens_per_microbatch, keep_groups=keep_groups)
    shares = _assign(items, lens, layout.dp, owner_of_row)

    divided = []
    whole = []
    for share in shares:
        divided.append([item for item in share if not together[item[0]]])
        whole.append([item for item in share if together[item[0]]])

    # Divided groups come first and have their own padding, so their score pass has the same
    # micro-batches with the same numbers on all ranks.
    divided_batches = _pack_shares(divided, lens, tokens_per_microbatch, layout)
    whole_batches = _pack_shares(whole, lens, tokens_per_microbatch, layout)
    batches = [first + then for first, then in zip(divided_batches, whole_batches, strict=True)]
    return _plan(batches, together, layout)


def _check_budget(facts: SampleFacts, rows: np.ndarray, budget: int) -> None:
    if not len(rows):
        return

    lens = facts.lens[rows]
    longest = int(lens.argmax())
    num_tokens = int(lens[longest])
    if num_tokens > budget:
        sample_id = facts.ids[int(rows[longest])]
        raise ConfigError(
            f"batch.tokens_per_microbatch={budget} is smaller than sample {sample_id} with "
            f"{num_tokens} tokens; raise it to data.max_prompt_tokens + the response limit"
        )


def _items(
    facts: SampleFacts,
    rows: np.ndarray,
    budget: int,
    *,
    keep_groups: bool,
) -> tuple[list[np.ndarray], np.ndarray]:
    """The units that the plan assigns to ranks: groups that stay together, and single samples.

    Args:
        facts: the n samples of a mini-batch.
        rows: int64 [m], the samples to plan.
        budget: the largest number of tokens of a group that stays together.
        keep_groups: False: every item is a single sample.

    Returns:
        int64 [samples of the item] rows of each item.
        bool [n], whether the sample's group stays together.
    """
    if not keep_groups:
        singles = [rows[k : k + 1] for k in range(len(rows))]
        return singles, np.zeros(facts.num_samples, dtype=np.bool_)

    tokens_of_group = np.bincount(facts.groups, weights=facts.lens)
    together = tokens_of_group[facts.groups] <= budget

    # Samples with equal keys are one item. A sample of a divided group has a key of its own.
    own_key = facts.num_samples + np.arange(facts.num_samples)
    key = np.where(together, facts.groups, own_key)[rows]
    order = np.argsort(key, kind="stable")
    starts = np.flatnonzero(np.diff(key[order])) + 1
    return np.split(rows[order], starts), together


def _assign(
    items: Sequence[np.ndarray],
    lens: np.ndarray,
    dp: int,
    owner_of_row: np.ndarray | None,
) -> list[list[np.ndarray]]:
    """The items of each of the `dp` ranks, longest first.

    Args:
        items: int64 [samples of the item] rows of each item.
        lens: int64 [n], tokens of each sample.
        dp: number of data-parallel ranks.
        owner_of_row: int64 [n], the rank of each sample; None: the rank with the fewest tokens.
    """
    load = np.zeros(dp, dtype=np.int64)
    shares: list[list[np.ndarray]] = [[] for _ in range(dp)]
    for item in sorted(items, key=lambda members: -lens[members].sum()):
        rank = int(load.argmin())
        if owner_of_row is not None:
            rank = int(owner_of_row[item[0]])
        shares[rank].append(item)
        load[rank] += lens[item].sum()
    return shares


def _pack_shares(
    shares: Sequence[Sequence[np.ndarray]],
    lens: np.ndarray,
    budget: int,
    layout: Layout,
) -> list[list[np.ndarray]]:
    """The micro-batches of each rank's share, with the padding of the layout."""
    packed = [_first_fit(share, lens, budget) for share in shares]
    return _with_padding(packed, layout)


def _first_fit(items: Sequence[np.ndarray], lens: np.ndarray, budget: int) -> list[np.ndarray]:
    """Packs one rank's items into micro-batches: each into the first one that has the space.

    Args:
        items: int64 [samples of the item] rows of each item, the longest item first.
        lens: int64 [n], tokens of each sample.
        budget: the largest number of tokens in a micro-batch.

    Returns:
        int64 [samples of the micro-batch] rows of each micro-batch, ascending.
    """
    batches: list[list[np.ndarray]] = []
    # One more than the micro-batches so far: the next new one.
    free = np.full(len(items) + 1, budget)
    for item in items:
        need = int(lens[item].sum())
        has_space = free[: len(batches) + 1] >= need
        place = int(has_space.argmax())
        if place == len(batches):
            batches.append([])
        batches[place].append(item)
        free[place] -= need
    return [np.sort(np.concatenate(batch)) for batch in batches]


def _with_padding(packed: list[list[np.ndarray]], layout: Layout) -> list[list[np.ndarray]]:
    """Each rank's micro-batches and empty ones, as many as the layout requires.

    The count is a multiple of `microbatch_multiple`, and equal on all ranks with
    `needs_equal_microbatches`.
    """
    multiple = layout.microbatch_multiple
    counts = [-(-len(batches) // multiple) * multiple for batches in packed]
    if layout.needs_equal_microbatches:
        counts = [max(counts)] * layout.dp

    padded = []
    for batches, count in zip(packed, counts, strict=True):
        padding = [_PADDING] * (count - len(batches))
        padded.append(batches + padding)
    return padded


def _plan(batches: list[list[np.ndarray]], together: np.ndarray, layout: Layout) -> MicroBatchPlan:
    """The plan of `batches`.

    A rank without micro-batches gets as many empty ones as the layout needs at least.
    """
    fewest = (_PADDING,) * layout.microbatch_multiple
    by_dp_rank = []
    for of_rank in batches:
        by_dp_rank.append(tuple(of_rank) or fewest)
    return MicroBatchPlan(by_dp_rank=tuple(by_dp_rank), together=together)


def plan_with_groups(
    facts: SampleFacts,
    layout: Layout,
    budget: int,
    groups: Literal["together", "apart", "auto"],
) -> MicroBatchPlan:
    """The plan for `batch.groups`.

    `auto` keeps groups together unless this costs more than the score pass that it saves.

    Args:
        facts: the n samples of a mini-batch.
        layout: sizes of the parallel axes.
        budget: the largest number of tokens in a micro-batch.
        groups: `batch.groups`.

    Raises:
        ConfigError: if a sample exceeds the budget, or a group with `together`.
    """
    apart = plan_microbatches(facts, layout=layout, tokens_per_microbatch=budget)
    if groups == "apart":
        return apart

    plan = plan_microbatches(facts, layout=layout, tokens_per_microbatch=budget, keep_groups=True)
    if groups == "together":
        _check_groups(facts, plan, budget)
        return plan

    # A forward pass costs a third of an update, so the score pass adds a third of the load.
    is_cheaper = 3 * max(plan.loads(facts)) <= 4 * max(apart.loads(facts))
    return plan if is_cheaper else apart


def _check_groups(facts: SampleFacts, plan: MicroBatchPlan, budget: int) -> None:
    divided = np.flatnonzero(~plan.together)
    if not len(divided):
        return

    row = int(divided[0])
    is_member = facts.groups == facts.groups[row]
    tokens = int(facts.lens[is_member].sum())
    raise ConfigError(
        f"batch.groups=together: the group of sample {facts.ids[row]} has {tokens} tokens, more "
        f"than batch.tokens_per_microbatch={budget}; raise it, or use batch.groups=auto"
    )


def plan_metrics(plan: MicroBatchPlan, facts: SampleFacts, layout: Layout) -> dict[str, float]:
    """Share of samples in whole groups, and the idle shares that the plan causes.

    docs/metrics.md defines the three metrics.
    """
    groups_together = 0.0
    if facts.num_samples:
        groups_together = float(plan.together.mean())

    loads = plan.loads(facts)
    imbalance = max(loads) * len(loads) / max(sum(loads), 1) - 1

    num_batches = max(len(batches) for batches in plan.by_dp_rank)
    num_chunks = layout.vpp or 1
    bubble = (layout.pp - 1) / (num_batches * num_chunks)

    return {
        "batch/groups_together_frac": groups_together,
        "batch/dp_imbalance": imbalance,
        "batch/pipeline_bubble": bubble,
    }


def split_groups_only(plan: MicroBatchPlan, layout: Layout) -> MicroBatchPlan:
    """The micro-batches of `plan` with samples of groups that are not together."""
    packed = []
    for batches in plan.by_dp_rank:
        divided = [rows for rows in batches if len(rows) and not plan.together[rows[0]]]
        packed.append(divided)
    return _plan(_with_padding(packed, layout), plan.together, layout)


def one_by_one(plan: MicroBatchPlan, layout: Layout) -> MicroBatchPlan:
    """The samples of `plan`, each alone in a micro-batch on its rank."""
    packed = []
    for batches in plan.by_dp_rank:
        singles = []
        for rows in batches:
            singles += [rows[k : k + 1] for k in range(len(rows))]
        packed.append(singles)
    return _plan(_with_padding(packed, layout), plan.together, layout)
