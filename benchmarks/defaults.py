r"""Measures settings of each objective on the quickstart's task, as the reason for the defaults.

    python benchmarks/defaults.py pacs grpo sft --seeds 0 1 --log defaults.jsonl
    python benchmarks/defaults.py pacs examples/objectives/*.yaml --seeds 0 1 2 3 4 \
        --only '{}' --log objectives.jsonl

An objective is a name with a grid below, or a configuration, which keeps its own values but for
`--only`. The setting `"teacher": "pacs-lr0.0002"` is the export of that run on the same seed, in
the folder of `--folder`. Every run starts from the seed's warm start (one for all settings), takes
25 steps of 16 prompts x 8 samples on one rank with one thread, and evaluates before and after: 96
held-out problems, 8 draws each. `sft` repeats the warm start itself. One line of JSON a run goes to
the log; runs that the log has are skipped. At the end a table of the whole log: means with
Student's 95 % intervals over seeds (with `--best-of` also the differences of pass@1 to PACS on the
same seeds).
`--task partial` takes the study's second task instead (benchmarks/tasks.py); its lines also have
the sampled tokens of every step and the diversity of the correct responses before and after, and a
last table has the steps and tokens to 0.9 of the ceiling.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.tasks import TASKS
from examples.quickstart.run import make_inputs
from pacs_megatron.observability.metrics import MetricsRow, read_metrics
from pacs_megatron.observability.rollout_log import read_rollouts, rollout_path
from pacs_megatron.workbench.diversity import (
    HASHED,
    load_embedder,
    question_scores,
    question_vectors,
)

ROOT = Path(__file__).resolve().parents[1]
Setting = dict[str, Any]
Row = dict[str, Any]
"""A line of the log: one run"""
Runs = dict[tuple[str, str], list[Row]]
"""(objective, setting as JSON) -> its runs"""

PACS: Setting = {"clip": 0.0, "lr": 1e-4, "beta": 1.0, "weighting": "question", "updates": 2}
GRPO: Setting = {"clip": 1.0, "lr": 2e-4, "updates": 2}
SFT: Setting = {"clip": 1.0, "lr": 2e-3}
KEYS = {
    "clip": "objective.clip_grad",
    "lr": "optimizer.lr",
    "beta": "objective.beta",
    "weighting": "objective.weighting",
    "reference": "objective.reference",
    "updates": "batch.updates_per_step",
    "shuffle": "data.shuffle_labels",
    "teacher": "objective.teacher",
}
STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 10: 2.262}
"""Number of seeds -> 97.5 % point of Student's t with one degree of freedom less."""


# ---------------------------------------------------------------------------------------- settings
def settings(objective: str) -> list[Setting]:
    """The grid: clip and rate in full, the rest one at a time."""
    if objective.endswith(".yaml"):
        return [{}]
    if objective == "sft":
        return [SFT, SFT | {"clip": 0.0}]
    if objective == "grpo":
        return [GRPO, GRPO | {"clip": 0.0}, GRPO | {"lr": 1e-4}]

    grid = []
    for lr, clip in itertools.product((1e-4, 2e-4, 4e-4), (0.0, 1.0)):
        grid.append(PACS | {"clip": clip, "lr": lr})
    for clip in (0.0, 1.0):
        grid.append(PACS | {"clip": clip, "lr": 2e-4, "updates": 1})
    for change in ({"updates": 4}, {"weighting": "none"}, {"beta": 3.0}, {"beta": 0.3}):
        grid.append(PACS | change)
    grid.append(PACS | {"lr": 2e-4, "updates": 1, "reference": "frozen"})
    return grid


def overrides(objective: str, setting: Setting) -> list[str]:
    """The setting as `key=value`, with the objective's name unless it is a configuration."""
    words = [] if objective.endswith(".yaml") else [f"objective.name={objective}"]
    for name, value in setting.items():
        words.append(f"{KEYS[name]}={json.dumps(value)}")
    return words


def with_teacher(setting: Setting, seed: int, folder: Path) -> Setting:
    """The setting with the path of its teacher, which it names as a run without its seed."""
    if "teacher" not in setting:
        return setting
    return setting | {"teacher": f"{folder}/runs/{setting['teacher']}-seed{seed}/hf"}


def best(objective: str, log: Path) -> Setting:
    """The setting with the best mean pass@1 in `log`; the first of equal ones."""
    scores: dict[str, list[float]] = {}
    for row in read_log(log):
        if row["objective"] == Path(objective).stem:
            scores.setdefault(json.dumps(_setting(row)), []).append(row["pass@1"])
    if not scores:
        sys.exit(f"{log} has no run of {objective}")
    means = {setting: statistics.mean(values) for setting, values in scores.items()}
    setting: Setting = json.loads(max(means, key=lambda name: means[name]))
    return setting


# -------------------------------------------------------------------------------------------- runs
def train(name: str, folder: Path, config: str, *changes: str) -> Path:
    """Runs one rank to its end and returns its folder."""
    command = [
        sys.executable,
        "-m",
        "pacs_megatron.training.main",
        str(ROOT / "configs" / "runs" / config),
        f"run.dir={folder}/runs",
        f"run.name={name}",
        "parallel.tp=1",
        "logging.tensorboard=false",
        *changes,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr[-2000:]}")
    return folder / "runs" / name


def warm_start(seed: int, folder: Path, name: str, *changes: str, task: str = "quickstart") -> Path:
    """Trains the quickstart's model on demonstrations and returns the run's folder."""
    inputs = folder / f"inputs-{seed}"
    make_inputs(inputs, seed, TASKS[task].write)
    return train(
        name,
        folder,
        "quickstart-warmstart.yaml",
        f"run.seed={seed}",
        f"model.path={inputs}/model",
        f"data.train.path={inputs}/data/demonstrations.json",
        *TASKS[task].warm,
        *changes,
    )


def measure(
    objective: str, setting: Setting, seed: int, folder: Path, *, task: str = "quickstart"
) -> Row:
    """Runs one setting with one seed and returns its line of the log."""
    words = [f"{key}{value}" for key, value in setting.items()]
    name = "-".join([Path(objective).stem, *words, f"seed{seed}"])
    begin = time.monotonic()
    results: dict[str, Any] = {}
    if objective == "sft":
        run_dir = warm_start(seed, folder, name, *overrides(objective, setting), task=task)
        rows = read_metrics(run_dir)
        losses = [float(row["objective/loss"] or 0) for row in rows[-20:]]
        results["loss"] = statistics.mean(losses)
    else:
        run_dir = _train_from_warm_start(objective, setting, seed, folder, name)
        rows = read_metrics(run_dir)
        results |= _reward_results(rows)
        if task != "quickstart":
            results |= _task_results(rows, run_dir)

    norms = []
    for row in rows:
        if "optimizer/grad_norm" in row:
            norms.append(float(row["optimizer/grad_norm"] or 0))
    results["norm"] = [min(norms), statistics.median(norms), max(norms)]
    return {
        **({} if task == "quickstart" else {"task": task}),
        "objective": Path(objective).stem,
        **setting,
        "seed": seed,
        **results,
        "seconds": round(time.monotonic() - begin),
    }


def _train_from_warm_start(
    objective: str, setting: Setting, seed: int, folder: Path, name: str
) -> Path:
    data = folder / f"inputs-{seed}" / "data"
    config = "quickstart.yaml"
    if objective.endswith(".yaml"):
        config = str(Path(objective).resolve())
    return train(
        name,
        folder,
        config,
        f"run.seed={seed}",
        f"model.path={folder}/runs/warm-{seed}/hf",
        "run.steps=25",
        f"data.train.path={data}/train.json",
        f"evaluation.benchmarks.0.path={data}/test.json",
        "evaluation.every=null",
        "checkpoint.every=null",
        *overrides(objective, with_teacher(setting, seed, folder)),
    )


def _reward_results(rows: Sequence[MetricsRow]) -> dict[str, Any]:
    """Evaluations before and after, rewards of every step, further samples (DARS) of the run."""
    steps = [row for row in rows if "reward/mean" in row]
    extra = {}
    if "admission/extra_samples" in steps[-1]:
        extra["extra_samples"] = sum(int(row["admission/extra_samples"] or 0) for row in steps)
    return {
        "start": rows[0]["eval/test/pass@1"],
        "pass@1": rows[-1]["eval/test/pass@1"],
        "pass@8": [rows[0]["eval/test/pass@8"], rows[-1]["eval/test/pass@8"]],
        "entropy": [steps[0]["policy/entropy"], steps[-1]["policy/entropy"]],
        "rewards": [row["reward/mean"] for row in steps],
        **extra,
    }


def _task_results(rows: Sequence[MetricsRow], run_dir: Path) -> dict[str, Any]:
    """Sampled tokens of every step, and the diversity before and after."""
    tokens = []
    for row in rows:
        if "reward/mean" in row:
            tokens.append(round(float(row["response/tokens"] or 0)))
    before = diversity(rollout_path(run_dir, 0, "eval"))
    after = diversity(rollout_path(run_dir, len(tokens), "eval"))
    return {"tokens": tokens, "diversity": [before, after]}


def diversity(evaluation: Path) -> float | None:
    """Mean over problems of the mean of 1 - cos over pairs of correct responses, in hashed n-grams
    of characters.

    None if no problem has two.
    """
    correct: dict[str, list[str]] = {}
    for record in read_rollouts(evaluation):
        if record["label"] == 1:
            correct.setdefault(record["prompt_id"], []).append(record["response"])
    _, embed = load_embedder(HASHED)
    scores = question_scores(question_vectors(correct, embed)).values()
    return statistics.mean(scores) if scores else None


# --------------------------------------------------------------------------------------------- log
def read_log(log: Path) -> list[Row]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def _setting(row: Row) -> Setting:
    return {name: row[name] for name in KEYS if name in row}


def _who(row: Row) -> tuple[str, str, int]:
    """Task, objective and seed of a run."""
    return row.get("task", "quickstart"), row["objective"], row["seed"]


def _by_setting(rows: Sequence[Row], key: str) -> Runs:
    """The runs that have `key`, by objective and setting."""
    runs: Runs = {}
    for row in rows:
        if key in row:
            runs.setdefault((row["objective"], json.dumps(_setting(row))), []).append(row)
    return runs


# ------------------------------------------------------------------------------------------ tables
def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(mean, lower, upper) by Student's t.

    NaN limits for a number of values without a known point.
    """
    mean = statistics.mean(values)
    half = STUDENT.get(len(values), math.nan) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def table(rows: Sequence[Row]) -> list[str]:
    """A line of Markdown for each setting; intervals are Student's 95 % over seeds.

    Norm: the median of each run.
    """
    lines = [
        "| objective | setting | seeds | start | pass@1 | 95 % interval | rise | pass@8 | entropy "
        "| norm | diversity |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (objective, setting), runs in _by_setting(rows, "pass@1").items():
        if len(runs) > 1:
            cells = [objective, setting, *_cells(runs)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cells(runs: Sequence[Row]) -> list[str]:
    """The columns of one setting from its number of seeds on."""
    starts = [run["start"] for run in runs]
    scores = [run["pass@1"] for run in runs]
    rises = [score - start for start, score in zip(starts, scores, strict=True)]
    mean, low, high = interval(scores)
    _, low_rise, high_rise = interval(rises)
    return [
        str(len(runs)),
        f"{statistics.mean(starts):.3f}",
        f"{mean:.3f}",
        f"{low:.3f} to {high:.3f}",
        f"{low_rise:+.3f} to {high_rise:+.3f}",
        "{:.3f} [{:.3f}, {:.3f}]".format(*interval([run["pass@8"][-1] for run in runs])),
        "{:.3f} [{:.3f}, {:.3f}]".format(*interval([run["entropy"][-1] for run in runs])),
        "{:.2g} [{:.2g}, {:.2g}]".format(*interval([run["norm"][1] for run in runs])),
        _diversities(runs),
    ]


def _diversities(runs: Sequence[Row]) -> str:
    """Mean before -> after with its interval, over the runs that have both."""
    befores = []
    afters = []
    for run in runs:
        before, after = run.get("diversity", (None, None))
        if before is not None and after is not None:
            befores.append(before)
            afters.append(after)
    if len(afters) < 2:
        return ""
    mean, low, high = interval(afters)
    return f"{statistics.mean(befores):.3f} -> {mean:.3f} [{low:.3f}, {high:.3f}]"


def differences(rows: Sequence[Row], base: str = "pacs") -> list[str]:
    """A line of Markdown for each other objective: pass@1 less that of `base` on the same seeds,
    with its interval.
    """
    runs_of_settings = _by_setting(rows, "pass@1")
    base_scores = {}
    for (objective, _), runs in runs_of_settings.items():
        if objective == base:
            base_scores |= {run["seed"]: run["pass@1"] for run in runs}

    lines = [
        "",
        f"| objective | seeds | pass@1 less that of {base} | 95 % interval |",
        "|---|---|---|---|",
    ]
    for (objective, _), runs in runs_of_settings.items():
        values = []
        for run in runs:
            if run["seed"] in base_scores:
                values.append(run["pass@1"] - base_scores[run["seed"]])
        if objective != base and len(values) > 1:
            mean, low, high = interval(values)
            lines.append(
                f"| {objective} | {len(values)} | {mean:+.3f} | {low:+.3f} to {high:+.3f} |"
            )
    return lines


def reached(row: Row, target: float) -> tuple[int, int] | None:
    """(step, tokens sampled until then) at which the mean reward of three steps is at least
    `target`.
    """
    rewards = row["rewards"]
    for step in range(3, len(rewards) + 1):
        if statistics.mean(rewards[step - 3 : step]) >= target:
            return step, sum(row["tokens"][:step])
    return None


def speeds(rows: Sequence[Row]) -> list[str]:
    """A line of Markdown for each setting: steps and thousands of tokens to 0.9 of the ceiling, by
    seed.

    The ceiling is the best mean pass@1 of a setting in the log. A run that does not reach the
    target is shown as `>` and all that it had: it is censored, not dropped.
    """
    runs_of_settings = _by_setting(rows, "tokens")
    if not runs_of_settings:
        return []
    means = []
    for runs in runs_of_settings.values():
        means.append(statistics.mean(run["pass@1"] for run in runs))
    target = 0.9 * max(means)

    lines = [
        "",
        f"| objective | setting | steps to {target:.3f} | thousands of tokens |",
        "|---|---|---|---|",
    ]
    for (objective, setting), runs in runs_of_settings.items():
        steps = []
        thousands = []
        for run in runs:
            at_target = reached(run, target)
            sign = "" if at_target else ">"
            step, tokens = at_target or (len(run["rewards"]), sum(run["tokens"]))
            steps.append(f"{sign}{step}")
            thousands.append(f"{sign}{tokens / 1000:.0f}")
        lines.append(f"| {objective} | {setting} | {' '.join(steps)} | {' '.join(thousands)} |")
    return lines


# -------------------------------------------------------------------------------------------- main
def jobs_of(options: argparse.Namespace, logged: Sequence[Row]) -> list[tuple[str, Setting, int]]:
    """(objective, setting, seed) of the runs that the log lacks."""
    jobs = []
    for objective in options.objectives:
        chosen: Sequence[Setting] = options.only or settings(objective)
        if options.best_of:
            chosen = [best(objective, options.best_of)]
        if options.shuffle:
            chosen = [setting | {"shuffle": True} for setting in chosen]
        for setting, seed in itertools.product(chosen, options.seeds):
            who = (options.task, Path(objective).stem, seed)
            is_logged = any(_setting(row) == setting and _who(row) == who for row in logged)
            if not is_logged:
                jobs.append((objective, dict(setting), seed))
    return jobs


def run_jobs(options: argparse.Namespace, folder: Path) -> None:
    """Warm starts, then the missing runs, which are appended to the log."""
    if options.task != "quickstart":
        folder /= options.task

    def warm(seed: int) -> Path:
        run_dir = folder / "runs" / f"warm-{seed}"
        if (run_dir / "hf").exists():
            return run_dir
        return warm_start(seed, folder, f"warm-{seed}", task=options.task)

    def run(job: tuple[str, Setting, int]) -> Row:
        objective, setting, seed = job
        return measure(objective, setting, seed, folder, task=options.task)

    with ThreadPoolExecutor(options.workers) as pool:
        if options.objectives != ["sft"]:
            list(pool.map(warm, options.seeds))
        logged = read_log(options.log) if options.log.exists() else []
        jobs = jobs_of(options, logged)
        with options.log.open("a") as log:
            for row in pool.map(run, jobs):
                log.write(json.dumps(row) + "\n")
                log.flush()
                print(row, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("objectives", nargs="+", help="pacs, grpo, sft or a .yaml file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="keep warm starts and runs here")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--only", type=json.loads, nargs="+", help="these settings, as JSON, instead of the grid"
    )
    parser.add_argument(
        "--best-of", type=Path, help="the best setting of each objective in this log, for all seeds"
    )
    parser.add_argument("--shuffle", action="store_true", help="all settings with shuffled labels")
    parser.add_argument("--task", choices=sorted(TASKS), default="quickstart")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run_jobs(options, (options.folder or Path(name)).resolve())

    rows = read_log(options.log)
    lines = table(rows)
    if options.best_of:
        lines += differences(rows)
    lines += speeds(rows)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
