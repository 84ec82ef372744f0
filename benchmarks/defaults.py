"""Measures settings of each objective on the quickstart's task, as the reason for the defaults.

    python benchmarks/defaults.py pacs grpo sft --seeds 2 --log defaults.jsonl

Every run starts from the seed's warm start (one for all settings), takes 25 steps of 16 prompts x 8 samples on one rank
with one thread, and ends with an evaluation: 96 held-out problems, 8 draws each. `sft` repeats the warm start itself.
One line of JSON a run goes to the log; runs that the log has are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from examples.quickstart.run import make_inputs
from pacs_megatron.observability.metrics import read_metrics

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
}


def settings(objective: str) -> list[Setting]:
    """The grid: clip and rate in full, the rest one at a time."""
    if objective == "sft":
        return [SFT, SFT | {"clip": 0.0}]
    if objective == "grpo":
        return [GRPO, GRPO | {"clip": 0.0}, GRPO | {"lr": 1e-4}]
    return [
        *(PACS | {"clip": clip, "lr": lr} for lr in (1e-4, 2e-4, 4e-4) for clip in (0.0, 1.0)),
        *(PACS | {"clip": clip, "lr": 2e-4, "updates": 1} for clip in (0.0, 1.0)),
        *(PACS | change for change in ({"updates": 4}, {"weighting": "none"}, {"beta": 3.0}, {"beta": 0.3})),
        PACS | {"lr": 2e-4, "updates": 1, "reference": "frozen"},
    ]


def overrides(objective: str, setting: Setting) -> list[str]:
    return [f"objective.name={objective}", *(f"{KEYS[name]}={value}" for name, value in setting.items())]


def train(name: str, folder: Path, config: str, *changes: str) -> Path:
    """Runs one rank to its end and returns its folder."""
    command = [sys.executable, "-m", "pacs_megatron.training.main", str(ROOT / "configs" / "runs" / config)]
    common = (f"run.dir={folder}/runs", f"run.name={name}", "parallel.tp=1", "logging.tensorboard=false")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*command, *common, *changes], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{name}: {done.stderr[-2000:]}")
    return folder / "runs" / name


def warm_start(seed: int, folder: Path, name: str, *changes: str) -> Path:
    inputs = folder / f"inputs-{seed}"
    make_inputs(inputs, seed)
    data = f"data.train.path={inputs}/data/demonstrations.json"
    return train(
        name, folder, "quickstart-warmstart.yaml", f"run.seed={seed}", f"model.path={inputs}/model", data, *changes
    )


def measure(objective: str, setting: Setting, seed: int, folder: Path) -> dict[str, Any]:
    name = "-".join([objective, *(f"{key}{value}" for key, value in setting.items()), f"seed{seed}"])
    begin = time.monotonic()
    found: dict[str, Any] = {}
    if objective == "sft":
        run_dir = warm_start(seed, folder, name, *overrides(objective, setting))
        rows = read_metrics(run_dir)
        found["loss"] = statistics.mean(float(row["objective/loss"] or 0) for row in rows[-20:])
    else:
        data = folder / f"inputs-{seed}" / "data"
        run_dir = train(
            name,
            folder,
            "quickstart.yaml",
            *(f"run.seed={seed}", f"model.path={folder}/runs/warm-{seed}/hf", "run.steps=25"),
            *(f"data.train.path={data}/train.json", f"evaluation.benchmarks.0.path={data}/test.json"),
            *("evaluation.every=null", "checkpoint.every=null", "logging.save_rollouts=false"),
            *overrides(objective, setting),
        )
        rows = read_metrics(run_dir)
        found["pass@1"] = rows[-1]["eval/test/pass@1"]
        found["lowest_reward"] = min(float(row["reward/mean"] or 0) for row in rows[1:])
    norms = sorted(float(row["optimizer/grad_norm"] or 0) for row in rows if "optimizer/grad_norm" in row)
    found["norm"] = [norms[0], statistics.median(norms), norms[-1]]
    return {"objective": objective, **setting, "seed": seed, **found, "seconds": round(time.monotonic() - begin)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("objectives", nargs="+", choices=["pacs", "grpo", "sft"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="keep warm starts and runs here")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", type=json.loads, nargs="+", help="these settings, as JSON, instead of the grid")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(options.workers) as pool:
        folder = (options.folder or Path(name)).resolve()
        if options.objectives != ["sft"]:
            list(pool.map(lambda seed: warm_start(seed, folder, f"warm-{seed}"), options.seeds))
        known = [json.loads(line) for line in options.log.read_text().splitlines()] if options.log.exists() else []
        jobs = [
            (objective, setting, seed)
            for objective in options.objectives
            for setting in options.only or settings(objective)
            for seed in options.seeds
            if not any({"objective": objective, **setting, "seed": seed}.items() <= row.items() for row in known)
        ]
        with options.log.open("a") as log:
            for row in pool.map(lambda job: measure(*job, folder), jobs):
                log.write(json.dumps(row) + "\n")
                log.flush()
                print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
