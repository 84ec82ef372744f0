"""Samples as arrays: every fact of a sample at its row."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pacs_megatron.batching.tables import (
    facts_to_arrays,
    select_tokens,
    single_turn_writers,
    tabulate,
    tokens_to_arrays,
)
from pacs_megatron.contracts import Group, Sample, Stop
from pacs_megatron.parallel.transfer import pack_arrays, unpack_arrays


def sample_of(name: str, *, prompt_len: int, response: list[int], **facts: object) -> Sample:
    return Sample(
        id=name,
        prompt_id=name[0],
        token_ids=np.array([*range(prompt_len), *response], dtype=np.int32),
        prompt_len=prompt_len,
        sampler_logprobs=np.array([-0.5 * token for token in response], dtype=np.float32),
        spans=(),
        **facts,  # type: ignore[arg-type]
    )


GROUPS = (
    Group(
        prompt_id="a",
        samples=(
            sample_of("a0", prompt_len=2, response=[7], stop=Stop.EOS, reward=0.25, label=0),
            sample_of("a1", prompt_len=2, response=[8, 9], stop=Stop.LENGTH, reward=3.5, label=1),
        ),
    ),
    Group(
        prompt_id="b",
        samples=(sample_of("b0", prompt_len=1, response=[4], stop=Stop.EOS, reward=-2.0, label=1),),
    ),
)


def test_every_fact_is_that_of_its_sample() -> None:
    """Rewards that differ from the labels: an objective may use either."""
    facts, _ = tabulate(GROUPS)
    assert facts.ids == ("a0", "a1", "b0")
    arrays = {name: values.tolist() for name, values in facts_to_arrays(facts).items()}
    assert arrays == {
        "groups": [0, 0, 1],
        "labels": [0.0, 1.0, 1.0],
        "rewards": [0.25, 3.5, -2.0],
        "prompt_lens": [2, 2, 1],
        "response_lens": [1, 2, 1],
        "environment_lens": [0, 0, 0],
        "truncated": [False, True, False],
    }


def test_tokens_of_the_environment_are_no_response_tokens() -> None:
    [one] = GROUPS[1].samples
    turns = replace(
        one,
        token_ids=np.array([0, 4, 5, 6, 7], np.int32),
        environment=((1, 3),),
        sampler_logprobs=np.array([-1.0, 0.0, 0.0, -2.0], np.float32),
    )
    facts, pieces = tabulate([GROUPS[0], Group(prompt_id="b", samples=(turns,))])
    tokens = pieces.joined()
    assert facts.response_lens.tolist() == [1, 2, 2]
    assert facts.environment_lens.tolist() == [0, 0, 2]
    assert facts.lens.tolist() == [3, 4, 5]
    assert tokens.writers.tolist() == [0, 0, 1, 0, 0, 1, 1, 0, 1, 2, 2, 1]
    selected = select_tokens(tokens, np.array([2]), np.array([0]))
    assert selected.writers.tolist() == [0, 1, 2, 2, 1]
    assert selected.sampler_logprobs.tolist() == [-1.0, -2.0]
    assert single_turn_writers(np.array([2, 1]), np.array([1, 3])).tolist() == [0, 0, 1, 0, 1, 1, 1]


def test_tokens_and_log_probs_are_those_of_their_sample() -> None:
    tokens = tabulate(GROUPS)[1].joined()
    assert tokens.token_ids.tolist() == [0, 1, 7, 0, 1, 8, 9, 0, 4]
    assert tokens.offsets.tolist() == [0, 3, 7, 9]
    assert tokens.sampler_logprobs.tolist() == [-3.5, -4.0, -4.5, -2.0]
    assert tokens.response_offsets.tolist() == [0, 1, 3, 4]

    selected = select_tokens(tokens, np.array([2, 0]), np.array([5, 6]))
    assert selected.index.tolist() == [5, 6]
    assert selected.token_ids.tolist() == [0, 4, 0, 1, 7]
    assert selected.sampler_logprobs.tolist() == [-2.0, -3.5]


def test_pieces_are_the_samples_own_arrays() -> None:
    """A step is gigabytes: a copy of it would double the driver's memory."""
    tokens = tabulate(GROUPS)[1]
    samples = [*GROUPS[0].samples, *GROUPS[1].samples]
    for ids, logprobs, one in zip(
        tokens.token_ids.pieces, tokens.sampler_logprobs.pieces, samples, strict=True
    ):
        assert np.shares_memory(ids, one.token_ids)
        assert np.shares_memory(logprobs, one.sampler_logprobs)


def test_pieces_arrive_as_the_joined_columns() -> None:
    tokens = tabulate(GROUPS)[1]
    arrived = unpack_arrays(pack_arrays(tokens_to_arrays(tokens)))
    joined = tokens_to_arrays(tokens.joined())
    assert set(arrived) == set(joined)
    for name, values in arrived.items():
        np.testing.assert_array_equal(values, joined[name], strict=True)


def test_no_groups() -> None:
    facts, pieces = tabulate(())
    tokens = pieces.joined()
    assert facts.ids == () and facts.rewards.shape == (0,) and tokens.token_ids.shape == (0,)
