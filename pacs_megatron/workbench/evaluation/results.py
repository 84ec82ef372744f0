"""Statistics of the samples of an evaluation:

`results.json`, the table, and lm-evaluation-harness's form.
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
from pacs_megatron.data import PromptSet
from pacs_megatron.rollout.passk import ProblemCounts, aggregate, benchmark_metrics, pass_at_k
from pacs_megatron.workbench.evaluation.sample_file import Outcome
from pacs_megatron.workbench.statistics import Interval, bootstrap_mean, majority_at_k


class BenchmarkResult(NamedTuple):
    """The counts of each problem of a benchmark, in its order, and its metrics (`eval/<name>/...`)."""

    name: str
    ks: tuple[int, ...]
    problems: tuple[ProblemCounts, ...]
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
        problems = tuple(
            ProblemCounts(
                problem_id=group[0].prompt_id,
                num_samples=sum(outcome.label is not None for outcome in group),
                num_correct=sum(outcome.label == 1 for outcome in group),
                num_unjudged=sum(outcome.label is None for outcome in group),
                num_truncated=sum(outcome.is_truncated for outcome in group),
                num_tokens=sum(outcome.num_tokens for outcome in group),
            )
            for group in groups
        )
        metrics = _intervals(found.name, problems, ks, groups) | benchmark_metrics(
            found.name, problems, ks
        )
        results.append(BenchmarkResult(found.name, ks, problems, metrics))
    return results


def _intervals(
    name: str,
    problems: Sequence[ProblemCounts],
    ks: Sequence[int],
    groups: Sequence[Sequence[Outcome]],
) -> dict[str, float | None]:
    """avg@n, maj@k and maj@n, and the 95 % bootstrap intervals over problems (`_low`, `_high`) of
    these and of pass@k.
    """
    num_samples = max(len(group) for group in groups)
    found: dict[str, Interval | None] = {}
    for name_of_k, k in [(f"avg@{num_samples}", 1), *((f"pass@{k}", k) for k in ks)]:
        values = [
            pass_at_k(p.num_samples, p.num_correct, k) for p in problems if p.num_samples >= k
        ]
        found[name_of_k] = bootstrap_mean(values)
    if any(outcome.answer is not None for group in groups for outcome in group):
        for k in sorted({*ks, num_samples} - {1}):
            found[f"maj@{k}"] = bootstrap_mean(
                [
                    majority_at_k([o.answer for o in group], [o.label for o in group], k)
                    for group in groups
                ]
            )
    metrics: dict[str, float | None] = {}
    for key, interval in found.items():
        if interval is not None:
            ends = zip(("", "_low", "_high"), interval, strict=True)
            metrics |= {f"eval/{name}/{key}{end}": value for end, value in ends}
    return metrics


def results_json(results: Sequence[BenchmarkResult], facts: Mapping[str, Any]) -> bytes:
    """`results.json`: `facts`, the metrics of all benchmarks, and the counts of every problem."""
    record = {
        **facts,
        "metrics": {key: value for result in results for key, value in result.metrics.items()},
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
    tasks: dict[str, Any] = {}
    for result in results:
        task = tasks[result.name] = {"alias": result.name}
        for k in result.ks:
            estimate = aggregate(result.problems, k)
            task[f"pass@{k},none"] = estimate.mean
            task[f"pass@{k}_stderr,none"] = (
                "N/A" if estimate.standard_error is None else estimate.standard_error
            )
    names = [result.name for result in results]
    model = facts["model"]
    record = {
        "results": tasks,
        "configs": {
            name: {"task": name, "num_fewshot": 0, "generation_kwargs": facts["sampling"]}
            for name in names
        },
        "versions": dict.fromkeys(names, 0),
        "n-shot": dict.fromkeys(names, 0),
        "higher_is_better": {
            result.name: {f"pass@{k}": True for k in result.ks} for result in results
        },
        "n-samples": {
            r.name: {"original": len(r.problems), "effective": len(r.problems)} for r in results
        },
        "config": {
            "model": facts["engine"],
            "model_args": f"pretrained={model}",
            "random_seed": facts["seed"],
        },
        "date": time.time(),
        "model_name": model,
    }
    return json.dumps(record, indent=2).encode() + b"\n"


def table(results: Sequence[BenchmarkResult]) -> str:
    """One line per benchmark: problems, samples, pass@k with interval, maj@n, lengths, truncated
    and unjudged counts.
    """
    ks = sorted({k for result in results for k in result.ks})
    rows = [
        [
            "benchmark",
            "problems",
            "samples",
            *(f"pass@{k}" for k in ks),
            "maj@n",
            "tokens",
            "cut",
            "unjudged",
        ]
    ]
    for result in results:
        values = {name.rsplit("/", 1)[1]: value for name, value in result.metrics.items()}
        votes = [name for name in values if name.startswith("maj@") and name[4:].isdecimal()]
        columns: list[tuple[tuple[str, ...], str]] = [
            (("num_problems",), "{:.0f}"),
            (("num_samples",), "{:.0f}"),
        ]
        columns += [
            ((f"pass@{k}", f"pass@{k}_low", f"pass@{k}_high"), "{:.4f} [{:.3f}, {:.3f}]")
            for k in ks
        ]
        columns += [
            (("".join(votes[-1:]),), "{:.4f}"),
            (("len_mean",), "{:.1f}"),
            (("truncated_frac",), "{:.1%}"),
        ]
        cells = []
        for names, form in [*columns, (("num_unjudged",), "{:.0f}")]:
            found = [values.get(name) for name in names]
            cells.append("-" if None in found else form.format(*found))
        rows.append([result.name, *cells])
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The rows, the first of which is the header, as lines with columns of one width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join(lines)
