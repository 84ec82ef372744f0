"""Intervals against distributions with known answers; rliable's aggregates against their documented
formulas.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from pacs_megatron.workbench.statistics import (
    bootstrap_average,
    bootstrap_mean,
    interquartile_mean,
    majority_at_k,
    performance_profile,
    permutation_p,
    probability_of_improvement,
    profile_intervals,
    stratified,
)


def test_the_interval_of_a_mean_covers_it_in_95_percent_of_trials() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        found = bootstrap_mean(list(rng.normal(0.3, 1.0, size=60)), seed=trial)
        assert found is not None and found.low <= found.value <= found.high
        hits += found.low <= 0.3 <= found.high
    assert 0.89 <= hits / 200 <= 0.99
    assert bootstrap_mean([]) is None


def test_the_interval_of_a_mean_has_the_width_of_the_normal_limit() -> None:
    values = list(np.random.default_rng(1).normal(size=400))
    found = bootstrap_mean(values)
    assert found is not None
    assert (found.high - found.low) / 2 == pytest.approx(
        1.96 * np.std(values) / math.sqrt(400), rel=0.1
    )


def test_majority_counts_every_subset() -> None:
    answers = ["7", "7", "3", "3", "3", None]
    labels = [1, 1, 0, 0, 0, 0]
    # All six: 3 has the most votes.
    assert majority_at_k(answers, labels, 6) == 0.0
    assert majority_at_k(["7", "7", "3"], [1, 1, 0], 3) == 1.0
    assert majority_at_k(["7", "3"], [1, 0], 2) == 0.5  # a tie
    assert majority_at_k([None, None], [0, 0], 2) == 0.0
    exact = []
    for subset in itertools.combinations(range(6), 3):
        votes = [sum(answers[i] == name for i in subset) for name in ("7", "3")]
        best = max(votes)
        exact.append(
            0.0
            if not best
            else np.mean([right for right, v in zip((1.0, 0.0), votes, strict=True) if v == best])
        )
    assert majority_at_k(answers, labels, 3) == pytest.approx(np.mean(exact))
    many = majority_at_k(answers * 8, labels * 8, 3)  # C(48, 3) subsets: a random part of them
    assert many == pytest.approx(
        np.mean([majority_at_k(answers * 8, labels * 8, 3, seed) for seed in (1, 2)]), abs=0.04
    )
    assert majority_at_k(["7", "7", "3"], [1, None, 0], 3) == 1.0  # an unjudged response votes


def test_majority_of_ties_and_of_subsets_without_a_vote() -> None:
    """By the definition: a tie is the mean over the tied answers, a subset without votes is 0."""
    # The subsets of one response are right, without a vote, without a vote.
    assert majority_at_k(["7", None, None], [1, 0, 0], 1) == pytest.approx(1 / 3)
    # {7, -}, {7, -}, {-, -}
    assert majority_at_k(["7", None, None], [1, 0, 0], 2) == pytest.approx(2 / 3)
    # Three tied answers, one of them right; and two right ones of three.
    assert majority_at_k(["7", "3", "5"], [1, 0, 0], 3) == pytest.approx(1 / 3)
    assert majority_at_k(["7", "3", "5", None], [1, 0, 1, 0], 4) == pytest.approx(2 / 3)

    answers = ["7", "3", None, "5", "7", None, "3", None]
    labels = [1, 0, 0, 1, 1, 0, 0, 0]
    for k in range(1, 9):
        values = []
        for subset in itertools.combinations(range(8), k):
            votes = [answers[index] for index in subset if answers[index] is not None]
            counts = {answer: votes.count(answer) for answer in votes}
            winners = [name for name in counts if counts[name] == max(counts.values())]
            right = [name in ("7", "5") for name in winners]
            values.append(sum(right) / len(right) if right else 0.0)
        assert majority_at_k(answers, labels, k) == pytest.approx(np.mean(values))


def test_interquartile_mean_cuts_a_quarter_at_each_end() -> None:
    scores = np.array([[9.0, 1.0], [2.0, 3.0], [100.0, 4.0], [-50.0, 5.0]])
    assert interquartile_mean(scores) == pytest.approx((2 + 3 + 4 + 5) / 4)
    rng = np.random.default_rng(2)
    for shape in [(3, 2), (5, 7), (10, 1), (1, 1)]:
        scores = rng.normal(size=shape)
        # scipy.stats.trim_mean(x, 0.25)
        ordered = sorted(scores.ravel())
        cut = int(0.25 * scores.size)
        assert interquartile_mean(scores) == pytest.approx(
            np.mean(ordered[cut : scores.size - cut])
        )


def test_probability_of_improvement_is_the_mann_whitney_statistic_by_task() -> None:
    x = np.array([[3.0, 1.0], [2.0, 2.0]])
    y = np.array([[1.0, 2.0], [2.0, 3.0], [0.0, 1.0]])
    direct = []
    for task in range(2):
        wins = []
        for a in x[:, task]:
            for b in y[:, task]:
                wins.append(1.0 if a > b else 0.5 * (a == b))
        direct.append(sum(wins) / len(wins))
    assert probability_of_improvement(x, y) == pytest.approx(np.mean(direct))
    assert probability_of_improvement(y, x) == pytest.approx(1 - np.mean(direct))
    assert stratified(probability_of_improvement, x + 10, y) == (1.0, 1.0, 1.0)


def test_a_profile_is_the_share_of_scores_above() -> None:
    scores = np.array([[0.1, 0.5], [0.3, 0.9]])
    assert performance_profile(scores, [0.0, 0.3, 0.6, 1.0]) == [1.0, 0.5, 0.25, 0.0]
    # Of a resample, each task has two draws of two runs: 0, 1 or 2 of them are above 0.2.
    [sure, found] = profile_intervals(scores, [0.0, 0.2])
    assert sure == (1.0, 1.0, 1.0) and found == (0.75, 0.5, 1.0)


def test_the_bootstrap_is_stratified_by_task() -> None:
    """Tasks differ, runs do not: every resample equals the scores.

    A bootstrap over all scores would spread.
    """
    found = stratified(interquartile_mean, np.tile([0.0, 1.0, 5.0, 9.0], (4, 1)))
    assert found.low == found.value == found.high == pytest.approx(3.0)
    runs = np.random.default_rng(3).normal(size=(12, 1))
    found = stratified(lambda scores: float(scores.mean()), runs)
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * runs.std() / math.sqrt(12), rel=0.2)


def test_the_permutation_test_counts_splits() -> None:
    x = np.array([[0.5, 0.7], [0.6, 0.8], [0.7, 0.9]])
    y = np.array([[0.1, 0.2], [0.2, 0.3], [0.3, 0.4]])
    assert permutation_p(x, y) == pytest.approx(2 / 20)
    assert permutation_p(x, x) == 1.0
    rng = np.random.default_rng(4)
    false = sum(
        permutation_p(rng.normal(size=(5, 2)), rng.normal(size=(5, 2))) < 0.05 for _ in range(300)
    )
    assert false / 300 <= 0.08
    many = permutation_p(
        rng.normal(0.0, 1.0, (12, 1)), rng.normal(1.5, 1.0, (12, 1))
    )  # random splits
    assert many < 0.02
    assert permutation_p(np.arange(12.0)[:, None], 50 + np.arange(12.0)[:, None]) == pytest.approx(
        1 / 20_000
    )


def test_the_interval_of_an_average_over_benchmarks_equals_a_plain_loop() -> None:
    """Two seeds, two benchmarks of other sizes, one unknown score; and the difference to a side
    with one seed on the same problems.
    """
    rng = np.random.default_rng(4)
    parts = [rng.random((2, 12)), rng.random((2, 5))]
    parts[0][1, 3] = np.nan
    base = [rng.random((1, 12)) * 0.2, parts[1][:1] - 0.3]

    means = []
    differences = []
    for _ in range(4000):
        seeds = rng.integers(2, size=2)
        total = 0.0
        other_total = 0.0
        for part, other in zip(parts, base, strict=True):
            columns = rng.integers(part.shape[1], size=part.shape[1])
            total += np.nanmean(part[seeds][:, columns])
            other_total += other[0, columns].mean()
        means.append(total / 2)
        differences.append((total - other_total) / 2)

    value = np.mean([np.nanmean(part) for part in parts])
    found = bootstrap_average(parts)
    assert found is not None and found.value == pytest.approx(value)
    np.testing.assert_allclose(found[1:], np.percentile(means, [2.5, 97.5]), atol=0.012)
    found = bootstrap_average(parts, base)
    assert found is not None
    assert found.value == pytest.approx(value - np.mean([part.mean() for part in base]))
    np.testing.assert_allclose(found[1:], np.percentile(differences, [2.5, 97.5]), atol=0.012)


def test_an_average_of_equal_sides_and_of_no_scores() -> None:
    """Paired problems: a constant difference has no width."""
    base = [np.random.default_rng(5).random((1, 30))]
    found = bootstrap_average([base[0] + 0.25], base)
    assert found is not None
    np.testing.assert_allclose(found, 0.25)
    assert bootstrap_average([base[0], np.full((1, 3), np.nan)]) is None
