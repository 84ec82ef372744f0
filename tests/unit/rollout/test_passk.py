"""pass@k against exact fractions and against counting draws."""

import itertools
import math
import random
import statistics
from fractions import Fraction

import pytest

from pacs_megatron.rollout.passk import ProblemCounts, aggregate, benchmark_metrics, pass_at_k


def exact(n: int, c: int, k: int) -> Fraction:
    return 1 - Fraction(math.comb(n - c, k), math.comb(n, k))


def counts(correct: list[int], n: int = 8) -> list[ProblemCounts]:
    return [
        ProblemCounts(problem_id=str(i), num_samples=n, num_correct=c)
        for i, c in enumerate(correct)
    ]


def test_equals_the_exact_fraction_for_all_small_cases() -> None:
    for n in range(1, 21):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            assert pass_at_k(n, c, k) == pytest.approx(float(exact(n, c, k)), abs=1e-14), (n, c, k)


def test_equals_the_share_of_draws_that_hold_a_correct_one() -> None:
    for n, c, k in [(5, 2, 3), (6, 1, 2), (7, 3, 1), (6, 5, 2)]:
        draws = list(itertools.combinations(range(n), k))
        assert pass_at_k(n, c, k) == pytest.approx(
            sum(min(draw) < c for draw in draws) / len(draws), abs=1e-14
        )


def test_large_numbers_stay_finite_and_exact() -> None:
    for n, c, k in [(2000, 3, 1000), (2000, 1000, 32), (100_000, 1, 256), (10_000, 9_999, 1)]:
        assert pass_at_k(n, c, k) == pytest.approx(float(exact(n, c, k)), rel=1e-12)


def test_ends() -> None:
    assert pass_at_k(8, 0, 8) == 0.0
    assert pass_at_k(8, 8, 1) == 1.0
    assert pass_at_k(8, 1, 8) == 1.0
    assert pass_at_k(8, 2, 1) == 0.25


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (8, 0, 0), (8, 0, -1), (8, 0, 9)])
def test_impossible_counts_are_a_bug(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"num_correct={c} and k={k} do not fit num_samples={n}"):
        pass_at_k(n, c, k)


def test_mean_and_standard_error_over_problems() -> None:
    result = aggregate(counts([0, 4, 8]), 1)
    assert result.mean == pytest.approx(0.5)
    assert result.standard_error == pytest.approx(0.5 / math.sqrt(3))
    assert result.num_excluded == 0


def test_standard_error_covers_the_spread_of_repeated_benchmarks() -> None:
    rng = random.Random(0)
    means = []
    errors = []
    for _ in range(400):
        drawn = [sum(rng.random() < p for _ in range(8)) for p in (rng.random() for _ in range(50))]
        result = aggregate(counts(drawn), 4)
        assert result.mean is not None
        assert result.standard_error is not None
        means.append(result.mean)
        errors.append(result.standard_error)
    spread = math.sqrt(sum((m - sum(means) / 400) ** 2 for m in means) / 399)
    assert sum(errors) / 400 == pytest.approx(spread, rel=0.15)


def test_order_of_problems_does_not_show() -> None:
    problems = counts([random.Random(1).randrange(9) for _ in range(200)])
    shuffled = problems.copy()
    random.Random(2).shuffle(shuffled)
    assert aggregate(problems, 3) == aggregate(shuffled, 3)


def test_few_problems_and_none() -> None:
    assert aggregate(counts([4]), 1).standard_error is None
    nothing = aggregate([], 1)
    assert nothing.mean is None


def test_a_problem_that_the_verifier_left_too_short_is_excluded_and_counted() -> None:
    problems = [
        ProblemCounts(problem_id="a", num_samples=4, num_correct=1),
        ProblemCounts(problem_id="b", num_samples=3, num_correct=3, num_unjudged=1),
    ]
    result = aggregate(problems, 4)
    assert (result.mean, result.num_excluded) == (1.0, 1)
    assert aggregate(problems, 3).num_excluded == 0
    with pytest.raises(ValueError, match="k=5"):
        aggregate(problems, 5)


def test_metrics_rows() -> None:
    c = ProblemCounts(
        problem_id="c",
        num_samples=7,
        num_correct=0,
        num_unjudged=1,
        num_truncated=6,
        num_tokens=240,
    )
    problems = [*counts([2, 6]), c]
    assert benchmark_metrics("toy", problems, [1, 8]) == {
        "eval/toy/num_problems": 3,
        "eval/toy/num_samples": 23,
        "eval/toy/num_unjudged": 1,
        "eval/toy/len_mean": 10.0,
        "eval/toy/truncated_frac": 0.25,
        "eval/toy/pass@1": pytest.approx(1 / 3),
        "eval/toy/pass@1_se": pytest.approx(statistics.stdev([0.25, 0.75, 0.0]) / math.sqrt(3)),
        "eval/toy/pass@1_num_excluded": 0,
        "eval/toy/pass@8": 1.0,
        "eval/toy/pass@8_se": 0.0,
        "eval/toy/pass@8_num_excluded": 1,
    }
