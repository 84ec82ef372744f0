"""`plan` beside what a GPU session measured: memory and seconds of each timed model, and constants.

    python benchmarks/fit_constants.py RESULTS OUT

Reads every `result.json` of `train_step.py` and `train_step_sweep.py` below RESULTS. Shares of the
bf16 peak: a step computes three forward passes, a forward pass one. FP8 against bf16 of the same
preset, by whole steps; the constant is about the layers' products alone. `plan/constants.py` is
changed by hand, with this file as source.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import train_step  # noqa: E402
from pacs_megatron.config import RunConfig  # noqa: E402
from pacs_megatron.config.layout import layout_of  # noqa: E402
from pacs_megatron.models import ModelSpec, read_spec  # noqa: E402
from pacs_megatron.runtime.gpus import GPUS  # noqa: E402
from pacs_megatron.workbench.plan import activations, constants, state, timing  # noqa: E402
from pacs_megatron.workbench.plan.known_models import need_config  # noqa: E402
from pacs_megatron.workbench.plan.lengths import Lengths  # noqa: E402

Speed = dict[str, Any]
"""figures of one timed model, of `measure_speed` in train_step.py, with `setup` and `gpu`"""
Speeds = dict[tuple[str, str], Speed]
"""(preset and recompute, case) -> figures"""


def read_speeds(results: Path) -> Iterator[tuple[tuple[str, str], Speed]]:
    """((preset and recompute, case), figures) of every timed model."""
    for file in sorted(results.rglob("result.json")):
        result = json.loads(file.read_text())
        for case, row in result.get("rows", {}).items():
            if "tokens_per_s" in row.get("speed", {}):
                setup = result["setup"]
                figures = row["speed"] | {"setup": setup, "gpu": result["machine"]["gpu"]}
                yield (f"{setup['preset']} {setup['recompute']}", case), figures


def measured_constants(speeds: Speeds) -> dict[str, list[float]]:
    """Values of the constants on each timed model without recomputation.

    Args:
        speeds: (preset and recompute, case) -> figures.

    Returns:
        Name of a constant -> its values, in the order of the models.
    """
    without_recompute = {key: speed for key, speed in speeds.items() if key[0].endswith(" none")}
    bf16 = {model: speed for (model, case), speed in without_recompute.items() if case == "bf16"}

    train_mfu = []
    forward_mfu = []
    for speed in bf16.values():
        step_s = statistics.median(speed["step_s"])
        forward_s = statistics.median(speed["forward_s"])
        train_mfu.append(speed["peak_frac"])
        forward_mfu.append(speed["peak_frac"] / 3 * step_s / forward_s)

    fp8_speedup = []
    for (model, case), speed in without_recompute.items():
        if case.startswith("fp8") and model in bf16:
            fp8_speedup.append(speed["tokens_per_s"] / bf16[model]["tokens_per_s"])
    return {"TRAIN_MFU": train_mfu, "FORWARD_MFU": forward_mfu, "FP8_SPEEDUP": fp8_speedup}


def constant_line(name: str, values: Sequence[float]) -> str:
    """One row: the assumed value and range beside the measured ones.

    Args:
        name: of the constant.
        values: measured; `OUTSIDE` if their median is outside of the assumed range.
    """
    constant = getattr(constants, name)
    measured = "-"
    remark = ""
    if values:
        median = statistics.median(values)
        measured = f"{min(values):.3g}, {median:.3g}, {max(values):.3g}"
        if not constant.low <= median <= constant.high:
            remark = "  OUTSIDE"
    bounds = f"{constant.low:g} to {constant.high:g}"
    return f"{name:<12} {constant.value:>8g} {bounds:>14} {measured:>38}{remark}"


def recompute_lines(seconds: Mapping[tuple[str, str], Sequence[float]]) -> Iterator[str]:
    """How much longer a step with full recomputation takes.

    Args:
        seconds: (preset and recompute, case) -> seconds of each step.
    """
    for (model, case), with_recompute in seconds.items():
        without = seconds.get((model.replace(" full", " none"), case))
        if model.endswith(" full") and without is not None:
            factor = statistics.median(with_recompute) / statistics.median(without)
            yield f"full recomputation of {model.split()[0]} {case}: {factor:.2f} times the seconds"


def config_of(setup: Mapping[str, Any], case: str, gpu: str) -> RunConfig:
    """The configuration of which `plan` counts what a timed model uses."""
    return RunConfig.model_validate(
        {
            "run": {"name": "x", "steps": 1},
            "resources": {"gpu": gpu},
            "model": {"path": "x"},
            "precision": train_step.CASES[case],
            "parallel": {"recompute": {"granularity": setup["recompute"]}},
            "objective": {"name": "pacs"},
            "batch": {
                "prompts_per_step": setup["samples"] // 4,
                "samples_per_prompt": 4,
                "tokens_per_microbatch": setup["tokens_per_microbatch"],
            },
            "rollout": {
                "engine": "embedded",
                "sampling": {"max_response_tokens": setup["response"]},
            },
            "reward": {"name": "math"},
            "data": {"train": {"path": "x", "preset": "gsm8k"}},
            "optimizer": {"lr": 1e-6},
        }
    )


def planned_bytes(config: RunConfig, spec: ModelSpec) -> float:
    """Bytes of the allocator at the peak: without CUDA's context, NCCL and fragmentation."""
    layout = layout_of(config, 1)
    items = [
        *state.state_items(config, spec, layout, 0),
        *activations.activation_items(config, spec, layout, 0),
    ]
    return sum(item.num_bytes for item in items)


def planned_seconds(config: RunConfig, spec: ModelSpec, speed: Speed, gpu: str) -> float:
    """Seconds of one update over the timed tokens."""
    setup = speed["setup"]
    flops = speed["tflops"] * 1e12 * statistics.median(speed["step_s"])
    if setup["recompute"] == "full":
        response = 0.9 * setup["response"]
        lengths = Lengths(setup["prompt"], response, response, response_of_token=response)
        flops += flops / 3 * timing.recomputed_flops(config, spec, lengths)[0]
    fp8_frac = 0.0
    if config.precision.fp8 is not None:
        length = speed["tokens"] / setup["samples"]
        fp8_frac = timing.linear_frac(spec, 1.0, length, 1 - setup["prompt"] / length)
    copies = 0.0
    if spec.moe is not None:
        copies = speed["tokens"] * spec.num_layers * spec.moe.top_k
    work = timing.TrainWork(
        flops=flops,
        expert_copies=copies,
        fp8_frac=fp8_frac,
    )
    return timing.busy_seconds(work, layout_of(config, 1), GPUS[gpu], constants.TRAIN_MFU)


def plan_lines(speeds: Speeds) -> Iterator[str]:
    """Planned and measured memory and seconds of each timed model."""
    titles = f"{'planned':>8} {'error':>7}"
    yield f"{'model':<34} {'GiB':>7} {titles} {'s':>7} {titles}"
    for (model, case), speed in speeds.items():
        setup = speed["setup"]
        hub_id, _ = train_step.PRESETS[setup["preset"]]
        if hub_id is None or speed["peak_gib"] is None:
            continue
        spec = read_spec(need_config(hub_id, "benchmark"))
        spec = replace(spec, num_layers=setup["layers"])
        gpu = next(name for name in GPUS if name in speed["gpu"].lower())
        config = config_of(setup, case, gpu)

        peak_gib = speed["peak_gib"]
        planned_gib = planned_bytes(config, spec) / 2**30
        step_s = statistics.median(speed["step_s"])
        planned_s = planned_seconds(config, spec, speed, gpu)
        yield (
            f"{model + ' ' + case:<34} {peak_gib:>7.1f} {planned_gib:>8.1f} "
            f"{planned_gib / peak_gib - 1:>+7.1%} {step_s:>7.2f} {planned_s:>8.2f} "
            f"{planned_s / step_s - 1:>+7.1%}"
        )


def main() -> int:
    results = Path(sys.argv[1])
    out = Path(sys.argv[2])
    speeds = dict(read_speeds(results))
    measured = measured_constants(speeds)

    title = "measured (lowest, median, highest)"
    lines = [f"{'constant':<12} {'assumed':>8} {'range':>14} {title:>38}"]
    lines.extend(constant_line(name, values) for name, values in measured.items())
    lines += ["", *plan_lines(speeds), ""]
    lines.extend(recompute_lines({key: speed["step_s"] for key, speed in speeds.items()}))
    if not speeds:
        lines.append(f"no timed model below {results}: run stages 2 and 3 first")

    out.mkdir(parents=True, exist_ok=True)
    (out / "table.txt").write_text("\n".join(lines) + "\n")
    (out / "result.json").write_text(json.dumps(measured, indent=1))
    print("\n".join(lines))
    return 0 if speeds else 1


if __name__ == "__main__":
    sys.exit(main())
