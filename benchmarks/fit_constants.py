"""Constants of `plan` beside what a GPU session measured.

    python benchmarks/fit_constants.py RESULTS OUT

Reads every `result.json` of `train_step.py` below RESULTS. Shares of the bf16 peak: a step computes
three forward passes, a forward pass one. FP8 against bf16 of the same preset. `plan/constants.py`
is changed by hand, with this file as source.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from pacs_megatron.workbench.plan import constants  # noqa: E402

Speed = dict[str, Any]
"""figures of one timed model, of `measure_speed` in train_step.py"""
Speeds = dict[tuple[str, str], Speed]
"""(preset and recompute, case) -> figures"""


def read_speeds(results: Path) -> Iterator[tuple[tuple[str, str], Speed]]:
    """((preset and recompute, case), figures) of every timed model."""
    for file in sorted(results.rglob("result.json")):
        result = json.loads(file.read_text())
        for case, row in result.get("rows", {}).items():
            if "tokens_per_s" in row.get("speed", {}):
                setup = result["setup"]
                yield (f"{setup['preset']} {setup['recompute']}", case), row["speed"]


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


def main() -> int:
    results = Path(sys.argv[1])
    out = Path(sys.argv[2])
    speeds = dict(read_speeds(results))
    measured = measured_constants(speeds)

    title = "measured (lowest, median, highest)"
    lines = [f"{'constant':<12} {'assumed':>8} {'range':>14} {title:>38}"]
    lines.extend(constant_line(name, values) for name, values in measured.items())
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
