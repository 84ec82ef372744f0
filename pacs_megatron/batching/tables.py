"""Converts samples to flat arrays (SampleFacts, TokenBuffers), selects samples, and lists arrays
for transport.
"""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np

from pacs_megatron.config.schema import RoutingKind
from pacs_megatron.contracts import Group, Sample, SampleFacts, Stop, TokenBuffers
from pacs_megatron.errors import RolloutError


def tabulate(
    groups: Sequence[Group], routing: RoutingKind = "own"
) -> tuple[SampleFacts, TokenBuffers]:
    """(facts, tokens) of admitted, labelled groups in the given order; samples of a group in the
    group's order. Raises RolloutError if `routing` replays the sampler's experts and a sample has
    none.
    """
    samples = [(number, sample) for number, group in enumerate(groups) for sample in group.samples]
    facts = SampleFacts(
        ids=tuple(s.id for _, s in samples),
        groups=np.array([number for number, _ in samples], dtype=np.int64),
        labels=np.array([s.label for _, s in samples], dtype=np.float64),
        rewards=np.array([s.reward for _, s in samples], dtype=np.float64),
        prompt_lens=np.array([s.prompt_len for _, s in samples], dtype=np.int64),
        response_lens=np.array([s.response_len for _, s in samples], dtype=np.int64),
        truncated=np.array([s.stop is Stop.LENGTH for _, s in samples], dtype=bool),
    )
    routes = None
    if routing != "own" and samples:
        routes = np.concatenate([_routes_of(sample) for _, sample in samples])
    token_ids = [s.token_ids for _, s in samples]
    logprobs = [s.sampler_logprobs for _, s in samples]
    return facts, _buffers(np.arange(len(samples)), token_ids, logprobs, routes)


def _buffers(
    index: np.ndarray,
    token_ids: Sequence[np.ndarray],
    logprobs: Sequence[np.ndarray],
    routes: np.ndarray | None,
) -> TokenBuffers:
    all_ids, offsets = flat(token_ids, np.int32)
    all_logprobs, response_offsets = flat(logprobs, np.float32)
    return TokenBuffers(
        index=np.asarray(index, dtype=np.int64),
        token_ids=all_ids,
        offsets=offsets,
        sampler_logprobs=all_logprobs,
        response_offsets=response_offsets,
        routes=routes,
    )


def _routes_of(sample: Sample) -> np.ndarray:
    if sample.routes is None:
        raise RolloutError(
            f"sample {sample.id} has no experts: it was sampled without "
            "policy.routing=replay_sampler; resume with "
            "policy.routing=own until its step is trained"
        )
    return sample.routes


def select_tokens(
    tokens: TokenBuffers, positions: np.ndarray, new_index: np.ndarray
) -> TokenBuffers:
    """Samples at `positions` of `tokens` (not rows of the facts), with `index` set to `new_index`."""
    at = tokens.offsets
    responses_at = tokens.response_offsets
    routes = tokens.routes
    if routes is not None:
        routes = np.concatenate([routes[:0], *(tokens.routes_of(int(p)) for p in positions)])
    token_ids = [tokens.token_ids[at[p] : at[p + 1]] for p in positions]
    logprobs = [tokens.sampler_logprobs[responses_at[p] : responses_at[p + 1]] for p in positions]
    return _buffers(new_index, token_ids, logprobs, routes)


def facts_to_arrays(facts: SampleFacts) -> dict[str, np.ndarray]:
    """Arrays for transport. `SampleFacts(ids=..., **arrays)` is the inverse."""
    return {name: getattr(facts, name) for name in FACTS}


FACTS = ("groups", "labels", "rewards", "prompt_lens", "response_lens", "truncated")


def tokens_to_arrays(tokens: TokenBuffers) -> dict[str, np.ndarray]:
    """Arrays for transport. `TokenBuffers(**arrays)` is the inverse."""
    values = {field.name: getattr(tokens, field.name) for field in fields(tokens)}
    return {name: value for name, value in values.items() if value is not None}


def flat(parts: Sequence[np.ndarray], dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """(concatenated parts, int64 [parts + 1]: the start of each part, and the end of the last)"""
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return (
        np.concatenate(parts).astype(dtype, copy=False) if parts else np.empty(0, dtype=dtype)
    ), offsets
