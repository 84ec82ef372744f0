"""Lengths of prompts and responses for `plan`: assumed, given, or those of a run's rollouts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pacs_megatron.config.checks import max_response_tokens
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.errors import ConfigError
from pacs_megatron.observability.rollout_log import read_rollouts, rollout_files
from pacs_megatron.runtime.waiting import report_wait
from pacs_megatron.workbench.plan import constants

_NUM_STEPS = 5
"""of a run, the last ones"""
_NUM_POINTS = 1001
"""at which given quantiles are interpolated"""
_FORM = (
    "a run's folder, or the mean prompt and quantiles of responses in tokens, evenly spaced from "
    "the shortest to the longest, such as 180:300,900,1800,4000,8192"
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of samples in tokens."""

    prompt: float
    """mean"""
    response: float
    """mean"""
    longest: float
    """of all responses"""
    response_of_token: float
    """mean over tokens of the length of their response: E[r^2] / E[r]"""
    source: str = "assumed"

    @property
    def total(self) -> float:
        """Mean length of a sample."""
        return self.prompt + self.response

    @property
    def total_of_token(self) -> float:
        """Mean over tokens of the length of their sample, with the mean prompt: E[l^2] / E[l]."""
        of_responses = self.response * (2 * self.prompt + self.response_of_token)
        return (self.prompt**2 + of_responses) / self.total


def assumed_lengths(config: RunConfig) -> Lengths:
    """Means as assumed shares of the limits; as if all responses but the longest were equal."""
    longest = max_response_tokens(config)
    response = longest * constants.MEAN_RESPONSE_FRAC.value
    prompt = config.data.max_prompt_tokens * constants.MEAN_PROMPT_FRAC.value
    return Lengths(prompt, response, longest, response_of_token=response)


def lengths_from(text: str, config: RunConfig) -> Lengths:
    """The lengths of the option `--lengths`.

    Args:
        text: a run's folder, or the mean prompt and quantiles of responses.
        config: of the planned run, whose limits they have.

    Raises ConfigError.
    """
    if Path(text).is_dir():
        return _of_run(Path(text), config)

    prompt, _, quantiles = text.partition(":")
    try:
        mean = float(prompt)
        values = [float(value) for value in quantiles.split(",")]
    except ValueError:
        raise ConfigError(f"plan --lengths={text}: expected {_FORM}") from None
    is_positive = all(0 < value < math.inf for value in (mean, *values))
    if len(values) < 2 or not is_positive or sorted(values) != values:
        raise ConfigError(
            f"plan --lengths={text}: expected positive numbers, and two or more ascending "
            f"quantiles, from {_FORM}"
        )
    limits = {
        "data.max_prompt_tokens": (mean, config.data.max_prompt_tokens),
        "the limit of responses": (values[-1], max_response_tokens(config)),
    }
    for name, (value, limit) in limits.items():
        if value > limit:
            raise ConfigError(
                f"plan --lengths={text}: {value:g} tokens are over {name}, {limit}; lower them, or "
                "raise the limit"
            )

    points = np.linspace(0, 1, _NUM_POINTS)
    responses = np.interp(points, np.linspace(0, 1, len(values)), values)
    return _of_samples([mean], responses, "given")


def _of_run(folder: Path, config: RunConfig) -> Lengths:
    """The lengths of a run's last steps; responses over the planned limit are cut there."""
    files = rollout_files(folder)[-_NUM_STEPS:]
    if not files:
        raise ConfigError(
            f"plan --lengths={folder}: no rollouts of a training step there; expected {_FORM}"
        )
    prompts: list[int] = []
    responses: list[int] = []
    with report_wait(lambda: f"for the rollouts of {len(files)} steps in {folder}"):
        for _, path in files:
            for record in read_rollouts(path):
                prompts.append(_tokens(record, "prompt_tokens", path))
                responses.append(_tokens(record, "response_tokens", path))
    if not any(responses):
        raise ConfigError(
            f"plan --lengths={folder}: the last {len(files)} steps have no response with a token; "
            f"expected {_FORM}"
        )

    limit = max_response_tokens(config)
    lens = np.array(responses)
    num_cut = int((lens > limit).sum())
    source = f"{len(responses):,} samples of {folder}"
    if num_cut:
        source += f", {num_cut / len(lens):.1%} of them cut at {limit} tokens"
    return _of_samples(prompts, np.minimum(lens, limit), source)


def _tokens(record: Mapping[str, Any], key: str, path: Path) -> int:
    """A number of tokens in a rollout file."""
    value = record.get(key)
    if not isinstance(value, int) or value < 0:
        raise ConfigError(
            f"plan --lengths: {path} has {key}={value!r} for a sample, expected a number of "
            "tokens; name another run"
        )
    return value


def _of_samples(
    prompts: Sequence[float], responses: npt.NDArray[np.number], source: str
) -> Lengths:
    """The lengths of these samples; responses [n]."""
    lens = responses.astype(np.float64)
    return Lengths(
        prompt=float(np.mean(prompts)),
        response=float(lens.mean()),
        longest=float(lens.max()),
        response_of_token=float(np.square(lens).mean() / lens.mean()),
        source=source,
    )
