"""Several training steps of train_step.py in one process, without its checks: for a GPU that is
lent for minutes, where importing and checking takes longer than measuring.

    python benchmarks/train_step_sweep.py --out results/sweep qwen3-4b:bf16 qwen3-4b:bf16:full
    python benchmarks/train_step_sweep.py --out results/sweep --profile qwen3-4b:bf16

A model is PRESET:CASE[:RECOMPUTE]. `--profile` also writes the time of each kernel in one update,
and the share of the update in which the GPU computes nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import train_step  # noqa: E402


def setup_of(model: str, steps: int, *, dry: bool) -> train_step.Setup:
    """The measurement of PRESET:CASE[:RECOMPUTE]."""
    preset, case, *recompute = model.split(":")
    size: dict[str, Any] = {
        "samples": 16,
        "prompt": 256,
        "response": 3840,
        "tokens_per_microbatch": 16384,
    }
    if dry:
        preset = "tiny-moe" if "a3b" in preset else "tiny"
        size = {"samples": 8, "prompt": 8, "response": 24, "tokens_per_microbatch": 64}
    return train_step.Setup(
        kind="speed",
        case=case,
        preset=preset,
        layers=train_step.PRESETS[preset][1],
        steps=steps,
        cpu=dry,
        recompute=recompute[0] if recompute else "none",
        **size,
    )


def profile(setup: train_step.Setup) -> dict[str, Any]:
    """Microseconds of each kernel in one update, the update's, and those without a kernel."""
    from pacs_megatron.objectives.pacs import PacsOptions
    from pacs_megatron.objectives.registry import build_objective

    policy, _ = train_step.build_policy(setup)
    minibatch = train_step.random_part(setup, policy.spec.vocab_size)
    objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
    for _ in range(train_step.NUM_WARMUP):
        policy.update(minibatch, objective, None)
    train_step.sync()

    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profiler:
        policy.update(minibatch, objective, None)
        train_step.sync()

    kernels: dict[str, dict[str, float]] = {}
    spans = []
    for event in profiler.events() or []:
        if event.device_type.name == "CUDA":
            row = kernels.setdefault(event.name[:160], {"calls": 0, "us": 0.0})
            row["calls"] += 1
            row["us"] += event.time_range.elapsed_us()
            spans.append((event.time_range.start, event.time_range.end))

    busy_us = 0.0
    last = 0.0
    for start, end in sorted(spans):
        busy_us += max(0.0, end - max(start, last))
        last = max(last, end)
    whole_us = max((end for _, end in spans), default=0.0) - min(
        (start for start, _ in spans), default=0.0
    )
    largest = sorted(kernels.items(), key=lambda item: -item[1]["us"])
    return {"update_us": whole_us, "idle_us": whole_us - busy_us, "kernels": dict(largest)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="PRESET:CASE[:RECOMPUTE]")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--dry-run-cpu", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()

    from pacs_megatron.errors import PacsError

    failed = 0
    facts = train_step.machine_facts()
    for model in args.models:
        setup = setup_of(model, args.steps, dry=args.dry_run_cpu)
        row: dict[str, Any]
        try:
            row = train_step.measure_speed(setup)
        except (PacsError, RuntimeError) as error:
            row = {"refused": str(error).splitlines()[0]}
            failed = 1
        gc.collect()
        torch.cuda.empty_cache()
        if args.profile and "refused" not in row:
            row["profile"] = profile(setup)
            gc.collect()
            torch.cuda.empty_cache()

        folder = args.out / model.replace(":", "-")
        folder.mkdir(parents=True, exist_ok=True)
        rows = {setup.case: {"speed": row, "check": {}}}
        result = {"machine": facts, "setup": asdict(setup), "rows": rows}
        (folder / "result.json").write_text(json.dumps(result, indent=1))
        lines = [f"{model}, {setup.layers} layers; {facts['gpu'] or 'CPU'}"]
        lines += train_step.speed_table(rows)
        print("\n".join(lines), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
