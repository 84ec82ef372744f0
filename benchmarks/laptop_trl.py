"""A training step beside TRL's GRPOTrainer on the same work, both on two processes, in one run.

    pip install --no-deps --target FOLDER trl accelerate
    python benchmarks/laptop_trl.py --trl FOLDER [--rounds 3] [--steps 14]

Work of a step: the quickstart's model (random weights), 16 prompts x 8 samples, at most 48 new
tokens, a reward function in Python, one optimizer update, fp32, one thread a process. TRL runs GRPO
without a reference model under torchrun (DDP); this package runs GRPO with `tp: 1` (data parallel
2) and `tp: 2`. Each round runs the three in this order. The two first steps of a run are left out.
Ratio: TRL's median seconds over this package's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WARMUP_STEPS = 2
SUFFIX = r"Answer in \boxed{}."


def trl_rank(folder: Path, steps: int) -> None:
    """One rank of TRL's run; rank 0 writes the seconds of each step to `trl.json`."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            ends.append(time.perf_counter())

    def reward(completions: list[list[dict[str, str]]], **kwargs: object) -> list[float]:
        return [float(sum(completion[0]["content"].encode()) % 2) for completion in completions]

    rows = []
    for row in json.loads((folder / "data" / "train.json").read_text()):
        message = {"role": "user", "content": f"{row['problem']} {SUFFIX}"}
        rows.append({"prompt": [message]})

    options = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=16 * 8 // int(os.environ["WORLD_SIZE"]),
        num_generations=8,
        max_completion_length=48,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        learning_rate=1e-6,
        max_steps=steps + WARMUP_STEPS,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder / "model", padding_side="left"),
        reward_funcs=reward,
        args=options,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    )
    trainer.train()
    if os.environ["RANK"] == "0":
        counted = ends[WARMUP_STEPS - 1 :]
        seconds = [end - start for start, end in itertools.pairwise(counted)]
        (folder / "trl.json").write_text(json.dumps(seconds))


def run_trl(folder: Path, site: Path, steps: int) -> list[float]:
    """Seconds of each step of TRL on two ranks."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        __file__,
        "--rank-of",
        str(folder),
        "--steps",
        str(steps),
    ]
    start(command, {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"})
    seconds: list[float] = json.loads((folder / "trl.json").read_text())
    return seconds


def run_ours(folder: Path, tp: int, steps: int, round_number: int) -> list[float]:
    """Seconds of each step of this package on two ranks."""
    run = folder / f"tp{tp}-{round_number}"
    overrides = (
        f"run.dir={run} run.steps={steps + WARMUP_STEPS} run.nproc=2 parallel.tp={tp} "
        f"model.path={folder}/model data.train.path={folder}/data/train.json reward.name=custom "
        f"reward.function={folder}/reward.py:reward objective.name=grpo "
        "mismatch.score_noise_every=null mismatch.max_score_noise=null optimizer.lr=1e-6 "
        "optimizer.min_lr=0.0 optimizer.warmup_updates=0 batch.updates_per_step=1 "
        "evaluation.benchmarks=[] evaluation.every=null evaluation.samples_per_prompt=4 "
        "evaluation.k=[1] evaluation.sampling=null checkpoint.every=null"
    ).split()
    config = str(ROOT / "configs" / "runs" / "quickstart.yaml")
    command = [sys.executable, "-m", "pacs_megatron", "train", config, *overrides]
    start(command, {"PYTHONPATH": str(ROOT)})

    metrics = next(run.rglob("metrics.jsonl"))
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row["time/step_s"] for row in rows[WARMUP_STEPS:]]


def start(command: list[str], variables: dict[str, str]) -> None:
    """Runs a command to its end; exits with its error."""
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(
            f"{' '.join(command[:6])} ... ended with {done.returncode}:\n{done.stderr[-3000:]}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trl", type=Path, help="folder with the packages trl and accelerate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of is not None:
        trl_rank(options.rank_of, options.steps)
        return 0
    if options.trl is None:
        parser.error(
            "--trl FOLDER is missing: pip install --no-deps --target FOLDER trl accelerate"
        )
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from step_overhead import make_inputs

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        for number in range(options.rounds):
            trl = statistics.median(run_trl(folder, options.trl, options.steps))
            line = f"round {number}: TRL {trl:.3f} s"
            for layout, tp in (("DP=2", 1), ("TP=2", 2)):
                ours = statistics.median(run_ours(folder, tp, options.steps, number))
                line += f"; {layout} {ours:.3f} s, ratio {trl / ours:.2f}"
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
