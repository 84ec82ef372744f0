"""Benchmarks sampled, judged and counted: the same for the training loop and for `pacs-megatron eval`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from pacs_megatron.config.schema import EvaluationOptions
from pacs_megatron.contracts import Sample, SampleRequest, Stop
from pacs_megatron.data import PromptSet
from pacs_megatron.evaluation.passk import ProblemCounts, benchmark_metrics
from pacs_megatron.rollout.judge import Judge
from pacs_megatron.rollout.requests import sample_requests

Sampler = Callable[[Sequence[SampleRequest]], Iterable[Sample]]
"""`RolloutEngine.stream`, or what stands for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """One benchmark: what was sampled for each problem, and its metrics (`eval/<name>/...`)."""

    name: str
    problems: tuple[ProblemCounts, ...]
    """in the order of the benchmark"""
    metrics: dict[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """All benchmarks of one evaluation, and the judged samples behind them."""

    results: tuple[BenchmarkResult, ...]
    samples: tuple[Sample, ...]

    @property
    def metrics(self) -> dict[str, float | None]:
        """Of all benchmarks together, for one row of `metrics.jsonl`."""
        return {name: value for result in self.results for name, value in result.metrics.items()}


def evaluate(
    benchmarks: Sequence[PromptSet], sampler: Sampler, judge: Judge, options: EvaluationOptions, *, run_seed: int,
    step: int,
) -> Evaluation:  # fmt: skip
    """Samples `options.samples_per_prompt` answers to every problem, judges them while sampling goes on, and counts.

    Raises RewardError when the verifier could not judge too many.
    """
    assert options.sampling is not None  # the config refuses benchmarks without it
    prompts = [prompt for benchmark in benchmarks for prompt in benchmark.prompts]
    requests = sample_requests(
        prompts, options.samples_per_prompt, options.sampling, run_seed=run_seed, step=step, purpose="eval"
    )
    samples = judge.judge(sampler(requests), {prompt.id: prompt for prompt in prompts})
    return Evaluation(results=tuple(_results(benchmarks, samples, options.k)), samples=tuple(samples))


def count_problem(problem_id: str, samples: Sequence[Sample]) -> ProblemCounts:
    """`samples` of one problem, judged. An answer cut at the limit counts as wrong: the judge labelled it 0."""
    judged = [sample for sample in samples if sample.failure is None]
    return ProblemCounts(
        problem_id=problem_id,
        num_samples=len(judged),
        num_correct=sum(sample.label == 1 for sample in judged),
        num_unjudged=len(samples) - len(judged),
    )


def _results(
    benchmarks: Sequence[PromptSet], samples: Sequence[Sample], ks: Sequence[int]
) -> Iterator[BenchmarkResult]:
    by_problem: dict[str, list[Sample]] = {prompt.id: [] for bench in benchmarks for prompt in bench.prompts}
    for sample in samples:
        by_problem[sample.prompt_id].append(sample)
    for bench in benchmarks:
        problems = tuple(count_problem(prompt.id, by_problem[prompt.id]) for prompt in bench.prompts)
        mine = [sample for prompt in bench.prompts for sample in by_problem[prompt.id]]
        yield BenchmarkResult(
            name=bench.name,
            problems=problems,
            metrics=benchmark_metrics(bench.name, problems, ks) | _response_metrics(bench.name, mine),
        )


def _response_metrics(name: str, samples: Sequence[Sample]) -> dict[str, float | None]:
    """Over all sampled answers, judged or not: mean length in tokens, share cut at the limit."""
    count = len(samples)
    return {
        f"eval/{name}/response_len_mean": sum(s.response_len for s in samples) / count if count else None,
        f"eval/{name}/truncated_frac": sum(s.stop is Stop.LENGTH for s in samples) / count if count else None,
    }
