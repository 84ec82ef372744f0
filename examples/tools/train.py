"""`python -m examples.tools.train`: a tiny model that cannot multiply learns to call a calculator.

A warm start shows how a call is written, in a few of its demonstrations. PACS through the complete
loop, with an agent of several turns, then has to make calls frequent. Run it again and it continues
where it stopped.
"""

import argparse
from pathlib import Path

from examples.quickstart.run import REPO, SHORT, SHORT_WARMSTART, make_inputs, run
from examples.tools.problems import write_products
from pacs_megatron.observability.metrics import read_metrics

_STEPS_OF_A_MEAN = 3


def summary(run_dir: Path) -> str:
    """`pass@1 0.13 -> 0.97, tool use 0.14 -> 1.00`: held-out problems, and samples of the first and
    last steps.
    """
    rows = read_metrics(run_dir)
    passed = [row["eval/test/pass@1"] for row in rows if "eval/test/pass@1" in row]
    used = [
        float(row["agent/tool_use_frac"] or 0.0) for row in rows if "agent/tool_use_frac" in row
    ]
    first = used[:_STEPS_OF_A_MEAN]
    last = used[-_STEPS_OF_A_MEAN:]
    first_mean = sum(first) / len(first)
    last_mean = sum(last) / len(last)
    return (
        f"pass@1 {passed[0]:.3f} -> {passed[-1]:.3f}, "
        f"tool use {first_mean:.3f} -> {last_mean:.3f}  ({len(used)} steps)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="tools", help="runs/<name> is the run's folder")
    parser.add_argument("--dir", default="runs")
    parser.add_argument(
        "--short", action="store_true", help="a few steps only: shows the plumbing, learns nothing"
    )
    parser.add_argument(
        "--warm", help="name of an earlier call whose inputs and warm start are used again"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        help="key=value for the PACS run, e.g. data.shuffle_labels=true, the control",
    )
    args = parser.parse_args()
    base = Path(args.dir)
    first_name = args.warm or args.name
    inputs = base / f"{first_name}-inputs"
    make_inputs(inputs, args.seed, write_products)
    common = (f"run.dir={base}", f"run.seed={args.seed}")
    run(
        "pacs_megatron",
        "train",
        str(REPO / "examples/tools/warmstart.yaml"),
        *common,
        f"run.name={first_name}-warmstart",
        f"model.path={inputs}/model",
        f"data.train.path={inputs}/data/demonstrations.json",
        *(SHORT_WARMSTART if args.short else ()),
    )
    run(
        "pacs_megatron",
        "train",
        str(REPO / "examples/tools/train.yaml"),
        *common,
        f"run.name={args.name}",
        f"model.path={base}/{first_name}-warmstart/hf",
        f"data.train.path={inputs}/data/train.json",
        f"evaluation.benchmarks.0.path={inputs}/data/test.json",
        f"rollout.agent.function={REPO}/examples/tools/agent.py:solve",
        *(SHORT if args.short else ()),
        *args.overrides,
    )
    print(summary(base / args.name))
    print(f"report: {base / args.name}/report.html   checkpoint: {base / args.name}/hf")


if __name__ == "__main__":
    main()
