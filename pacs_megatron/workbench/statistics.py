"""Intervals and comparisons by bootstrap.

The aggregates over runs are those of Agarwal et al., "Deep Reinforcement Learning at the Edge of
the Statistical Precipice", arXiv:2108.13264, which the library rliable implements. Scores are float
[runs, tasks]; a stratified bootstrap draws runs with replacement within each task, independently
for each task.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000
_SPLITS = 20_000
_CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A value with its 95 % percentile interval."""

    value: float
    low: float
    high: float


def bootstrap_mean(values: Sequence[float], seed: int = 0) -> Interval | None:
    """The mean over problems; the bootstrap draws problems. None without values."""
    if not values:
        return None
    array = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = array[rng.integers(len(array), size=(RESAMPLES, len(array)))].mean(axis=1)
    return Interval(float(array.mean()), *_percentiles(means))


def bootstrap_seeds(scores: np.ndarray, seed: int = 0) -> Interval | None:
    """The mean of float [seeds, problems]; the bootstrap draws both.

    NaN: no score. None without scores.
    """
    known = ~np.isnan(scores)
    rng = np.random.default_rng(seed)
    if not known.any():
        return None
    runs, problems = (rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES) for n in scores.shape)
    counts = ((runs @ known) * problems).sum(axis=1)
    sums = ((runs @ np.where(known, scores, 0.0)) * problems).sum(axis=1)
    return Interval(
        float(scores[known].mean()), *_percentiles(sums[counts > 0] / counts[counts > 0])
    )


def majority_at_k(
    answers: Sequence[str | None], labels: Sequence[int | None], k: int, seed: int = 0
) -> float:
    """Share of k-subsets of a problem's responses whose most frequent answer is right, as
    `_subsets` draws them.

    Responses without an answer do not vote. A tie counts as the mean over the tied answers; a
    subset without votes counts as 0. An answer counts by the mean label of its judged responses.
    """
    names = sorted({answer for answer in answers if answer is not None})
    if not names:
        return 0.0
    votes_for = np.array([[answer == name for name in names] for answer in answers], dtype=np.int64)
    pairs = list(zip(answers, labels, strict=True))
    judged = [
        [label for answer, label in pairs if answer == name and label is not None] for name in names
    ]
    right = np.array([np.mean(found) if found else 0.0 for found in judged])
    subsets = _subsets(len(answers), min(k, len(answers)), RESAMPLES, seed)
    votes = np.array([votes_for[subset].sum(axis=0) for subset in subsets])
    tied = (votes == votes.max(axis=1, keepdims=True)) & (votes > 0)
    return float(((tied @ right) / np.maximum(tied.sum(axis=1), 1)).mean())


def interquartile_mean(scores: np.ndarray) -> float:
    """Mean of the middle half of all scores of all runs and tasks: floor(n / 4) are cut at each
    end.
    """
    ordered = np.sort(scores, axis=None)
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> float:
    """P(a run of `x` is better than a run of `y`), mean over tasks; equal scores count as one half."""
    differences = x[:, None, :] - y[None, :, :]
    return float(((differences > 0) + 0.5 * (differences == 0)).mean())


def performance_profile(scores: np.ndarray, thresholds: Sequence[float]) -> list[float]:
    """Share of the scores of all runs and tasks above each threshold."""
    found: list[float] = (scores.reshape(-1, 1) > np.asarray(thresholds)).mean(axis=0).tolist()
    return found


def profile_intervals(
    scores: np.ndarray, thresholds: Sequence[float], seed: int = 0
) -> list[Interval]:
    """The performance profile with its interval at each threshold, by stratified bootstrap."""
    rng = np.random.default_rng(seed)
    found = np.array(
        [performance_profile(_resampled(scores, rng), thresholds) for _ in range(RESAMPLES)]
    )
    values = performance_profile(scores, thresholds)
    return [
        Interval(value, *_percentiles(drawn)) for value, drawn in zip(values, found.T, strict=True)
    ]


def stratified(aggregate: Callable[..., float], *scores: np.ndarray, seed: int = 0) -> Interval:
    """`aggregate` of the scores of one or several methods with its interval by stratified
    bootstrap.
    """
    rng = np.random.default_rng(seed)
    found = [aggregate(*(_resampled(own, rng) for own in scores)) for _ in range(RESAMPLES)]
    return Interval(aggregate(*scores), *_percentiles(found))


def permutation_p(x: np.ndarray, y: np.ndarray, seed: int = 0) -> float:
    """Two-sided p of the difference in the mean score over tasks, by exchanging runs between the
    two sides.

    The splits of `_subsets` contain the observed one, so p > 0. A bootstrap of few runs is too
    optimistic for a verdict: with three against three runs no split can have p < 0.1.
    """
    runs = np.concatenate([x.mean(axis=1), y.mean(axis=1)])
    sums = runs[_subsets(len(runs), len(x), _SPLITS, seed)].sum(axis=1)
    differences = np.abs(sums / len(x) - (runs.sum() - sums) / len(y))
    return float((differences >= abs(x.mean() - y.mean()) - 1e-12).mean())


def _subsets(n: int, k: int, most: int, seed: int) -> np.ndarray:
    """int [subsets, k]: all k-subsets of range(n), at most `most`, else that many random ones;
    range(k) is first.
    """
    if math.comb(n, k) <= most:
        return np.array(list(itertools.combinations(range(n), k)))
    subsets: np.ndarray = np.random.default_rng(seed).permuted(
        np.tile(np.arange(n), (most, 1)), axis=1
    )[:, :k]
    subsets[0] = np.arange(k)
    return subsets


def _resampled(scores: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    runs, tasks = scores.shape
    drawn: np.ndarray = scores[rng.integers(runs, size=(runs, tasks)), np.arange(tasks)]
    return drawn


def _percentiles(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    margin = 50 * (1 - _CONFIDENCE)
    low, high = np.percentile(values, [margin, 100 - margin])
    return float(low), float(high)
