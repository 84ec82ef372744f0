"""Counts of the samples of one benchmark problem, from which every metric of an evaluation is computed."""

from collections.abc import Sequence
from dataclasses import dataclass

from pacs_megatron.contracts import Sample, Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemCounts:
    """Samples of one problem, judged or not."""

    problem_id: str
    num_samples: int
    """n: responses that the verifier judged"""
    num_correct: int
    """c of those n"""
    num_unjudged: int = 0
    """responses without a verdict: in neither number, reported beside the result"""
    num_truncated: int = 0
    """of all responses: cut at the limit"""
    num_tokens: int = 0
    """of all responses"""


def count_problem(problem_id: str, samples: Sequence[Sample]) -> ProblemCounts:
    """Counts of the judged `samples` of one problem. A truncated response is wrong: the judge labelled it 0."""
    judged = [sample for sample in samples if sample.failure is None]
    return ProblemCounts(
        problem_id=problem_id,
        num_samples=len(judged),
        num_correct=sum(sample.label == 1 for sample in judged),
        num_unjudged=len(samples) - len(judged),
        num_truncated=sum(sample.stop is Stop.LENGTH for sample in samples),
        num_tokens=sum(sample.response_len for sample in samples),
    )
