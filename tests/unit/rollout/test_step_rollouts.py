"""Metrics of a step's samples before admission."""

from __future__ import annotations

import numpy as np
import pytest

from pacs_megatron.contracts import Sample, Span, Stop
from pacs_megatron.rollout.step_rollouts import rollout_metrics


def sample(number: int, length: int, stop: Stop, reward: float | None) -> Sample:
    return Sample(
        id=f"1:d/0#{number}",
        prompt_id="d/0",
        token_ids=np.zeros(2 + length, dtype=np.int32),
        prompt_len=2,
        sampler_logprobs=np.zeros(length, dtype=np.float32),
        spans=(Span(version=0, digest="a", start=0, end=length),),
        stop=stop,
        reward=reward,
        label=None if reward is None else int(reward),
        failure="timeout" if reward is None else None,
    )


def test_lengths_and_cut_responses_are_of_all_samples_and_rewards_of_judged_ones() -> None:
    """The unjudged samples are the longest, and all of them are cut."""
    samples = [
        sample(0, 3, Stop.EOS, 1.0),
        sample(1, 5, Stop.LENGTH, 0.0),
        sample(2, 4, Stop.EOS, 1.0),
        sample(3, 8, Stop.LENGTH, None),
        sample(4, 8, Stop.LENGTH, None),
    ]
    assert rollout_metrics(samples, {"unjudged": 2}) == {
        "response/len_mean": pytest.approx(28 / 5),
        "response/len_max": 8.0,
        "response/truncated_frac": pytest.approx(3 / 5),
        "response/tokens": 28.0,
        "reward/mean": pytest.approx(2 / 3),
        "reward/label_mean": pytest.approx(2 / 3),
        "admission/dropped_unjudged": 2.0,
    }
