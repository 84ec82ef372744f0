"""Samples as flat arrays, SampleFacts and TokenBuffers: conversion, selection and transport."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from pacs_megatron.config.schema import RoutingKind
from pacs_megatron.contracts import Group, Sample, SampleFacts, Stop, TokenBuffers, Writer
from pacs_megatron.contracts.pieces import Pieces
from pacs_megatron.errors import RolloutError

FACTS = (
    "groups",
    "labels",
    "rewards",
    "prompt_lens",
    "response_lens",
    "environment_lens",
    "truncated",
)
"""arrays of SampleFacts that ranks exchange"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPieces:
    """TokenBuffers whose long columns are in pieces, one for each sample, without a copy."""

    index: np.ndarray
    token_ids: Pieces
    offsets: np.ndarray
    writers: Pieces
    sampler_logprobs: Pieces
    response_offsets: np.ndarray
    routes: Pieces | None = None

    def joined(self) -> TokenBuffers:
        """The buffers, copied."""
        return TokenBuffers(
            index=self.index,
            token_ids=self.token_ids.joined(),
            offsets=self.offsets,
            writers=self.writers.joined(),
            sampler_logprobs=self.sampler_logprobs.joined(),
            response_offsets=self.response_offsets,
            routes=None if self.routes is None else self.routes.joined(),
        )


def tabulate(
    groups: Sequence[Group], routing: RoutingKind = "own"
) -> tuple[SampleFacts, TokenPieces]:
    """The facts and tokens of admitted, labelled groups.

    The order is that of `groups`, and within a group that of its samples.

    Args:
        groups: groups whose samples have a reward and a label.
        routing: `policy.routing`; other values than `own` need the sampler's experts.

    Returns:
        The facts of the n samples.
        The tokens of the same samples; row k has `index` k.

    Raises:
        RolloutError: if `routing` replays the sampler's experts and a sample has none.
    """
    samples: list[Sample] = []
    group_of_sample: list[int] = []
    for number, group in enumerate(groups):
        samples += group.samples
        group_of_sample += [number] * len(group.samples)

    facts = SampleFacts(
        ids=tuple(sample.id for sample in samples),
        groups=np.array(group_of_sample, dtype=np.int64),
        labels=np.array([sample.label for sample in samples], dtype=np.float64),
        rewards=np.array([sample.reward for sample in samples], dtype=np.float64),
        prompt_lens=np.array([sample.prompt_len for sample in samples], dtype=np.int64),
        response_lens=np.array([sample.response_len for sample in samples], dtype=np.int64),
        environment_lens=np.array([sample.environment_len for sample in samples], dtype=np.int64),
        truncated=np.array([sample.stop is Stop.LENGTH for sample in samples], dtype=bool),
    )

    routes = None
    if routing != "own" and samples:
        routes = [_routes_of(sample) for sample in samples]
    tokens = _pieces(
        index=np.arange(len(samples)),
        token_ids=[sample.token_ids for sample in samples],
        writers=[sample.writers for sample in samples],
        logprobs=[sample.policy_logprobs for sample in samples],
        routes=routes,
    )
    return facts, tokens


def _routes_of(sample: Sample) -> np.ndarray:
    if sample.routes is None:
        raise RolloutError(
            f"sample {sample.id} has no experts: it was sampled without "
            "policy.routing=replay_sampler; resume with policy.routing=own until its step is "
            "trained"
        )
    return sample.routes


def _pieces(
    index: np.ndarray,
    token_ids: Sequence[np.ndarray],
    writers: Sequence[np.ndarray],
    logprobs: Sequence[np.ndarray],
    routes: Sequence[np.ndarray] | None,
) -> TokenPieces:
    """The pieces of m samples.

    Args:
        index: [m], row of each sample in the facts.
        token_ids: [prompt + response] of each sample.
        writers: [prompt + response] of each sample.
        logprobs: of the policy's tokens of each sample, the sampler's, nats.
        routes: [prompt + response - 1, layers, top k] of each sample, the sampler's experts; not
            empty.
    """
    return TokenPieces(
        index=np.asarray(index, dtype=np.int64),
        token_ids=_column(token_ids, np.int32),
        offsets=_offsets(token_ids),
        writers=_column(writers, np.uint8),
        sampler_logprobs=_column(logprobs, np.float32),
        response_offsets=_offsets(logprobs),
        routes=None if routes is None else Pieces(routes),
    )


def _column(parts: Sequence[np.ndarray], dtype: type) -> Pieces:
    """The pieces, as `dtype`; an empty one without parts."""
    if not parts:
        return Pieces([np.empty(0, dtype=dtype)])
    return Pieces([part.astype(dtype, copy=False) for part in parts])


def select_tokens(
    tokens: TokenBuffers,
    positions: np.ndarray,
    new_index: np.ndarray,
) -> TokenBuffers:
    """The tokens of some samples, copied.

    Args:
        tokens: the buffers of m samples.
        positions: int64 [k], positions among the m samples (not rows of the facts).
        new_index: int64 [k], the `index` of the result.

    Returns:
        The buffers of the k samples, in the order of `positions`.
    """
    token_ids = []
    writers = []
    logprobs = []
    for position in positions:
        start, stop = tokens.offsets[position : position + 2]
        token_ids.append(tokens.token_ids[start:stop])
        writers.append(tokens.writers[start:stop])
        start, stop = tokens.response_offsets[position : position + 2]
        logprobs.append(tokens.sampler_logprobs[start:stop])

    routes = None
    if tokens.routes is not None:
        pieces = [tokens.routes_of(int(position)) for position in positions]
        # The empty piece has the dtype and the shape of the result if there are no positions.
        routes = [tokens.routes[:0], *pieces]
    return _pieces(new_index, token_ids, writers, logprobs, routes).joined()


def single_turn_writers(prompt_lens: np.ndarray, response_lens: np.ndarray) -> np.ndarray:
    """The writers of samples whose whole response the policy wrote.

    Args:
        prompt_lens: int64 [m].
        response_lens: int64 [m].

    Returns:
        uint8 [sum of lens].
    """
    writers = np.tile(np.array([Writer.PROMPT, Writer.POLICY], dtype=np.uint8), len(prompt_lens))
    return np.repeat(writers, np.stack([prompt_lens, response_lens], axis=1).reshape(-1))


def facts_to_arrays(facts: SampleFacts) -> dict[str, np.ndarray]:
    """Arrays for transport. `SampleFacts(ids=..., **arrays)` is the inverse."""
    return {name: getattr(facts, name) for name in FACTS}


def tokens_to_arrays(tokens: TokenBuffers | TokenPieces) -> dict[str, np.ndarray | Pieces]:
    """Arrays for transport. `TokenBuffers(**arrays)` is the inverse, of arrays that arrived."""
    arrays = {}
    for field in fields(tokens):
        value = getattr(tokens, field.name)
        if value is not None:  # no routes
            arrays[field.name] = value
    return arrays


def ranges(starts: np.ndarray, lens: np.ndarray) -> np.ndarray:
    """The numbers from each start on, range after range.

    Args:
        starts: int64 [m].
        lens: int64 [m], numbers of each range.

    Returns:
        int64 [sum of lens].
    """
    ends = np.cumsum(lens)
    return np.repeat(starts - (ends - lens), lens) + np.arange(lens.sum())


def flat(parts: Sequence[np.ndarray], dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Concatenates arrays of one dimension or more along the first one.

    Args:
        parts: the arrays.
        dtype: of the result.

    Returns:
        [sum of lengths], of `dtype`.
        int64 [parts + 1], the start of each part, and the end of the last one.
    """
    if not parts:
        return np.empty(0, dtype=dtype), _offsets(parts)
    return np.concatenate(parts).astype(dtype, copy=False), _offsets(parts)


def _offsets(parts: Sequence[np.ndarray]) -> np.ndarray:
    """int64 [parts + 1], the start of each part, and the end of the last one."""
    return np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
