"""Properties of the cuts: nothing lost, nothing twice, budgets kept, counts as the layout needs
them.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacs_megatron.batching.split import plan_microbatches, split_by_group
from pacs_megatron.batching.tables import (
    facts_to_arrays,
    select_tokens,
    tabulate,
    tokens_to_arrays,
)
from pacs_megatron.contracts import Group, Layout, Sample, SampleFacts, Stop, TokenBuffers
from pacs_megatron.errors import ConfigError, RolloutError
from pacs_megatron.parallel.transfer import pack_arrays, unpack_arrays

BUDGET = 64


def received(tokens: TokenBuffers) -> dict[str, np.ndarray]:
    """The arrays as another rank receives them."""
    return unpack_arrays(pack_arrays(tokens_to_arrays(tokens)))


@st.composite
def some_facts(draw: st.DrawFn) -> SampleFacts:
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=12))
    groups = np.array(
        draw(st.permutations(np.repeat(np.arange(len(sizes)), sizes).tolist())), dtype=np.int64
    )
    n = len(groups)
    prompts = np.array(draw(st.lists(st.integers(1, 20), min_size=n, max_size=n)), dtype=np.int64)
    responses = np.array(
        draw(st.lists(st.integers(1, BUDGET - 20), min_size=n, max_size=n)), dtype=np.int64
    )
    return SampleFacts(
        ids=tuple(f"0:p{group}#{row}" for row, group in enumerate(groups)),
        groups=groups,
        labels=np.zeros(n),
        rewards=np.zeros(n),
        prompt_lens=prompts,
        response_lens=responses,
        environment_lens=np.zeros(n, dtype=np.int64),
        truncated=np.zeros(n, dtype=bool),
    )


LAYOUTS = st.sampled_from(
    [
        Layout(world_size=1),
        Layout(world_size=3),
        Layout(world_size=4, ep=2),
        Layout(world_size=8, pp=2, vpp=2),
        Layout(world_size=12, pp=3, vpp=2, ep=2),
    ]
)


@settings(max_examples=150, deadline=None)
@given(some_facts(), st.integers(1, 8))
def test_mini_batches_hold_whole_groups_of_even_number(facts: SampleFacts, num_parts: int) -> None:
    minibatches = split_by_group(facts, num_parts)
    assert len(minibatches) == min(num_parts, facts.num_groups)
    assert sorted(np.concatenate(minibatches).tolist()) == list(range(facts.num_samples))
    group_sets = [set(facts.groups[rows].tolist()) for rows in minibatches]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(group_sets, 2))
    counts = [len(groups) for groups in group_sets]
    assert max(counts) - min(counts) <= 1


@settings(max_examples=150, deadline=None)
@given(some_facts(), LAYOUTS)
def test_a_plan_holds_every_sample_once_within_the_budget(
    facts: SampleFacts, layout: Layout
) -> None:
    plan = plan_microbatches(facts, layout=layout, tokens_per_microbatch=BUDGET)
    assert len(plan.by_dp_rank) == layout.dp
    rows = np.concatenate(list(itertools.chain.from_iterable(plan.by_dp_rank)))
    assert sorted(rows.tolist()) == list(range(facts.num_samples))
    for batches in plan.by_dp_rank:
        assert all(int(facts.lens[rows].sum()) <= BUDGET for rows in batches)
        assert len(batches) >= 1 and len(batches) % layout.microbatch_multiple == 0
    if layout.needs_equal_microbatches:
        assert len({len(batches) for batches in plan.by_dp_rank}) == 1
    loads = [sum(int(facts.lens[rows].sum()) for rows in batches) for batches in plan.by_dp_rank]
    assert max(loads) - min(loads) <= int(facts.lens.max()), (
        "longest first to the least loaded rank"
    )
    again = plan_microbatches(facts, layout=layout, tokens_per_microbatch=BUDGET)
    for a, b in zip(plan.by_dp_rank, again.by_dp_rank, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@settings(max_examples=80, deadline=None)
@given(some_facts(), LAYOUTS, st.data())
def test_a_partial_plan_leaves_samples_where_their_tokens_are(
    facts: SampleFacts, layout: Layout, data: st.DataObject
) -> None:
    owners = plan_microbatches(facts, layout=layout, tokens_per_microbatch=BUDGET).owners(
        facts.num_samples
    )
    keep = np.flatnonzero(
        data.draw(st.lists(st.booleans(), min_size=facts.num_samples, max_size=facts.num_samples))
    ).astype(np.int64)
    plan = plan_microbatches(
        facts, layout=layout, tokens_per_microbatch=BUDGET, rows=keep, owner_of_row=owners
    )
    found = plan.owners(facts.num_samples)
    assert np.array_equal(found[keep], owners[keep])
    assert np.array_equal(np.flatnonzero(found >= 0), keep)
    assert all(len(batches) >= 1 for batches in plan.by_dp_rank)


def test_a_sample_past_the_budget_is_one_clear_line() -> None:
    facts = SampleFacts(
        ids=("0:p0#0", "0:p0#1"),
        groups=np.zeros(2, dtype=np.int64),
        labels=np.zeros(2),
        rewards=np.zeros(2),
        prompt_lens=np.array([3, 3]),
        response_lens=np.array([4, 90]),
        environment_lens=np.zeros(2, dtype=np.int64),
        truncated=np.zeros(2, dtype=bool),
    )
    with pytest.raises(
        ConfigError, match=r"tokens_per_microbatch=64 is smaller than sample 0:p0#1 with 93 tokens"
    ):
        plan_microbatches(facts, layout=Layout(world_size=1), tokens_per_microbatch=BUDGET)


def sample(number: int, prompt_len: int, response_len: int) -> Sample:
    return Sample(
        id=f"3:p{number // 2}#{number % 2}",
        prompt_id=f"p{number // 2}",
        token_ids=np.arange(prompt_len + response_len, dtype=np.int32) + 100 * number,
        prompt_len=prompt_len,
        sampler_logprobs=-np.arange(response_len, dtype=np.float32) - number,
        spans=(),
        stop=Stop.LENGTH if number == 1 else Stop.EOS,
        reward=float(number),
        label=number % 2,
    )


def test_tables_keep_every_sample_and_survive_the_wire() -> None:
    samples = [sample(n, 3 + n, 2 * n + 1) for n in range(4)]
    groups = [
        Group(prompt_id="p0", samples=tuple(samples[:2])),
        Group(prompt_id="p1", samples=tuple(samples[2:])),
    ]
    facts, pieces = tabulate(groups)
    tokens = pieces.joined()
    assert facts.groups.tolist() == [0, 0, 1, 1] and facts.truncated.tolist() == [
        False,
        True,
        False,
        False,
    ]
    facts = SampleFacts(ids=facts.ids, **facts_to_arrays(facts))
    tokens = TokenBuffers(**received(select_tokens(tokens, np.array([3, 1]), np.array([3, 1]))))
    for position, row in enumerate((3, 1)):
        assert facts.ids[row] == samples[row].id and tokens.index[position] == row
        own = slice(int(tokens.offsets[position]), int(tokens.offsets[position + 1]))
        np.testing.assert_array_equal(tokens.token_ids[own], samples[row].token_ids)
        logp = slice(
            int(tokens.response_offsets[position]), int(tokens.response_offsets[position + 1])
        )
        np.testing.assert_array_equal(tokens.sampler_logprobs[logp], samples[row].sampler_logprobs)


def test_the_experts_of_a_sample_go_with_its_tokens() -> None:
    routes = [
        np.full((3 + 2 * n, 2, 2), n, np.int16) + np.arange(2, dtype=np.int16) for n in range(4)
    ]
    samples = [replace(sample(n, 3, 2 * n + 1), routes=routes[n]) for n in range(4)]
    groups = [
        Group(prompt_id="p0", samples=tuple(samples[2:])),
        Group(prompt_id="p1", samples=tuple(samples[:2])),
    ]
    tokens = tabulate(groups, "replay_sampler")[1].joined()
    mine = TokenBuffers(**received(select_tokens(tokens, np.array([3, 0]), np.array([3, 0]))))
    np.testing.assert_array_equal(mine.routes_of(0), routes[1])
    np.testing.assert_array_equal(mine.routes_of(1), routes[2])
    none = select_tokens(tokens, np.array([], np.int64), np.array([], np.int64))
    assert none.routes is not None and none.routes.shape == (0, 2, 2)
    assert tabulate(groups)[1].routes is None, "policy.routing=own"
    bare = Group(prompt_id="p2", samples=(samples[0], replace(samples[3], routes=None)))
    with pytest.raises(
        RolloutError, match=r"sample 3:p1#1 has no experts.*resume with policy\.routing=own"
    ):
        tabulate([*groups, bare], "replay_sampler")


def test_no_samples_are_no_parts() -> None:
    facts, pieces = tabulate([])
    tokens = pieces.joined()
    assert split_by_group(facts, 3) == []
    assert facts.ids == () and facts.num_samples == 0
    assert len(tokens.token_ids) == 0
