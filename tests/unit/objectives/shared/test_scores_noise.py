"""Noise of scores between two packings: differences of known size are found, by the formula
and not by the code.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from pacs_megatron.contracts import SampleFacts
from pacs_megatron.objectives.pacs import Pacs, PacsOptions

BETA = 0.5
SIGMA = 0.03
NUM_GROUPS = 512
SIZE = 8


def facts_of(lens: np.ndarray) -> SampleFacts:
    count = len(lens)
    return SampleFacts(
        ids=tuple(f"0:p{row // SIZE}#{row % SIZE}" for row in range(count)),
        groups=np.arange(count) // SIZE,
        labels=np.arange(count) % 2.0,
        rewards=np.arange(count) % 2.0,
        prompt_lens=np.full(count, 3),
        response_lens=lens,
        environment_lens=np.zeros(count, dtype=np.int64),
        truncated=np.zeros(count, dtype=bool),
    )


def measured(change_of: Any, **options: Any) -> tuple[dict[str, float], np.ndarray]:
    """Metrics where packing changes each r by `change_of(rng, lens)`, and the lengths."""
    rng = np.random.default_rng(3)
    lens = np.exp(rng.uniform(np.log(64), np.log(16384), NUM_GROUPS * SIZE)).astype(np.int64)
    before = torch.from_numpy(rng.normal(0, 2, len(lens)))
    after = before + torch.from_numpy(change_of(rng, lens))
    objective = Pacs(PacsOptions(name="pacs", beta=BETA, **options))
    return objective.score_noise(before, after, facts_of(lens), np.arange(len(lens))), lens


def test_independent_differences_of_tokens_give_the_predicted_noise() -> None:
    """sd(psi_i) = beta sigma sqrt(T_i + sum of T_j / (G - 1)^2), here of one packing against exact
    values.
    """
    found, lens = measured(
        lambda rng, lens: BETA * SIGMA * np.sqrt(lens) * rng.normal(size=len(lens))
    )
    others = lens.reshape(NUM_GROUPS, SIZE).sum(1).repeat(SIZE) - lens
    predicted = BETA * SIGMA * np.sqrt((lens + others / (SIZE - 1) ** 2).mean())
    assert found["pacs/score_noise"] == pytest.approx(predicted, rel=0.05)
    assert found["pacs/score_noise_exponent"] == pytest.approx(0.5, abs=0.05)
    assert abs(found["pacs/score_noise_bias"]) < 3 * BETA * SIGMA * np.sqrt(lens.mean() / len(lens))


def test_a_bias_of_each_token_grows_with_the_length() -> None:
    found, lens = measured(lambda rng, lens: BETA * 1e-3 * lens)
    assert found["pacs/score_noise_exponent"] == pytest.approx(1.0, abs=1e-9)
    assert found["pacs/score_noise_bias"] == pytest.approx(BETA * 1e-3 * lens.mean(), rel=1e-9)


def test_what_siblings_share_is_a_bias_and_not_noise() -> None:
    found, _ = measured(lambda rng, lens: np.full(len(lens), 0.25))
    assert found["pacs/score_noise"] < 1e-12 and found["pacs/score_noise_bias"] == pytest.approx(
        0.25
    )


def test_equal_scores_have_no_noise_and_no_exponent() -> None:
    found, _ = measured(lambda rng, lens: np.zeros(len(lens)), reference="frozen")
    assert found == {"pacs/score_noise": 0.0, "pacs/score_noise_bias": 0.0}
