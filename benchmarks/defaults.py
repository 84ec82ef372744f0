"""Measures settings of each objective on the quickstart's task, as the reason for the defaults.

    python benchmarks/defaults.py pacs grpo sft --seeds 0 1 --log defaults.jsonl
    python benchmarks/defaults.py pacs examples/objectives/*.yaml --seeds 0 1 2 3 4 --only '{}'
    --log objectives.jsonl

An objective is a name with a grid below, or a configuration, which keeps its own values but for
`--only`. Every run starts from the seed's warm start (one for all settings), takes 25 steps of 16
prompts x 8 samples on one rank with one thread, and evaluates before and after: 96 held-out
problems, 8 draws each. `sft` repeats the warm start itself. One line of JSON a run goes to the log;
runs that the log has are skipped. At the end a table of the whole log: means with Student's 95 %
intervals over seeds (with `--best-of` also the differences of pass@1 to PACS on the same seeds).
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.tasks import TASKS
from examples.quickstart.run import make_inputs
from pacs_megatron.observability.metrics import read_metrics
from pacs_megatron.observability.rollout_log import read_rollouts, rollout_path
from pacs_megatron.workbench.diversity import (
    HASHED,
    load_embedder,
    question_scores,
    question_vectors,
)

ROOT = Path(__file__).resolve().parents[1]
Setting = dict[str, Any]

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
}


STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 10: 2.262}
"""Number of seeds -> 97.5 % point of Student's t with one degree of freedom less."""


def settings(objective: str) -> list[Setting]:
    """The grid: clip and rate in full, the rest one at a time."""
    if objective.endswith(".yaml"):
        return [{}]
    if objective == "sft":
        return [SFT, SFT | {"clip": 0.0}]
    if objective == "grpo":
        return [GRPO, GRPO | {"clip": 0.0}, GRPO | {"lr": 1e-4}]
    rates_and_clips = itertools.product((1e-4, 2e-4, 4e-4), (0.0, 1.0))
    return [
        *(PACS | {"clip": clip, "lr": lr} for lr, clip in rates_and_clips),
        *(PACS | {"clip": clip, "lr": 2e-4, "updates": 1} for clip in (0.0, 1.0)),
        *(
            PACS | change
            for change in ({"updates": 4}, {"weighting": "none"}, {"beta": 3.0}, {"beta": 0.3})
        ),
        PACS | {"lr": 2e-4, "updates": 1, "reference": "frozen"},
    ]


def overrides(objective: str, setting: Setting) -> list[str]:
    named = [] if objective.endswith(".yaml") else [f"objective.name={objective}"]
    return [*named, *(f"{KEYS[name]}={json.dumps(value)}" for name, value in setting.items())]


def train(name: str, folder: Path, config: str, *changes: str) -> Path:
    """Runs one rank to its end and returns its folder."""
    command = [
        sys.executable,
        "-m",
        "pacs_megatron.training.main",
        str(ROOT / "configs" / "runs" / config),
    ]
    common = (
        f"run.dir={folder}/runs",
        f"run.name={name}",
        "parallel.tp=1",
        "logging.tensorboard=false",
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, *common, *changes], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{name}: {done.stderr[-2000:]}")
    return folder / "runs" / name


def warm_start(seed: int, folder: Path, name: str, *changes: str, task: str = "quickstart") -> Path:
    inputs = folder / f"inputs-{seed}"
    make_inputs(inputs, seed, TASKS[task].write)
    data = f"data.train.path={inputs}/data/demonstrations.json"
    own = (f"run.seed={seed}", f"model.path={inputs}/model", data, *TASKS[task].warm)
    return train(name, folder, "quickstart-warmstart.yaml", *own, *changes)


def measure(
    objective: str, setting: Setting, seed: int, folder: Path, *, task: str = "quickstart"
) -> dict[str, Any]:
    name = "-".join(
        [Path(objective).stem, *(f"{key}{value}" for key, value in setting.items()), f"seed{seed}"]
    )
    begin = time.monotonic()
    found: dict[str, Any] = {}
    if objective == "sft":
        run_dir = warm_start(seed, folder, name, *overrides(objective, setting), task=task)
        rows = read_metrics(run_dir)
        found["loss"] = statistics.mean(float(row["objective/loss"] or 0) for row in rows[-20:])
    else:
        data = folder / f"inputs-{seed}" / "data"
        run_dir = train(
            name,
            folder,
            str(Path(objective).resolve()) if objective.endswith(".yaml") else "quickstart.yaml",
            *(f"run.seed={seed}", f"model.path={folder}/runs/warm-{seed}/hf", "run.steps=25"),
            *(
                f"data.train.path={data}/train.json",
                f"evaluation.benchmarks.0.path={data}/test.json",
            ),
            *("evaluation.every=null", "checkpoint.every=null"),
            *overrides(objective, setting),
        )
        rows = read_metrics(run_dir)
        found["start"], found["pass@1"] = (rows[at]["eval/test/pass@1"] for at in (0, -1))
        found["pass@8"] = [rows[at]["eval/test/pass@8"] for at in (0, -1)]
        steps = [row for row in rows if "reward/mean" in row]
        found["entropy"] = [steps[at]["policy/entropy"] for at in (0, -1)]
        found["rewards"] = [row["reward/mean"] for row in steps]
        if task != "quickstart":
            found["tokens"] = [round(float(row["response/tokens"] or 0)) for row in steps]
            found["diversity"] = [
                diversity(rollout_path(run_dir, step, "eval")) for step in (0, len(steps))
            ]
    norms = sorted(
        float(row["optimizer/grad_norm"] or 0) for row in rows if "optimizer/grad_norm" in row
    )
    found["norm"] = [norms[0], statistics.median(norms), norms[-1]]
    return {
        **({} if task == "quickstart" else {"task": task}),
        "objective": Path(objective).stem,
        **setting,
        "seed": seed,
        **found,
        "seconds": round(time.monotonic() - begin),
    }


def diversity(evaluation: Path) -> float | None:
    """Mean over problems of the mean of 1 - cos over pairs of correct responses, in hashed n-grams
    of characters.

    None if no problem has two.
    """
    correct: dict[str, list[str]] = {}
    for record in read_rollouts(evaluation):
        if record["label"] == 1:
            correct.setdefault(record["prompt_id"], []).append(record["response"])
    scores = question_scores(question_vectors(correct, load_embedder(HASHED)[1])).values()
    return statistics.mean(scores) if scores else None


def _setting(row: dict[str, Any]) -> Setting:
    return {name: row[name] for name in KEYS if name in row}


def _who(row: dict[str, Any]) -> tuple[str, str, int]:
    return row.get("task", "quickstart"), row["objective"], row["seed"]


def interval(values: list[float]) -> tuple[float, float, float]:
    """(mean, lower, upper) by Student's t.

    NaN limits for a number of values without a known point.
    """
    mean = statistics.mean(values)
    half = STUDENT.get(len(values), math.nan) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def _by_setting(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["objective"], json.dumps(_setting(row))), []).append(row)
    return groups


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A line of Markdown for each setting; intervals are Student's 95 % over seeds.

    Norm: the median of each run.
    """
    lines = [
        "| objective | setting | seeds | start | pass@1 | 95 % interval | rise | pass@8 | entropy "
        "| norm | diversity |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (objective, setting), found in _by_setting(
        [row for row in rows if "pass@1" in row]
    ).items():
        if len(found) > 1:
            starts = [row["start"] for row in found]
            means = [row["pass@1"] for row in found]
            mean, low, high = interval(means)
            _, least, most = interval(
                [end - start for start, end in zip(starts, means, strict=True)]
            )
            cells = [
                *(
                    objective,
                    setting,
                    str(len(found)),
                    f"{statistics.mean(starts):.3f}",
                    f"{mean:.3f}",
                ),
                *(f"{low:.3f} to {high:.3f}", f"{least:+.3f} to {most:+.3f}"),
                "{:.3f} [{:.3f}, {:.3f}]".format(*interval([row["pass@8"][-1] for row in found])),
                "{:.3f} [{:.3f}, {:.3f}]".format(*interval([row["entropy"][-1] for row in found])),
                "{:.2g} [{:.2g}, {:.2g}]".format(*interval([row["norm"][1] for row in found])),
                _diversities(found),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _diversities(rows: list[dict[str, Any]]) -> str:
    """Mean before -> after with its interval, over the runs that have both."""
    known = [row["diversity"] for row in rows if None not in row.get("diversity", [None])]
    if len(known) < 2:
        return ""
    mean, low, high = interval([after for _, after in known])
    return (
        f"{statistics.mean(before for before, _ in known):.3f} -> {mean:.3f} [{low:.3f}, "
        f"{high:.3f}]"
    )


def differences(rows: list[dict[str, Any]], base: str = "pacs") -> list[str]:
    """A line of Markdown for each other objective: pass@1 less that of `base` on the same seeds,
    with its interval.
    """
    groups = _by_setting([row for row in rows if "pass@1" in row])
    of_base = {}
    for (name, _), found in groups.items():
        if name == base:
            of_base |= {row["seed"]: row["pass@1"] for row in found}
    lines = [
        "",
        f"| objective | seeds | pass@1 less that of {base} | 95 % interval |",
        "|---|---|---|---|",
    ]
    for (objective, _), found in groups.items():
        pairs = [row["pass@1"] - of_base[row["seed"]] for row in found if row["seed"] in of_base]
        if objective != base and len(pairs) > 1:
            mean, low, high = interval(pairs)
            lines.append(
                f"| {objective} | {len(pairs)} | {mean:+.3f} | {low:+.3f} to {high:+.3f} |"
            )
    return lines


def best(objective: str, log: Path) -> Setting:
    """The setting with the best mean pass@1 in `log`; the first of equal ones."""
    groups: dict[str, list[float]] = {}
    for row in (json.loads(line) for line in log.read_text().splitlines()):
        if row["objective"] == Path(objective).stem:
            groups.setdefault(json.dumps(_setting(row)), []).append(row["pass@1"])
    if not groups:
        sys.exit(f"{log} has no run of {objective}")
    found: Setting = json.loads(max(groups, key=lambda setting: statistics.mean(groups[setting])))
    return found


def reached(row: dict[str, Any], target: float) -> tuple[int, int] | None:
    """(step, tokens sampled until then) at which the mean reward of three steps is at least
    `target`.
    """
    rewards = row["rewards"]
    for step in range(3, len(rewards) + 1):
        if statistics.mean(rewards[step - 3 : step]) >= target:
            return step, sum(row["tokens"][:step])
    return None


def speeds(rows: list[dict[str, Any]]) -> list[str]:
    """A line of Markdown for each setting: steps and thousands of tokens to 0.9 of the ceiling, by
    seed.

    The ceiling is the best mean pass@1 of a setting in the log. A run that does not reach the
    target is shown as `>` and all that it had: it is censored, not dropped.
    """
    groups = _by_setting([row for row in rows if "tokens" in row])
    if not groups:
        return []
    target = 0.9 * max(statistics.mean(row["pass@1"] for row in found) for found in groups.values())
    lines = [
        "",
        f"| objective | setting | steps to {target:.3f} | thousands of tokens |",
        "|---|---|---|---|",
    ]
    for (objective, setting), found in groups.items():
        cells: list[tuple[str, str]] = []
        for row in found:
            at = reached(row, target)
            step, tokens = at or (len(row["rewards"]), sum(row["tokens"]))
            sign = "" if at else ">"
            cells.append((f"{sign}{step}", f"{sign}{tokens / 1000:.0f}"))
        steps, thousands = (" ".join(column) for column in zip(*cells, strict=True))
        lines.append(f"| {objective} | {setting} | {steps} | {thousands} |")
    return lines


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
    parser.add_argument("--task", choices=sorted(TASKS), default="quickstart")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.workers) as pool:
        folder = (options.folder or Path(name)).resolve()
        if options.task != "quickstart":
            folder /= options.task
        if options.objectives != ["sft"]:
            list(
                pool.map(
                    lambda seed: warm_start(seed, folder, f"warm-{seed}", task=options.task),
                    options.seeds,
                )
            )
        known = []
        if options.log.exists():
            known = [json.loads(line) for line in options.log.read_text().splitlines()]
        jobs = []
        for objective in options.objectives:
            chosen = options.only or settings(objective)
            if options.best_of:
                chosen = [best(objective, options.best_of)]
            for setting, seed in itertools.product(chosen, options.seeds):
                who = (options.task, Path(objective).stem, seed)
                if not any(_setting(row) == setting and _who(row) == who for row in known):
                    jobs.append((objective, setting, seed))
        with options.log.open("a") as log:
            for row in pool.map(
                lambda job: measure(job[0], job[1], job[2], folder, task=options.task), jobs
            ):
                log.write(json.dumps(row) + "\n")
                log.flush()
                print(row, flush=True)
    logged = [json.loads(line) for line in options.log.read_text().splitlines()]
    compared = differences(logged) if options.best_of else []
    print("\n".join([*table(logged), *compared, *speeds(logged)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
