"""Statistics of the samples of an evaluation: `results.json`, the table, and lm-evaluation-harness's form."""

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pacs_megatron.config.layout import draws_of
from pacs_megatron.config.schema import EvaluationOptions
from pacs_megatron.contracts import SampleRequest
from pacs_megatron.data import PromptSet
from pacs_megatron.evaluation.passk import aggregate, benchmark_metrics, pass_at_k
from pacs_megatron.evaluation.sample_file import Outcome
from pacs_megatron.evaluation.statistics import Interval, bootstrap_mean, majority_at_k
from pacs_megatron.rollout.admission import ProblemCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """The counts of each problem of a benchmark, and its metrics (`eval/<name>/...`)."""

    name: str
    ks: tuple[int, ...]
    problems: tuple[ProblemCounts, ...]
    """in the order of the benchmark"""
    metrics: dict[str, float | None]


def summarize(
    options: EvaluationOptions,
    benchmarks: Sequence[PromptSet],
    requests: Sequence[SampleRequest],
    outcomes: Mapping[str, Outcome],
) -> list[BenchmarkResult]:
    """The result of each benchmark. Every request has an outcome; further outcomes do not count."""
    by_problem: dict[str, list[Outcome]] = defaultdict(list)
    for request in requests:
        by_problem[request.prompt_id].append(outcomes[request.id])
    results = []
    for benchmark, found in zip(options.benchmarks, benchmarks, strict=True):
        ks = draws_of(options, benchmark)[1]
        groups = [by_problem[prompt.id] for prompt in found.prompts]
        problems = tuple(_counts(group) for group in groups)
        metrics = _intervals(found.name, problems, ks, groups) | benchmark_metrics(found.name, problems, ks)
        results.append(BenchmarkResult(name=found.name, ks=ks, problems=problems, metrics=metrics))
    return results


def _counts(group: Sequence[Outcome]) -> ProblemCounts:
    judged = [outcome for outcome in group if outcome.label is not None]
    return ProblemCounts(
        problem_id=group[0].prompt_id,
        num_samples=len(judged),
        num_correct=sum(outcome.label == 1 for outcome in judged),
        num_unjudged=len(group) - len(judged),
        num_truncated=sum(outcome.is_truncated for outcome in group),
        num_tokens=sum(outcome.num_tokens for outcome in group),
    )


def _intervals(
    name: str, problems: Sequence[ProblemCounts], ks: Sequence[int], groups: Sequence[Sequence[Outcome]]
) -> dict[str, float | None]:
    """avg@n, maj@k and maj@n, and the 95 % bootstrap intervals over problems (`_low`, `_high`) of these and of pass@k."""
    num_samples = max(len(group) for group in groups)
    judged = [problem for problem in problems if problem.num_samples]
    found: dict[str, Interval | None] = {f"avg@{num_samples}": bootstrap_mean(_passes(judged, 1))}
    for k in ks:
        found[f"pass@{k}"] = bootstrap_mean(_passes(judged, k))
    if any(outcome.answer is not None for group in groups for outcome in group):
        for k in sorted({*ks, num_samples} - {1}):
            found[f"maj@{k}"] = bootstrap_mean(
                [majority_at_k([o.answer for o in group], [o.label for o in group], k) for group in groups]
            )
    metrics: dict[str, float | None] = {}
    for key, interval in found.items():
        if interval is not None:
            metrics[f"eval/{name}/{key}"] = interval.value
            metrics[f"eval/{name}/{key}_low"], metrics[f"eval/{name}/{key}_high"] = interval.low, interval.high
    return metrics


def _passes(problems: Sequence[ProblemCounts], k: int) -> list[float]:
    return [pass_at_k(p.num_samples, p.num_correct, k) for p in problems if p.num_samples >= k]


def results_json(results: Sequence[BenchmarkResult], facts: Mapping[str, Any]) -> bytes:
    """`results.json`: `facts`, the metrics of all benchmarks, and the counts of every problem."""
    record = {
        **facts,
        "metrics": {key: value for result in results for key, value in result.metrics.items()},
        "k": {result.name: result.ks for result in results},
        "problems": {result.name: [asdict(problem) for problem in result.problems] for result in results},
    }
    return json.dumps(record, indent=1).encode() + b"\n"


def harness_json(results: Sequence[BenchmarkResult], facts: Mapping[str, Any]) -> bytes:
    """The results in the form of lm-evaluation-harness's `results_*.json` (v0.4): `<metric>,<filter>` by task.

    Standard errors are those of the mean over problems, as there.
    """
    tasks: dict[str, Any] = {}
    for result in results:
        task = tasks[result.name] = {"alias": result.name}
        for k in result.ks:
            estimate = aggregate(result.problems, k)
            task[f"pass@{k},none"] = estimate.mean
            task[f"pass@{k}_stderr,none"] = "N/A" if estimate.standard_error is None else estimate.standard_error
    names = [result.name for result in results]
    record = {
        "results": tasks,
        "configs": {name: {"task": name, "num_fewshot": 0, "generation_kwargs": facts["sampling"]} for name in names},
        "versions": dict.fromkeys(names, 0),
        "n-shot": dict.fromkeys(names, 0),
        "higher_is_better": {result.name: {f"pass@{k}": True for k in result.ks} for result in results},
        "n-samples": {r.name: {"original": len(r.problems), "effective": len(r.problems)} for r in results},
        "config": {
            "model": facts["engine"],
            "model_args": f"pretrained={facts['model']}",
            "random_seed": facts["seed"],
        },
        "date": time.time(),
        "model_name": facts["model"],
    }
    return json.dumps(record, indent=2).encode() + b"\n"


def table(results: Sequence[BenchmarkResult]) -> str:
    """One line a benchmark: problems, samples, pass@k with its interval, maj@n, lengths, truncated and unjudged responses."""
    ks = sorted({k for result in results for k in result.ks})
    header = ["benchmark", "problems", "samples", *(f"pass@{k}" for k in ks), "maj@n", "tokens", "cut", "unjudged"]
    rows = [header]
    for result in results:
        values = {name.rsplit("/", 1)[1]: value for name, value in result.metrics.items()}
        votes = [values[name] for name in values if name.startswith("maj@") and name[4:].isdecimal()]
        rows.append(
            [
                result.name,
                f"{values['num_problems']:.0f}",
                f"{values['num_samples']:.0f}",
                *(_with_interval(*(values.get(f"pass@{k}{end}") for end in ("", "_low", "_high"))) for k in ks),
                _number(votes[-1] if votes else None, ".4f"),
                _number(values["len_mean"], ".1f"),
                _number(values["truncated_frac"], ".1%"),
                f"{values['num_unjudged']:.0f}",
            ]
        )
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The rows, the first of which is the header, as lines with columns of one width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def _with_interval(value: float | None, low: float | None, high: float | None) -> str:
    return "-" if value is None or low is None or high is None else f"{value:.4f} [{low:.3f}, {high:.3f}]"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
