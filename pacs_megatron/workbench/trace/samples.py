"""Samples of a traced step: arbitrary tokens, the same on every rank."""

from __future__ import annotations

import numpy as np

from pacs_megatron.batching.tables import single_turn_writers
from pacs_megatron.config.checks import max_sequence_tokens
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.contracts import SampleFacts, TokenBuffers
from pacs_megatron.models import ModelSpec
from pacs_megatron.workbench.trace.rank import TraceRequest

_SHORTEST = 8
"""tokens of the shortest response"""


def build_samples(
    request: TraceRequest, config: RunConfig, spec: ModelSpec
) -> tuple[SampleFacts, TokenBuffers]:
    """The samples of a step.

    Args:
        request: its numbers and lengths of samples. The first `num_one_class_groups` groups have
            equal labels.
        config: of the run, for the largest lengths.
        spec: of the model, for its vocabulary.
    """
    generator = np.random.default_rng(0)
    num_samples = request.num_groups * request.group_size
    longest = _longest_response(request, config)
    response_lens = np.full(num_samples, longest, dtype=np.int64)
    if request.has_uneven_lengths:
        response_lens = generator.integers(min(_SHORTEST, longest), longest + 1, num_samples)
    prompt_lens = np.full(num_samples, request.prompt_tokens, dtype=np.int64)

    groups = np.repeat(np.arange(request.num_groups), request.group_size)
    labels = np.arange(num_samples) % 2.0
    labels[groups < request.num_one_class_groups] = 1.0
    facts = SampleFacts(
        ids=tuple(f"0:p{group}#{row}" for row, group in enumerate(groups)),
        groups=groups,
        labels=labels,
        rewards=labels.copy(),
        prompt_lens=prompt_lens,
        response_lens=response_lens,
        environment_lens=np.zeros(num_samples, dtype=np.int64),
        truncated=np.zeros(num_samples, dtype=bool),
    )

    lens = prompt_lens + response_lens
    num_tokens = int(lens.sum())
    num_predicted = int(response_lens.sum())
    vocabulary = min(spec.vocab_size, 1000)
    tokens = TokenBuffers(
        index=np.arange(num_samples),
        token_ids=generator.integers(0, vocabulary, num_tokens).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(lens)]),
        writers=single_turn_writers(prompt_lens, response_lens),
        sampler_logprobs=generator.normal(-2, 0.5, num_predicted).astype(np.float32),
        response_offsets=np.concatenate([[0], np.cumsum(response_lens)]),
    )
    return facts, tokens


def _longest_response(request: TraceRequest, config: RunConfig) -> int:
    """Tokens of the longest response; by default a group fills the token budget."""
    response = request.response_tokens
    if response is None:
        budget = config.batch.tokens_per_microbatch
        response = max(_SHORTEST, budget // request.group_size - request.prompt_tokens)
    return min(response, max_sequence_tokens(config) - request.prompt_tokens)
