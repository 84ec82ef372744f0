"""Lengths of samples for `plan`, against sums over samples by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pacs_megatron.config import load_config
from pacs_megatron.errors import ConfigError
from pacs_megatron.observability.rollout_log import rollout_path
from pacs_megatron.workbench.plan.lengths import Lengths, assumed_lengths, lengths_from
from pacs_megatron.workbench.plan.plan import make_plan

LOADED = load_config(
    Path(__file__).parents[4] / "configs" / "runs" / "pacs-qwen3-14b-2n8g-tp4.yaml"
)
LIMIT = 8192
"""of a response there; prompts have at most 1,024 tokens"""


def write_steps(folder: Path, steps: dict[int, list[tuple[int, int]]]) -> None:
    for step, samples in steps.items():
        path = rollout_path(folder, step)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            json.dumps({"prompt_tokens": prompt, "response_tokens": response})
            for prompt, response in samples
        ]
        path.write_text("\n".join(lines) + "\n")


def test_given_quantiles() -> None:
    """Between two quantiles lengths are uniform: E[r] is 2,000 and E[r^2] (a^2 + ab + b^2) / 3."""
    lengths = lengths_from("180:1000,3000", LOADED.config)

    square = (1000**2 + 1000 * 3000 + 3000**2) / 3
    assert (lengths.prompt, lengths.longest, lengths.source) == (180, 3000, "given")
    assert lengths.response == pytest.approx(2000, rel=1e-3)
    assert lengths.response_of_token == pytest.approx(square / 2000, rel=1e-3)


def test_half_of_the_responses_below_the_median() -> None:
    """The quantiles 0, 50 and 100 %: half are uniform to 1,000, half from there to 8,000."""
    lengths = lengths_from("100:10,1000,8000", LOADED.config)
    assert lengths.response == pytest.approx((505 + 4500) / 2, rel=1e-3)


def test_lengths_of_a_run(tmp_path: Path) -> None:
    """Of its last five steps. A response over the planned limit is cut there."""
    write_steps(tmp_path, {step: [(100, 1000)] for step in range(1, 4)})
    write_steps(tmp_path, {step: [(200, 2000)] for step in range(4, 8)})
    write_steps(tmp_path, {8: [(200, 2000), (400, 9000)]})
    lengths = lengths_from(str(tmp_path), LOADED.config)

    responses = np.array([2000, 2000, 2000, 2000, 2000, LIMIT])
    assert lengths.prompt == pytest.approx(200 + 200 / 6)
    assert lengths.response == pytest.approx(responses.mean())
    assert lengths.longest == LIMIT
    assert lengths.response_of_token == pytest.approx((responses**2).sum() / responses.sum())
    assert lengths.source == f"6 samples of {tmp_path}, 16.7% of them cut at 8192 tokens"


def test_the_length_of_the_sample_of_a_token() -> None:
    responses = np.array([100.0, 700.0, 2500.0])
    lengths = Lengths(
        prompt=50,
        response=responses.mean(),
        longest=2500,
        response_of_token=(responses**2).sum() / responses.sum(),
    )
    samples = 50 + responses
    assert lengths.total == pytest.approx(samples.mean())
    assert lengths.total_of_token == pytest.approx((samples**2).sum() / samples.sum())


def test_assumed_lengths() -> None:
    """15 % and 45 % of the limits; every token is in a sample of the mean length."""
    lengths = assumed_lengths(LOADED.config)
    assert lengths.prompt == pytest.approx(0.15 * 1024)
    assert lengths.response == lengths.response_of_token == pytest.approx(0.45 * LIMIT)
    assert lengths.longest == LIMIT
    assert lengths.total_of_token == pytest.approx(lengths.total)


def test_what_lengths_change_in_a_step() -> None:
    """Equal responses of the assumed mean leave out the last round, which waits for the longest.
    Uneven ones of the same mean take longer than equal ones, in the rollout and in attention.
    """
    seconds = []
    assumed = assumed_lengths(LOADED.config)
    mean = assumed.response
    equal = Lengths(assumed.prompt, mean, mean, response_of_token=mean)
    uneven = Lengths(assumed.prompt, mean, mean, response_of_token=1.5 * mean)
    for lengths in (None, equal, uneven):
        plan = make_plan(LOADED, lengths)
        by_name = {phase.name: phase for phase in plan.phases}
        seconds.append((by_name["rollout"].seconds, by_name["updates"].seconds))

    of_assumed, of_equal, of_uneven = seconds
    assert of_equal[0] < of_assumed[0]
    assert of_equal[1] == pytest.approx(of_assumed[1])
    assert of_uneven[0] > 1.02 * of_equal[0]

    # Scores are 4 * hidden FLOPs a layer for each pair of a token and one before it.
    length = assumed.total
    scores = 2 * length * 5120 * 40
    matrices = 40 * (5120 * 7168 + 5120 * 5120 + 3 * 5120 * 17408)
    head = 5120 * 151936 * mean / length
    added = scores * (uneven.total_of_token / length - 1) / (2 * (matrices + head) + scores)
    assert of_uneven[1] / of_equal[1] - 1 == pytest.approx(added, rel=0.1)


@pytest.mark.parametrize(
    ("lines", "says"),
    [("", "no response with a token"), ("{}\n", "prompt_tokens=None for a sample")],
)
def test_rollouts_without_lengths(lines: str, says: str, tmp_path: Path) -> None:
    path = rollout_path(tmp_path, 1)
    path.parent.mkdir(parents=True)
    path.write_text(lines)
    with pytest.raises(ConfigError, match=says):
        lengths_from(str(tmp_path), LOADED.config)
