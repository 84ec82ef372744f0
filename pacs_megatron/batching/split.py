"""Splits a step into mini-batches and mini-batches into micro-batches.

Every rank computes the same split.
"""

from itertools import pairwise
from typing import Literal

import numpy as np

from pacs_megatron.contracts import Layout, MicroBatchPlan, SampleFacts
from pacs_megatron.errors import ConfigError


def split_by_group(facts: SampleFacts, num_minibatches: int) -> list[np.ndarray]:
    """Rows (int64, ascending) of each mini-batch; whole groups, and sizes differ by at most one
    group. Omits the last mini-batches if there are fewer groups than mini-batches, so none is
    empty.
    """
    num_groups = facts.num_groups
    if num_groups == 0:
        return []
    bounds = (
        np.linspace(0, num_groups, min(num_minibatches, num_groups) + 1).round().astype(np.int64)
    )
    return [
        np.flatnonzero((facts.groups >= start) & (facts.groups < stop))
        for start, stop in pairwise(bounds)
    ]


def plan_microbatches(
    facts: SampleFacts,
    *,
    layout: Layout,
    tokens_per_microbatch: int,
    keep_groups: bool = False,
    rows: np.ndarray | None = None,
    owner_of_row: np.ndarray | None = None,
) -> MicroBatchPlan:
    """Assigns samples to the data-parallel ranks and packs each rank's share into micro-batches
    within the token budget.

    The longest sample goes first, to the least loaded rank (within 4/3 of the best balance);
    packing is first fit. With `keep_groups` every group that fits the budget stays in one
    micro-batch, which has whole groups only. `rows` restricts the plan to some samples;
    `owner_of_row` (int64 [n]) keeps each sample on the rank that has its tokens. Adds empty
    micro-batches if the layout needs them; a rank without samples gets at least one. Raises
    ConfigError if a sample exceeds the budget.
    """
    lens = facts.lens
    rows = np.arange(facts.num_samples) if rows is None else rows
    if len(rows) and int(lens[rows].max()) > tokens_per_microbatch:
        worst = int(rows[int(lens[rows].argmax())])
        raise ConfigError(
            f"batch.tokens_per_microbatch={tokens_per_microbatch} is smaller than sample "
            f"{facts.ids[worst]} with "
            f"{int(lens[worst])} tokens; raise it to data.max_prompt_tokens + the response limit"
        )
    items, together = _items(facts, rows, tokens_per_microbatch, keep_groups=keep_groups)
    load = np.zeros(layout.dp, dtype=np.int64)
    shares: list[list[np.ndarray]] = [[] for _ in range(layout.dp)]
    for item in sorted(items, key=lambda members: -lens[members].sum()):
        rank = int(load.argmin()) if owner_of_row is None else int(owner_of_row[item[0]])
        shares[rank].append(item)
        load[rank] += lens[item].sum()

    def packed(*, is_together: bool) -> list[list[np.ndarray]]:
        chosen = [[item for item in share if together[item[0]] == is_together] for share in shares]
        return _with_padding(
            [_first_fit(own, lens, tokens_per_microbatch) for own in chosen], layout
        )

    # Split groups come first, so their score pass has micro-batches with the same numbers on all
    # ranks.
    pairs = zip(packed(is_together=False), packed(is_together=True), strict=True)
    return _plan([split + whole for split, whole in pairs], together, layout)


def _items(
    facts: SampleFacts, rows: np.ndarray, budget: int, *, keep_groups: bool
) -> tuple[list[np.ndarray], np.ndarray]:
    """(rows of each item, `together` bool [n]); an item is a group that stays together, or one
    sample.
    """
    if not keep_groups:
        return [rows[k : k + 1] for k in range(len(rows))], np.zeros(
            facts.num_samples, dtype=np.bool_
        )
    together = np.bincount(facts.groups, weights=facts.lens)[facts.groups] <= budget
    key = np.where(together, facts.groups, facts.num_samples + np.arange(facts.num_samples))[rows]
    order = np.argsort(key, kind="stable")
    return np.split(rows[order], np.flatnonzero(np.diff(key[order])) + 1), together


def plan_with_groups(
    facts: SampleFacts, layout: Layout, budget: int, groups: Literal["together", "apart", "auto"]
) -> MicroBatchPlan:
    """The plan for `batch.groups`.

    `auto` keeps groups together unless that costs more than the score pass it saves (a third of an
    update). With `together`, raises ConfigError if a group exceeds the budget.
    """
    apart = plan_microbatches(facts, layout=layout, tokens_per_microbatch=budget)
    if groups == "apart":
        return apart
    plan = plan_microbatches(facts, layout=layout, tokens_per_microbatch=budget, keep_groups=True)
    if groups == "together" and not plan.together.all():
        row = int(np.flatnonzero(~plan.together)[0])
        tokens = int(facts.lens[facts.groups == facts.groups[row]].sum())
        raise ConfigError(
            f"batch.groups=together: the group of sample {facts.ids[row]} has {tokens} tokens, "
            "more than "
            f"batch.tokens_per_microbatch={budget}; raise it, or use batch.groups=auto"
        )
    is_cheaper = 3 * max(plan.loads(facts)) <= 4 * max(apart.loads(facts))
    return plan if groups == "together" or is_cheaper else apart


def plan_metrics(plan: MicroBatchPlan, facts: SampleFacts, layout: Layout) -> dict[str, float]:
    """Share of groups that are whole in a micro-batch, and the idle shares that the plan causes
    (docs/metrics.md).
    """
    loads = plan.loads(facts)
    num_batches = max(len(own) for own in plan.by_dp_rank)
    return {
        "batch/groups_together_frac": float(plan.together.mean()) if facts.num_samples else 0.0,
        "batch/dp_imbalance": max(loads) * len(loads) / max(sum(loads), 1) - 1,
        "batch/pipeline_bubble": (layout.pp - 1) / (num_batches * (layout.vpp or 1)),
    }


def split_groups_only(plan: MicroBatchPlan, layout: Layout) -> MicroBatchPlan:
    """The micro-batches of `plan` with samples of groups that are not together."""
    packed = [
        [rows for rows in own if len(rows) and not plan.together[rows[0]]]
        for own in plan.by_dp_rank
    ]
    return _plan(_with_padding(packed, layout), plan.together, layout)


def one_by_one(plan: MicroBatchPlan, layout: Layout) -> MicroBatchPlan:
    """The samples of `plan`, each alone in a micro-batch."""
    packed = [
        [rows[k : k + 1] for rows in own for k in range(len(rows))] for own in plan.by_dp_rank
    ]
    return _plan(_with_padding(packed, layout), plan.together, layout)


_PADDING = np.empty(0, dtype=np.int64)


def _plan(batches: list[list[np.ndarray]], together: np.ndarray, layout: Layout) -> MicroBatchPlan:
    """The plan of `batches`. A rank without micro-batches gets the fewest that the layout allows."""
    fewest = (_PADDING,) * layout.microbatch_multiple
    return MicroBatchPlan(
        by_dp_rank=tuple(tuple(own) or fewest for own in batches), together=together
    )


def _with_padding(packed: list[list[np.ndarray]], layout: Layout) -> list[list[np.ndarray]]:
    """Each rank's micro-batches, padded by empty ones to a multiple of the pipeline's size or to
    equal counts.
    """
    multiple = layout.microbatch_multiple
    counts = [-(-len(own) // multiple) * multiple for own in packed]
    if layout.needs_equal_microbatches:
        counts = [max(counts)] * layout.dp
    return [
        own + [_PADDING] * (count - len(own)) for own, count in zip(packed, counts, strict=True)
    ]


def _first_fit(items: list[np.ndarray], lens: np.ndarray, budget: int) -> list[np.ndarray]:
    """Rows, ascending, of micro-batches of at most `budget` tokens each, from one rank's items,
    longest first.
    """
    batches: list[list[np.ndarray]] = []
    free: list[int] = []
    for rows in items:
        need = int(lens[rows].sum())
        place = next((k for k, space in enumerate(free) if need <= space), len(free))
        if place == len(free):
            batches.append([])
            free.append(budget)
        batches[place].append(rows)
        free[place] -= need
    return [np.sort(np.concatenate(batch)) for batch in batches]
