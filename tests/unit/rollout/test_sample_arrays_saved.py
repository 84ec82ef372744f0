"""Samples of a checkpoint whose digests fit although their values are wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pacs_megatron.rollout.sample_arrays import check_saved


def saved() -> dict[str, np.ndarray]:
    return {
        "token_ids": np.array([1, 2, 3, 4, 5], np.int32),
        "offsets": np.array([0, 3, 5]),
        "logprobs": np.array([-0.5, 0.0], np.float32),
        "logprob_offsets": np.array([0, 1, 2]),
        "labels": np.array([1, -1], np.int8),
    }


def check(arrays: dict[str, np.ndarray], step: int = 2) -> None:
    check_saved({"steps": [{"step": step}]}, arrays, range(2, 4), vocab_size=6)


@pytest.mark.parametrize("step", [2, 3])
def test_samples_as_they_are_saved(step: int) -> None:
    check(saved(), step)
    check_saved(
        {"steps": []},
        {name: values[:0] for name, values in saved().items()} | empty_offsets(),
        range(1, 2),
        6,
    )


def empty_offsets() -> dict[str, np.ndarray]:
    return {"offsets": np.array([0]), "logprob_offsets": np.array([0])}


def test_tokens_of_the_environment_as_they_are_saved() -> None:
    """Of two responses of three tokens."""
    arrays = saved() | {
        "token_ids": np.array([1, 2, 3, 4, 5, 4, 3, 2], np.int32),
        "offsets": np.array([0, 4, 8]),
        "logprobs": np.full(6, -0.5, np.float32),
        "logprob_offsets": np.array([0, 3, 6]),
    }

    def check_spans(spans: list[list[int]]) -> None:
        header = {"steps": [], "environment": [[], spans]}
        check_saved(header, arrays, range(2, 4), vocab_size=6)

    check_spans([])
    check_spans([[0, 1], [1, 2]])
    for wrong in ([[-1, 1]], [[1, 3]], [[1, 2], [0, 1]], [[2, 1]]):
        with pytest.raises(ValueError, match=r"of the environment are not in a response of 3"):
            check_spans(wrong)


@pytest.mark.parametrize(
    ("name", "at", "value", "expected"),
    [
        ("token_ids", 3, 6, "a token id is not between 0 and 5"),
        ("token_ids", 0, -1, "a token id is not between 0 and 5"),
        ("offsets", 1, 10**12, "offsets do not divide token_ids"),
        ("offsets", 2, 4, "offsets do not divide token_ids"),
        ("logprob_offsets", 0, 1, "logprob_offsets do not divide logprobs"),
        ("logprobs", 0, np.nan, "a log-prob is not finite"),
        ("labels", 0, 7, "a label is not 0 or 1"),
    ],
)
def test_values_that_no_sampler_returns(name: str, at: int, value: Any, expected: str) -> None:
    arrays = saved()
    arrays[name][at] = value
    with pytest.raises(ValueError, match=expected):
        check(arrays)


@pytest.mark.parametrize("step", [1, 4, 99])
def test_steps_that_the_run_cannot_have_sampled(step: int) -> None:
    with pytest.raises(ValueError, match=f"step {step} is not between 2 and 3"):
        check(saved(), step)
