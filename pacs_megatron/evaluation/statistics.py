"""Intervals and comparisons by bootstrap.

The aggregates over runs are those of Agarwal et al., "Deep Reinforcement Learning at the Edge of the Statistical
Precipice", arXiv:2108.13264, which the library rliable implements. Scores are float [runs, tasks]; a stratified bootstrap
draws runs with replacement within each task, independently for each task.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES, _SPLITS, _CONFIDENCE = 2000, 20_000, 0.95
_DRAWS = 400
"""Number of random subsets for maj@k with k < n"""


class Interval(NamedTuple):
    """A value with its 95 % percentile interval."""

    value: float
    low: float
    high: float


def bootstrap_mean(values: Sequence[float], seed: int = 0) -> Interval | None:
    """The mean over problems; the bootstrap draws problems. None without values."""
    if not values:
        return None
    array, rng = np.asarray(values, dtype=np.float64), np.random.default_rng(seed)
    means = array[rng.integers(len(array), size=(RESAMPLES, len(array)))].mean(axis=1)
    return Interval(float(array.mean()), *_percentiles(means))


def bootstrap_seeds(scores: np.ndarray, seed: int = 0) -> Interval | None:
    """The mean of float [seeds, problems]; the bootstrap draws both. NaN: no score. None without scores."""
    known, rng = ~np.isnan(scores), np.random.default_rng(seed)
    if not known.any():
        return None
    runs, problems = (rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES) for n in scores.shape)
    counts = ((runs @ known) * problems).sum(axis=1)
    sums = ((runs @ np.where(known, scores, 0.0)) * problems).sum(axis=1)
    return Interval(float(scores[known].mean()), *_percentiles(sums[counts > 0] / counts[counts > 0]))


def majority_at_k(answers: Sequence[str | None], labels: Sequence[int | None], k: int, seed: int = 0) -> float:
    """Share of k-subsets of a problem's responses whose most frequent answer is right; random subsets for k < n.

    Responses without an answer do not vote. A tie counts as the mean over the tied answers; a subset without votes
    counts as 0. An answer counts by the mean label of its judged responses.
    """
    names = sorted({answer for answer in answers if answer is not None})
    if not names:
        return 0.0
    index = np.array([-1 if answer is None else names.index(answer) for answer in answers])
    pairs = list(zip(answers, labels, strict=True))
    judged = [[label for answer, label in pairs if answer == name and label is not None] for name in names]
    right = np.array([np.mean(found) if found else 0.0 for found in judged])
    if k >= len(index):
        subsets = [np.arange(len(index))]
    else:
        rng = np.random.default_rng(seed)
        subsets = [rng.choice(len(index), size=k, replace=False) for _ in range(_DRAWS)]
    shares = []
    for subset in subsets:
        votes = np.bincount(index[subset][index[subset] >= 0], minlength=len(names))
        shares.append(right[votes == votes.max()].mean() if votes.max() else 0.0)
    return float(np.mean(shares))


def interquartile_mean(scores: np.ndarray) -> float:
    """Mean of the middle half of all scores of all runs and tasks: floor(n / 4) are cut at each end."""
    ordered = np.sort(scores, axis=None)
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> float:
    """P(a run of `x` is better than a run of `y`), mean over tasks; equal scores count as one half."""
    differences = x[:, None, :] - y[None, :, :]
    return float(((differences > 0) + 0.5 * (differences == 0)).mean())


def performance_profile(scores: np.ndarray, thresholds: Sequence[float]) -> list[float]:
    """Share of the scores of all runs and tasks above each threshold."""
    return [float((scores > threshold).mean()) for threshold in thresholds]


def stratified(aggregate: Callable[..., float], *scores: np.ndarray, seed: int = 0) -> Interval:
    """`aggregate` of the scores of one or several methods with its interval by stratified bootstrap."""
    rng = np.random.default_rng(seed)
    found = [aggregate(*(_resampled(own, rng) for own in scores)) for _ in range(RESAMPLES)]
    return Interval(aggregate(*scores), *_percentiles(found))


def permutation_p(x: np.ndarray, y: np.ndarray, seed: int = 0) -> float:
    """Two-sided p of the difference in the mean score over tasks, by exchanging runs between the two sides.

    Uses all splits if there are at most `_SPLITS`, else that many random ones. A bootstrap of few runs is too
    optimistic for a verdict: with three against three runs no split can have p < 0.1.
    """
    runs = np.concatenate([x.mean(axis=1), y.mean(axis=1)])
    if math.comb(len(runs), len(x)) <= _SPLITS:
        splits = np.array(list(itertools.combinations(range(len(runs)), len(x))))
    else:
        splits = np.random.default_rng(seed).permuted(np.tile(np.arange(len(runs)), (_SPLITS, 1)), axis=1)[:, : len(x)]
    sums = runs[splits].sum(axis=1)
    differences = np.abs(sums / len(x) - (runs.sum() - sums) / len(y))
    return float((differences >= abs(x.mean() - y.mean()) - 1e-12).mean())


def _resampled(scores: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    runs, tasks = scores.shape
    drawn: np.ndarray = scores[rng.integers(runs, size=(runs, tasks)), np.arange(tasks)]
    return drawn


def _percentiles(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    margin = 50 * (1 - _CONFIDENCE)
    low, high = np.percentile(values, [margin, 100 - margin])
    return float(low), float(high)
