"""`make quickstart`: a tiny model, a warm start, PACS through the complete loop, and a checked
Hugging Face checkpoint.

Every step is a command of the product, run as a user would; run it again and it continues where it
stopped.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from examples.quickstart.model import build_model
from examples.quickstart.problems import write_problems
from pacs_megatron.observability.metrics import read_metrics
from pacs_megatron.runtime.command_line import program
from pacs_megatron.runtime.waiting import report_wait

REPO = Path(__file__).resolve().parents[2]
SHORT_WARMSTART = ("run.steps=20", "optimizer.warmup_updates=5")
SHORT = (
    "run.steps=3",
    "optimizer.warmup_updates=1",
    "evaluation.benchmarks.0.limit=8",
    "batch.prompts_per_step=4",
    "checkpoint.every=null",
)


def run(*command: str) -> None:
    """Runs a module of this interpreter; ends the quickstart with its exit code if it fails."""
    # A cluster's modules may have added packages to PYTHONPATH.
    search_path = os.pathsep.join([str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": search_path}
    code = subprocess.run([sys.executable, "-m", *command], env=environment, check=False).returncode
    if code:
        sys.exit(code)


def make_inputs(
    folder: Path, seed: int, write: Callable[[Path, int], None] = write_problems
) -> None:
    """The model with random weights, and the problems.

    Args:
        folder: of the inputs; kept if they exist.
        seed: of both.
        write: writes the problems of a seed to a folder.
    """
    if (folder / "done").is_file():
        return
    build_model(folder / "model", seed)
    write(folder / "data", seed)
    (folder / "done").write_text(f"seed {seed}\n")


def summary(run_dir: Path) -> str:
    """`pass@1 0.31 -> 0.94, pass@8 0.80 -> 1.00` of the held-out problems."""
    rows = [row for row in read_metrics(run_dir) if "eval/test/pass@1" in row]
    parts = []
    for k in (1, 8):
        first = rows[0][f"eval/test/pass@{k}"]
        last = rows[-1][f"eval/test/pass@{k}"]
        parts.append(f"pass@{k} {first:.3f} -> {last:.3f}")
    problems = rows[-1]["eval/test/num_problems"]
    draws = rows[-1]["eval/test/num_samples"]
    return f"{', '.join(parts)}  ({problems} held-out problems, {draws} draws)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="quickstart", help="runs/<name> is the run's folder")
    parser.add_argument("--dir", default="runs")
    parser.add_argument(
        "--short", action="store_true", help="a few steps only: shows the plumbing, learns nothing"
    )
    parser.add_argument(
        "--shuffle-labels", action="store_true", help="control: with random labels nothing may rise"
    )
    parser.add_argument(
        "overrides", nargs="*", help="key=value for the PACS run, e.g. run.steps=40"
    )
    args = parser.parse_args()
    base = Path(args.dir)
    inputs = base / f"{args.name}-inputs"
    warm = base / f"{args.name}-warmstart"
    final = base / args.name
    make_inputs(inputs, args.seed)
    common = (f"run.dir={base}", f"run.seed={args.seed}")
    run(
        "pacs_megatron",
        "train",
        str(REPO / "configs/runs/quickstart-warmstart.yaml"),
        *common,
        f"run.name={args.name}-warmstart",
        f"model.path={inputs}/model",
        f"data.train.path={inputs}/data/demonstrations.json",
        *(SHORT_WARMSTART if args.short else ()),
    )
    run(
        "pacs_megatron",
        "train",
        str(REPO / "configs/runs/quickstart.yaml"),
        *common,
        f"run.name={args.name}",
        f"model.path={warm}/hf",
        f"data.train.path={inputs}/data/train.json",
        f"evaluation.benchmarks.0.path={inputs}/data/test.json",
        f"data.shuffle_labels={str(args.shuffle_labels).lower()}",
        *(SHORT if args.short else ()),
        *args.overrides,
    )
    with report_wait("for transformers and the policy to answer the same problems"):
        run("examples.quickstart.check", str(final))
    print(summary(final))
    print(f"report: {final}/report.html   checkpoint: {final}/hf")
    print(
        f"next: {program()} train configs/runs/quickstart.yaml run.name=my-run objective.beta=2"
        "   (see README.md)"
    )


if __name__ == "__main__":
    main()
