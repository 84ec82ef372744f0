"""Samples, judges and counts benchmarks for `pacs-megatron eval`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pacs_megatron.config.schema import EvaluationOptions
from pacs_megatron.contracts import Sample, SampleRequest
from pacs_megatron.data import PromptSet
from pacs_megatron.evaluation.passk import benchmark_metrics
from pacs_megatron.rollout.admission import ProblemCounts, count_problem
from pacs_megatron.rollout.judge import Judge
from pacs_megatron.rollout.requests import sample_requests

Sampler = Callable[[Sequence[SampleRequest]], Iterable[Sample]]
"""`RolloutEngine.stream` or a function like it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """The counts of each problem of a benchmark, and its metrics (`eval/<name>/...`)."""

    name: str
    problems: tuple[ProblemCounts, ...]
    """in the order of the benchmark"""
    metrics: dict[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """All benchmarks of one evaluation, and their judged samples."""

    results: tuple[BenchmarkResult, ...]
    samples: tuple[Sample, ...]

    @property
    def metrics(self) -> dict[str, float | None]:
        """The metrics of all benchmarks, for one row of `metrics.jsonl`."""
        return {name: value for result in self.results for name, value in result.metrics.items()}


def evaluate(
    benchmarks: Sequence[PromptSet], sampler: Sampler, judge: Judge, options: EvaluationOptions, *, run_seed: int,
    step: int,
) -> Evaluation:  # fmt: skip
    """Samples `options.samples_per_prompt` responses to every problem and judges them while sampling continues.

    Raises RewardError if too many responses could not be judged.
    """
    assert options.sampling is not None  # the config refuses benchmarks without it
    prompts = [prompt for benchmark in benchmarks for prompt in benchmark.prompts]
    requests = sample_requests(
        prompts, options.samples_per_prompt, options.sampling, run_seed=run_seed, step=step, purpose="eval"
    )
    samples = judge.judge(sampler(requests), {prompt.id: prompt for prompt in prompts})
    return Evaluation(results=tuple(_results(benchmarks, samples, options.k)), samples=tuple(samples))


def _results(
    benchmarks: Sequence[PromptSet], samples: Sequence[Sample], ks: Sequence[int]
) -> Iterator[BenchmarkResult]:
    by_problem: dict[str, list[Sample]] = {prompt.id: [] for bench in benchmarks for prompt in bench.prompts}
    for sample in samples:
        by_problem[sample.prompt_id].append(sample)
    for bench in benchmarks:
        problems = tuple(count_problem(prompt.id, by_problem[prompt.id]) for prompt in bench.prompts)
        yield BenchmarkResult(
            name=bench.name,
            problems=problems,
            metrics=benchmark_metrics(bench.name, problems, ks),
        )
