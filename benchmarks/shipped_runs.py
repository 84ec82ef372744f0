"""The plan of every shipped run on H200 and H100: the tables of docs/performance.md.

python benchmarks/shipped_runs.py [--before COMMIT]

With `--before`, each figure is beside that of the files of an older commit, planned with today's
constants. On a GPU that a file is not for, a run has the include of configs/gpus that is fastest
among those that fit.
"""

import argparse
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pacs_megatron.config import load_config
from pacs_megatron.errors import ConfigError
from pacs_megatron.runtime.files import GIB
from pacs_megatron.workbench.plan.plan import Plan, make_plan

ROOT = Path(__file__).parents[1]
GPUS = ("h200", "h100")
PHASES = {
    "rollout": ("rollout",),
    "scores": ("score",),
    "updates": ("updates",),
    "off-load, sync": ("off-load", "weight sync"),
}
TITLES = ("run", "GPUs", *PHASES, "step", "GPU-s a sample", "GiB", "idle")


def name_of(plan: Plan) -> str:
    """Name of a run without its nodes and layout, so that it names the same run of other files."""
    return re.sub(r"-\d+n\d+g(-[te]p\d+)?(-pp\d+)?", "", plan.config.run.name)


def planned(configs: Path, gpu: str) -> dict[str, Plan]:
    """The fastest plan that fits of each shipped run on a GPU."""
    plans = {}
    for path in sorted((configs / "runs").glob("*n8g*.yaml")):
        variants = [variant for variant in _variants(path, gpu) if variant.may_fit]
        if variants:
            best = min(variants, key=lambda plan: (not plan.fits, plan.step_s))
            plans[name_of(best)] = best
    return plans


def _variants(path: Path, gpu: str) -> list[Plan]:
    """The file itself, if it is for the GPU, and with each include of the GPU."""
    own = make_plan(load_config(path))
    if own.gpu is not None and own.gpu.name == gpu:
        return [own]

    plans = []
    for include in sorted((path.parents[1] / "gpus").glob(f"{gpu}*.yaml")):
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as both:
            both.write(f"include: [{path}, {include}]\n")
            both.flush()
            plans.append(make_plan(load_config(Path(both.name))))
    return plans


def cells(plan: Plan) -> list[str]:
    """The figures of one plan, in the order of TITLES."""
    values = [str(plan.num_gpus)]
    for names in PHASES.values():
        phases = [phase for phase in plan.phases if phase.name.startswith(names)]
        seconds = sum(phase.seconds for phase in phases)
        low = sum(phase.span_s[0] for phase in phases)
        high = sum(phase.span_s[1] for phase in phases)
        values.append(_ranged(seconds, low, high) if phases else "0")

    values.append(_ranged(plan.step_s, *plan.step_span))
    samples = plan.config.batch.prompts_per_step * plan.config.batch.samples_per_prompt
    values.append(f"{plan.step_s * plan.num_gpus / samples:.2f}")

    low, high = plan.peak.span
    values.append(_ranged(plan.peak.total / GIB, low / GIB, max(high, plan.highest_bytes) / GIB))
    values.append(f"{plan.idle_share:.0%}")
    return values


def _ranged(value: float, low: float, high: float) -> str:
    digits = 1 if high < 10 else 0
    return f"{value:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def tables(before: Mapping[str, Mapping[str, Plan]]) -> list[str]:
    """One table for each GPU, in Markdown.

    Args:
        before: GPU -> name of a run -> its plan by older files; empty for no comparison.
    """
    texts = []
    for gpu in GPUS:
        lines = [f"{gpu.upper()}:", "", f"| {' | '.join(TITLES)} |"]
        lines.append(f"|{' --- |' * len(TITLES)}")
        for name, plan in planned(ROOT / "configs", gpu).items():
            values = cells(plan)
            earlier = before.get(gpu, {}).get(name)
            if earlier is not None:
                pairs = zip(cells(earlier), values, strict=True)
                values = [f"{old.split(' (')[0]} → {new}" for old, new in pairs]
            lines.append(f"| {' | '.join([name, *values])} |")
        texts.append("\n".join(lines))
    return texts


SYNCED = (
    "pacs-qwen3-4b-1n8g-tp2",
    "pacs-qwen3-8b-1n8g-tp2",
    "pacs-qwen3-14b-2n8g-tp4",
    "grpo-qwen3-14b-7n8g-tp2-ahead",
    "pacs-qwen3-30b-a3b-4n8g-ep8",
    "pacs-qwen3-32b-4n8g-tp8",
    "pacs-qwen2.5-72b-8n8g-tp8-pp4",
)
"""files of the table of weight syncs"""


def sync_table() -> str:
    """Seconds of a weight sync on H200, in Markdown."""
    titles = ("run", "transport", "GB", "gather", "copy", "send", "requests", "together, s")
    lines = [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}"]
    for name in SYNCED:
        plan = make_plan(load_config(ROOT / "configs" / "runs" / f"{name}.yaml"))
        [phase] = [phase for phase in plan.phases if phase.name.startswith("weight sync")]
        transport = phase.name.split("(")[1].rstrip(")")
        num_gb = phase.note.split(" ")[0]
        seconds = re.findall(r"(\d+\.\d+) s (?:to|for)", phase.note)
        values = [name_of(plan), transport, num_gb, *seconds]
        low, high = phase.span_s
        lines.append(f"| {' | '.join(values)} | {phase.seconds:.1f} ({low:.1f} to {high:.1f}) |")
    return "\n".join(lines)


def files_of(commit: str, folder: Path) -> Path:
    """The `configs` of a commit, below `folder`."""
    done = subprocess.run(
        ["git", "archive", commit, "configs"], cwd=ROOT, capture_output=True, check=False
    )
    if done.returncode:
        raise ConfigError(f"--before {commit}: {done.stderr.decode().strip()}; give a commit")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "configs"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--before", metavar="COMMIT", help="whose files to compare with")
    arguments = parser.parse_args()

    before: dict[str, dict[str, Plan]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if arguments.before is not None:
            try:
                older = files_of(arguments.before, Path(folder))
            except ConfigError as error:
                print(f"ConfigError: {error}", file=sys.stderr)
                return 2
            before = {gpu: planned(older, gpu) for gpu in GPUS}
        print("\n\n".join([*tables(before), sync_table()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
