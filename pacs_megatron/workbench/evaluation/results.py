"""Statistics of the samples of an evaluation: `results.json`, the table, and
lm-evaluation-harness's form.
"""

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from pacs_megatron.config.layout import draws_of
from pacs_megatron.config.schema import EvaluationOptions
from pacs_megatron.contracts import SampleRequest
from pacs_megatron.data import PromptSet, problem_id_of
from pacs_megatron.rollout.passk import ProblemCounts, aggregate, benchmark_metrics, pass_at_k
from pacs_megatron.workbench.evaluation.sample_file import Outcome
from pacs_megatron.workbench.statistics import Interval, bootstrap_mean, majority_at_k


class BenchmarkResult(NamedTuple):
    """The samples of a benchmark in numbers."""

    name: str
    ks: tuple[int, ...]
    problems: tuple[ProblemCounts, ...]
    """in the order of the benchmark"""
    metrics: dict[str, float | None]
    """`eval/<name>/<metric>` -> value"""


# -------------------------------------------------------------------------------------- statistics
def summarize(
    options: EvaluationOptions,
    benchmarks: Sequence[PromptSet],
    requests: Sequence[SampleRequest],
    outcomes: Mapping[str, Outcome],
) -> list[BenchmarkResult]:
    """The result of each benchmark.

    Args:
        options: of the evaluation.
        benchmarks: the prompts of each configured benchmark.
        requests: the samples that count.
        outcomes: sample id -> outcome; of every request, and perhaps further ones.
    """
    outcomes_of_problems: dict[str, list[Outcome]] = defaultdict(list)
    for request in requests:
        outcomes_of_problems[problem_id_of(request.prompt_id)].append(outcomes[request.id])

    results = []
    for benchmark, prompt_set in zip(options.benchmarks, benchmarks, strict=True):
        _, ks = draws_of(options, benchmark)
        # The orders of a problem's choices count as one problem.
        ids = dict.fromkeys(problem_id_of(prompt.id) for prompt in prompt_set.prompts)
        groups = [outcomes_of_problems[problem_id] for problem_id in ids]
        problems = tuple(_counts(group) for group in groups)
        metrics = _intervals(prompt_set.name, problems, ks, groups)
        metrics |= benchmark_metrics(prompt_set.name, problems, ks)
        results.append(BenchmarkResult(prompt_set.name, ks, problems, metrics))
    return results


def row_counts(
    options: EvaluationOptions, benchmarks: Sequence[PromptSet]
) -> dict[str, dict[str, Any]]:
    """Of each benchmark: the rows that were read, `where` and the rows outside it, the prompts that
    were too long, and the prompts that were used.
    """
    counts = {}
    for benchmark, prompt_set in zip(options.benchmarks, benchmarks, strict=True):
        where = {
            column: condition.model_dump(exclude_none=True)
            for column, condition in benchmark.where.items()
        }
        counts[prompt_set.name] = {
            "read": prompt_set.num_rows + prompt_set.num_filtered,
            "where": where,
            "outside_where": prompt_set.num_filtered,
            "too_long": prompt_set.num_too_long,
            "used": len(prompt_set.prompts),
        }
    return counts


def _counts(group: Sequence[Outcome]) -> ProblemCounts:
    """The counts of one problem's samples."""
    return ProblemCounts(
        problem_id=problem_id_of(group[0].prompt_id),
        num_samples=sum(outcome.label is not None for outcome in group),
        num_correct=sum(outcome.label == 1 for outcome in group),
        num_unjudged=sum(outcome.label is None for outcome in group),
        num_truncated=sum(outcome.is_truncated for outcome in group),
        num_tokens=sum(outcome.num_tokens for outcome in group),
    )


def _intervals(
    name: str,
    problems: Sequence[ProblemCounts],
    ks: Sequence[int],
    groups: Sequence[Sequence[Outcome]],
) -> dict[str, float | None]:
    """avg@n, maj@k and maj@n, and the 95 % bootstrap intervals over problems (`_low`, `_high`) of
    these and of pass@k.

    Args:
        name: of the benchmark.
        problems: the counts of each problem.
        ks: of pass@k and maj@k.
        groups: the samples of each problem.
    """
    num_samples = max(len(group) for group in groups)
    intervals: dict[str, Interval | None] = {f"avg@{num_samples}": _pass_interval(problems, 1)}
    for k in ks:
        intervals[f"pass@{k}"] = _pass_interval(problems, k)
    if any(_has_answer(group) for group in groups):
        for k in sorted({*ks, num_samples} - {1}):
            intervals[f"maj@{k}"] = _majority_interval(groups, k)

    metrics: dict[str, float | None] = {}
    for key, interval in intervals.items():
        if interval is None:
            continue
        metrics[f"eval/{name}/{key}"] = interval.value
        metrics[f"eval/{name}/{key}_low"] = interval.low
        metrics[f"eval/{name}/{key}_high"] = interval.high
    return metrics


def _pass_interval(problems: Sequence[ProblemCounts], k: int) -> Interval | None:
    """pass@k over the problems with at least k judged samples."""
    values = []
    for problem in problems:
        if problem.num_samples >= k:
            values.append(pass_at_k(problem.num_samples, problem.num_correct, k))
    return bootstrap_mean(values)


def _has_answer(group: Sequence[Outcome]) -> bool:
    return any(outcome.answer is not None for outcome in group)


def _majority_interval(groups: Sequence[Sequence[Outcome]], k: int) -> Interval | None:
    """maj@k over all problems."""
    values = []
    for group in groups:
        answers = [outcome.answer for outcome in group]
        labels = [outcome.label for outcome in group]
        values.append(majority_at_k(answers, labels, k))
    return bootstrap_mean(values)


# ------------------------------------------------------------------------------------------- files
def results_json(results: Sequence[BenchmarkResult], facts: Mapping[str, Any]) -> bytes:
    """`results.json`: `facts`, the metrics of all benchmarks, and the counts of every problem."""
    metrics: dict[str, float | None] = {}
    for result in results:
        metrics |= result.metrics
    record = {
        **facts,
        "metrics": metrics,
        "k": {result.name: result.ks for result in results},
        "problems": {
            result.name: [asdict(problem) for problem in result.problems] for result in results
        },
    }
    return json.dumps(record, indent=1).encode() + b"\n"


def harness_json(results: Sequence[BenchmarkResult], facts: Mapping[str, Any]) -> bytes:
    """The results in the form of lm-evaluation-harness's `results_*.json` (v0.4):

    `<metric>,<filter>` by task.

    Standard errors are of the mean over problems, as in lm-evaluation-harness.
    """
    tasks = {}
    configs = {}
    higher_is_better = {}
    num_samples = {}
    for result in results:
        tasks[result.name] = _harness_task(result)
        configs[result.name] = {
            "task": result.name,
            "num_fewshot": 0,
            "generation_kwargs": facts["sampling"],
        }
        higher_is_better[result.name] = {f"pass@{k}": True for k in result.ks}
        num_problems = len(result.problems)
        num_samples[result.name] = {"original": num_problems, "effective": num_problems}

    model = facts["model"]
    record = {
        "results": tasks,
        "configs": configs,
        "versions": dict.fromkeys(tasks, 0),
        "n-shot": dict.fromkeys(tasks, 0),
        "higher_is_better": higher_is_better,
        "n-samples": num_samples,
        "config": {
            "model": facts["engine"],
            "model_args": f"pretrained={model}",
            "random_seed": facts["seed"],
        },
        "date": time.time(),
        "model_name": model,
    }
    return json.dumps(record, indent=2).encode() + b"\n"


def _harness_task(result: BenchmarkResult) -> dict[str, Any]:
    """pass@k and its standard error; "N/A" without one."""
    task: dict[str, Any] = {"alias": result.name}
    for k in result.ks:
        estimate = aggregate(result.problems, k)
        standard_error = estimate.standard_error
        task[f"pass@{k},none"] = estimate.mean
        task[f"pass@{k}_stderr,none"] = "N/A" if standard_error is None else standard_error
    return task


# ------------------------------------------------------------------------------------------- table
def table(results: Sequence[BenchmarkResult]) -> str:
    """One line per benchmark: problems, samples, pass@k with interval, maj@n, lengths, truncated
    and unjudged counts.
    """
    ks: set[int] = set()
    for result in results:
        ks.update(result.ks)
    sorted_ks = sorted(ks)
    pass_titles = [f"pass@{k}" for k in sorted_ks]
    header = [
        "benchmark",
        "problems",
        "samples",
        *pass_titles,
        "maj@n",
        "tokens",
        "cut",
        "unjudged",
    ]
    return aligned([header, *(_row(result, sorted_ks) for result in results)])


def _row(result: BenchmarkResult, ks: Sequence[int]) -> list[str]:
    """The cells of one benchmark; `-` for a metric that it does not have."""
    values = {key.rsplit("/", 1)[1]: value for key, value in result.metrics.items()}
    votes = [key for key in values if key.startswith("maj@") and key[4:].isdecimal()]
    largest_vote = votes[-1] if votes else ""

    def cell(form: str, *keys: str) -> str:
        cell_values = [values.get(key) for key in keys]
        return "-" if None in cell_values else form.format(*cell_values)

    cells = [result.name, cell("{:.0f}", "num_problems"), cell("{:.0f}", "num_samples")]
    for k in ks:
        key = f"pass@{k}"
        cells.append(cell("{:.4f} [{:.3f}, {:.3f}]", key, f"{key}_low", f"{key}_high"))
    cells.append(cell("{:.4f}", largest_vote))
    cells.append(cell("{:.1f}", "len_mean"))
    cells.append(cell("{:.1%}", "truncated_frac"))
    cells.append(cell("{:.0f}", "num_unjudged"))
    return cells


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The rows, the first of which is the header, as lines with columns of one width."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
