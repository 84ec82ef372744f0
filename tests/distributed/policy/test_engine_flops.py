"""Megatron's formula beside the FLOPs that torch counts in the real model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pacs_megatron.batching.tables import single_turn_writers
from pacs_megatron.models.flops import PassedTokens, forward_flops, total_flops
from pacs_megatron.objectives.grpo import GrpoOptions
from pacs_megatron.objectives.registry import build_objective
from tests.support.policies.policy_cases import make_part, make_policy, random_step
from tests.support.ranks import run_ranks

PROMPT = 7
RESPONSE = 17
BUDGET = 1024


def equal_step() -> Any:
    """A step of 16 samples of one length, so that attention pads nothing."""
    facts, tokens = random_step(0)
    n = facts.num_samples
    lens = np.full(n, PROMPT + RESPONSE)
    facts = replace(
        facts,
        prompt_lens=np.full(n, PROMPT),
        response_lens=np.full(n, RESPONSE),
        rewards=np.arange(n, dtype=np.float64),  # no advantage is 0, so no sample is skipped
    )
    rng = np.random.default_rng(1)
    tokens = replace(
        tokens,
        token_ids=rng.integers(0, 250, lens.sum()).astype(np.int32),
        offsets=np.concatenate([[0], np.cumsum(lens)]),
        writers=single_turn_writers(facts.prompt_lens, facts.response_lens),
        sampler_logprobs=np.full(n * RESPONSE, -2.0, dtype=np.float32),
        response_offsets=np.concatenate([[0], np.cumsum(facts.response_lens)]),
    )
    return facts, tokens


def test_torch_counts_the_flops_of_the_formula(tiny_qwen3: Path) -> None:
    """Products of matrices equal it exactly; attention computes the masked half too."""

    def on_rank(_rank: int, world: int) -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.utils.flop_counter import FlopCounterMode

        policy = make_policy(tiny_qwen3, world, tokens_per_microbatch=BUDGET)
        objective = build_objective(GrpoOptions(name="grpo"), updates_per_step=1)
        facts, tokens = equal_step()
        minibatch = make_part(facts, tokens, policy, tokens_per_microbatch=BUDGET)

        def counted(action: Any) -> dict[str, int]:
            # The plain products of attention are counted in both passes.
            with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
                action()
            return {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}

        forward = counted(lambda: policy.logprobs(minibatch, "step_start"))
        of_forward = policy.take_tokens()
        inputs = objective.prepare_step(minibatch.facts)
        update = counted(lambda: policy.update(minibatch, objective, inputs))
        of_update = policy.take_tokens()
        return forward, update, of_forward, of_update, policy.spec, policy.table.padded_vocab

    forward, update, of_forward, of_update, spec, vocab = run_ranks(on_rank, 1)[0]
    length = PROMPT + RESPONSE - 1  # the last token is no input
    expected = PassedTokens(16 * length, 16 * length**2, 16 * RESPONSE)
    assert of_forward == (expected, PassedTokens())
    assert of_update == (PassedTokens(), expected)

    scores = PassedTokens(squares=expected.squares)
    attention = forward_flops(spec, vocab, scores)
    matrices = forward_flops(spec, vocab, expected) - attention
    assert sum(forward.values()) == matrices + 2 * attention, forward
    assert sum(update.values()) == 3 * (matrices + 2 * attention), update
    whole = total_flops(spec, vocab, *of_update)
    assert whole == pytest.approx(3 * (matrices + attention))


def test_skipped_samples_are_not_counted(tiny_qwen3: Path) -> None:
    """GRPO skips the samples whose advantage is 0."""

    def on_rank(_rank: int, world: int) -> Any:
        policy = make_policy(tiny_qwen3, world, tokens_per_microbatch=BUDGET)
        objective = build_objective(GrpoOptions(name="grpo"), updates_per_step=1)
        facts, tokens = equal_step()
        rewards = np.where(facts.groups == 0, facts.rewards, 1.0)
        minibatch = make_part(
            replace(facts, rewards=rewards), tokens, policy, tokens_per_microbatch=BUDGET
        )
        policy.update(minibatch, objective, objective.prepare_step(minibatch.facts))
        return policy.take_tokens()

    forward, trained = run_ranks(on_rank, 1)[0]
    assert forward == PassedTokens()
    assert trained.outputs == 4 * RESPONSE
