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
_MAX_SPLITS = 20_000
_CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A value with its 95 % percentile interval."""

    value: float
    low: float
    high: float


# ------------------------------------------------------------------------------------- one quantity
def bootstrap_mean(values: Sequence[float], seed: int = 0) -> Interval | None:
    """The mean over problems; the bootstrap draws problems. None without values."""
    if not values:
        return None
    array = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)

    draws = rng.integers(len(array), size=(RESAMPLES, len(array)))
    means = array[draws].mean(axis=1)
    return Interval(float(array.mean()), *_percentiles(means))


def bootstrap_seeds(scores: np.ndarray, seed: int = 0) -> Interval | None:
    """The mean over seeds and problems; the bootstrap draws both.

    Args:
        scores: float [seeds, problems]; NaN where there is no score.
        seed: of the bootstrap.

    Returns:
        None without scores.
    """
    is_known = ~np.isnan(scores)
    if not is_known.any():
        return None
    rng = np.random.default_rng(seed)
    num_seeds, num_problems = scores.shape

    seed_draws = _draw_counts(num_seeds, rng)
    problem_draws = _draw_counts(num_problems, rng)
    counts = ((seed_draws @ is_known) * problem_draws).sum(axis=1)
    sums = ((seed_draws @ np.where(is_known, scores, 0.0)) * problem_draws).sum(axis=1)

    # A draw may contain only pairs without a score.
    means = sums[counts > 0] / counts[counts > 0]
    return Interval(float(scores[is_known].mean()), *_percentiles(means))


def bootstrap_average(
    parts: Sequence[np.ndarray], minus: Sequence[np.ndarray] | None = None, seed: int = 0
) -> Interval | None:
    """The mean over benchmarks of the mean over seeds and problems, or the difference of two.

    The bootstrap draws the seeds of each side once for all benchmarks, and the problems of each
    benchmark; both sides have the same problems.

    Args:
        parts: of each benchmark, float [seeds, problems]; NaN where there is no score.
        minus: the other side, of the same benchmarks.
        seed: of the bootstrap.

    Returns:
        None if a benchmark has no score.
    """
    rng = np.random.default_rng(seed)
    sides = [parts] if minus is None else [parts, minus]
    seed_draws = [_draw_counts(side[0].shape[0], rng) for side in sides]
    total = 0.0
    draws = np.zeros(RESAMPLES)
    for number, first in enumerate(parts):
        problem_draws = _draw_counts(first.shape[1], rng)
        for side, seeds, sign in zip(sides, seed_draws, (1.0, -1.0), strict=False):
            scores = side[number]
            is_known = ~np.isnan(scores)
            if not is_known.any():
                return None
            total += sign * float(scores[is_known].mean())
            counts = ((seeds @ is_known) * problem_draws).sum(axis=1)
            sums = ((seeds @ np.where(is_known, scores, 0.0)) * problem_draws).sum(axis=1)
            # A draw may contain only pairs without a score; the percentiles leave it out.
            means = np.divide(sums, counts, out=np.full(RESAMPLES, np.nan), where=counts > 0)
            draws += sign * means
    whole_draws = draws[~np.isnan(draws)] / len(parts)
    return Interval(total / len(parts), *_percentiles(whole_draws))


def _draw_counts(size: int, rng: np.random.Generator) -> np.ndarray:
    """How often each of `size` items is drawn: int [RESAMPLES, size]."""
    counts: np.ndarray = rng.multinomial(size, np.full(size, 1 / size), size=RESAMPLES)
    return counts


def majority_at_k(
    answers: Sequence[str | None], labels: Sequence[int | None], k: int, seed: int = 0
) -> float:
    """Share of k-subsets of a problem's responses whose most frequent answer is right.

    Responses without an answer do not vote. A tie counts as the mean over the tied answers; a
    subset without votes counts as 0. An answer counts by the mean label of its judged responses.

    Args:
        answers: the answer of each response, None without one.
        labels: 0 or 1 of each response, None if it was not judged.
        k: size of a subset, at most the number of responses.
        seed: of the random subsets, where there are more than RESAMPLES.
    """
    names = sorted({answer for answer in answers if answer is not None})
    if not names:
        return 0.0
    is_vote_for = np.array(
        [[answer == name for name in names] for answer in answers], dtype=np.int64
    )
    right = np.array([_mean_label(name, answers, labels) for name in names])

    subsets = _subsets(len(answers), min(k, len(answers)), RESAMPLES, seed)
    votes = np.array([is_vote_for[subset].sum(axis=0) for subset in subsets])
    is_winner = (votes == votes.max(axis=1, keepdims=True)) & (votes > 0)
    num_winners = np.maximum(is_winner.sum(axis=1), 1)
    return float(((is_winner @ right) / num_winners).mean())


def _mean_label(name: str, answers: Sequence[str | None], labels: Sequence[int | None]) -> float:
    """Mean label of the judged responses with the answer `name`; 0 if none is judged."""
    judged = []
    for answer, label in zip(answers, labels, strict=True):
        if answer == name and label is not None:
            judged.append(label)
    return float(np.mean(judged)) if judged else 0.0


# ------------------------------------------------------------------------------- aggregates of runs
def interquartile_mean(scores: np.ndarray) -> float:
    """Mean of the middle half of all scores of all runs and tasks.

    floor(n / 4) scores are cut at each end.
    """
    ordered = np.sort(scores, axis=None)
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def probability_of_improvement(x: np.ndarray, y: np.ndarray) -> float:
    """P(a run of `x` is better than a run of `y`), mean over tasks; equal scores count as half."""
    differences = x[:, None, :] - y[None, :, :]
    return float(((differences > 0) + 0.5 * (differences == 0)).mean())


def performance_profile(scores: np.ndarray, thresholds: Sequence[float]) -> list[float]:
    """Share of the scores of all runs and tasks above each threshold."""
    is_above = scores.reshape(-1, 1) > np.asarray(thresholds)
    shares: list[float] = is_above.mean(axis=0).tolist()
    return shares


def profile_intervals(
    scores: np.ndarray, thresholds: Sequence[float], seed: int = 0
) -> list[Interval]:
    """The performance profile with its interval at each threshold, by stratified bootstrap."""
    rng = np.random.default_rng(seed)
    profiles = [performance_profile(_resampled(scores, rng), thresholds) for _ in range(RESAMPLES)]
    draws_by_threshold = np.array(profiles).T

    values = performance_profile(scores, thresholds)
    return [
        Interval(value, *_percentiles(draws))
        for value, draws in zip(values, draws_by_threshold, strict=True)
    ]


def stratified(aggregate: Callable[..., float], *scores: np.ndarray, seed: int = 0) -> Interval:
    """`aggregate` of the scores of one or several methods, with its interval.

    Args:
        aggregate: receives one array of scores for each method.
        scores: float [runs, tasks] of each method.
        seed: of the stratified bootstrap.
    """
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(RESAMPLES):
        resampled = [_resampled(method_scores, rng) for method_scores in scores]
        draws.append(aggregate(*resampled))
    return Interval(aggregate(*scores), *_percentiles(draws))


def permutation_p(x: np.ndarray, y: np.ndarray, seed: int = 0) -> float:
    """Two-sided p of the difference in the mean score over tasks.

    Runs are exchanged between the two sides. The splits of `_subsets` contain the observed one, so
    p > 0. A bootstrap of few runs is too optimistic for a verdict: with three against three runs no
    split can have p < 0.1.
    """
    run_means = np.concatenate([x.mean(axis=1), y.mean(axis=1)])
    splits = _subsets(len(run_means), len(x), _MAX_SPLITS, seed)
    sums = run_means[splits].sum(axis=1)
    differences = np.abs(sums / len(x) - (run_means.sum() - sums) / len(y))

    observed = abs(x.mean() - y.mean())
    # The observed split is one of them, so rounding must not exclude it.
    return float((differences >= observed - 1e-12).mean())


# ------------------------------------------------------------------------------------------ drawing
def _subsets(n: int, k: int, max_subsets: int, seed: int) -> np.ndarray:
    """int [subsets, k]: k-subsets of range(n); range(k) is first.

    All of them if there are at most `max_subsets`, else that many random ones.
    """
    if math.comb(n, k) <= max_subsets:
        return np.array(list(itertools.combinations(range(n), k)))
    rng = np.random.default_rng(seed)
    orders = rng.permuted(np.tile(np.arange(n), (max_subsets, 1)), axis=1)
    subsets: np.ndarray = orders[:, :k]
    subsets[0] = np.arange(k)
    return subsets


def _resampled(scores: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Scores of the same shape: each task draws its runs with replacement."""
    num_runs, num_tasks = scores.shape
    runs = rng.integers(num_runs, size=(num_runs, num_tasks))
    resampled: np.ndarray = scores[runs, np.arange(num_tasks)]
    return resampled


def _percentiles(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    margin = 50 * (1 - _CONFIDENCE)
    low, high = np.percentile(values, [margin, 100 - margin])
    return float(low), float(high)
