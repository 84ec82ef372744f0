"""Counts of a benchmark's samples by problem, and the unbiased pass@k over problems.

Source: Chen et al., "Evaluating Large Language Models Trained on Code", arXiv:2107.03374, eq. (1).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pacs_megatron.contracts import Sample, Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemCounts:
    """Samples of one benchmark problem; every metric of an evaluation is computed from them."""

    problem_id: str
    num_samples: int
    """n: responses that the verifier judged"""
    num_correct: int
    num_unjudged: int = 0
    """responses without a verdict; `num_samples` and `num_correct` exclude them"""
    num_truncated: int = 0
    """of all responses, judged or not; `num_tokens` likewise"""
    num_tokens: int = 0


def count_problem(problem_id: str, samples: Sequence[Sample]) -> ProblemCounts:
    """Counts of the judged `samples` of one problem.

    The judge labels a truncated response by `admission.truncated`.
    """
    judged = [sample for sample in samples if sample.failure is None]
    return ProblemCounts(
        problem_id=problem_id,
        num_samples=len(judged),
        num_correct=sum(sample.label == 1 for sample in judged),
        num_unjudged=len(samples) - len(judged),
        num_truncated=sum(sample.stop is Stop.LENGTH for sample in samples),
        num_tokens=sum(sample.response_len for sample in samples),
    )


class PassAtK(NamedTuple):
    """pass@k of one benchmark, in [0, 1]."""

    mean: float | None
    """over problems; None if there are none"""
    standard_error: float | None
    """of the mean, over problems; None below two problems"""
    num_excluded: int
    """problems with fewer than k judged responses"""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The probability that at least one of k responses, drawn from the n, is correct.

    1 - C(n - c, k) / C(n, k) = 1 - prod_{i = n - c + 1}^{n} (1 - k / i), without large binomials.
    Source: eq. (1) and the paper's stable form of it.

    Args:
        num_samples: n, judged responses of a problem.
        num_correct: c.
        k: at most n; the configuration rejects a larger one.

    Raises:
        ValueError: for impossible counts.
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(
            f"num_correct={num_correct} and k={k} do not fit num_samples={num_samples}"
        )
    num_wrong = num_samples - num_correct
    if num_wrong < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_wrong + 1, num_samples + 1))


def aggregate(problems: Iterable[ProblemCounts], k: int) -> PassAtK:
    """The mean of pass@k over problems and its standard error (sample standard deviation /
    sqrt(problems)).

    A problem with fewer than k judged responses because the verifier failed is excluded and
    counted. The result does not depend on the order of `problems`.
    """
    values = []
    num_excluded = 0
    for problem in problems:
        num_responses = problem.num_samples + problem.num_unjudged
        if problem.num_samples < k <= num_responses:
            num_excluded += 1
        else:
            values.append(pass_at_k(problem.num_samples, problem.num_correct, k))

    # fsum rounds once, so the result does not depend on the order.
    count = len(values)
    mean = None
    standard_error = None
    if count:
        mean = math.fsum(values) / count
        if count >= 2:
            squares = math.fsum((value - mean) ** 2 for value in values)
            standard_error = math.sqrt(squares / (count - 1) / count)
    return PassAtK(mean, standard_error, num_excluded)


def benchmark_metrics(
    benchmark: str, problems: Sequence[ProblemCounts], ks: Sequence[int]
) -> dict[str, float | None]:
    """Metrics of a benchmark for a row of `metrics.jsonl`.

    Args:
        benchmark: its name.
        problems: counts of every problem.
        ks: the values of k.

    Returns:
        `eval/<benchmark>/pass@k`, `.../pass@k_se`, and the counts behind them. `len_mean` (tokens)
        and `truncated_frac` are means over all responses, judged or not.
    """
    prefix = f"eval/{benchmark}"
    num_samples = sum(problem.num_samples for problem in problems)
    num_unjudged = sum(problem.num_unjudged for problem in problems)
    num_tokens = sum(problem.num_tokens for problem in problems)
    num_truncated = sum(problem.num_truncated for problem in problems)
    num_responses = num_samples + num_unjudged
    metrics: dict[str, float | None] = {
        f"{prefix}/num_problems": len(problems),
        f"{prefix}/num_samples": num_samples,
        f"{prefix}/num_unjudged": num_unjudged,
        f"{prefix}/len_mean": num_tokens / num_responses if num_responses else None,
        f"{prefix}/truncated_frac": num_truncated / num_responses if num_responses else None,
    }
    for k in ks:
        result = aggregate(problems, k)
        metrics[f"{prefix}/pass@{k}"] = result.mean
        metrics[f"{prefix}/pass@{k}_se"] = result.standard_error
        metrics[f"{prefix}/pass@{k}_num_excluded"] = result.num_excluded
    return metrics
