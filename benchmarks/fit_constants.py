"""Constants of `plan` beside what a GPU session measured: python benchmarks/fit_constants.py
RESULTS OUT

Reads every `result.json` of `train_step.py` below RESULTS. Shares of the bf16 peak: a step computes
three forward passes, a forward pass one. FP8 against bf16 of the same preset. `plan/constants.py`
is changed by hand, with this file as source.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from pacs_megatron.workbench.plan import constants  # noqa: E402


def speeds(results: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(preset and recompute, case, figures) of every timed model."""
    for file in sorted(results.rglob("result.json")):
        found = json.loads(file.read_text())
        for case, row in found.get("rows", {}).items():
            if "tokens_per_s" in row.get("speed", {}):
                setup = found["setup"]
                yield f"{setup['preset']} {setup['recompute']}", case, row["speed"]


def main() -> int:
    results = Path(sys.argv[1])
    out = Path(sys.argv[2])
    rows = list(speeds(results))
    whole = {(model, case): speed for model, case, speed in rows if model.endswith(" none")}
    bf16 = {model: speed for (model, case), speed in whole.items() if case == "bf16"}
    found = {
        "TRAIN_MFU": [speed["peak_frac"] for speed in bf16.values()],
        "FORWARD_MFU": [
            speed["peak_frac"]
            / 3
            * statistics.median(speed["step_s"])
            / statistics.median(speed["forward_s"])
            for speed in bf16.values()
        ],
        "FP8_SPEEDUP": [
            speed["tokens_per_s"] / bf16[model]["tokens_per_s"]
            for (model, case), speed in whole.items()
            if case.startswith("fp8") and model in bf16
        ],
    }
    lines = [
        f"{'constant':<12} {'assumed':>8} {'range':>14} {'measured (lowest, median, highest)':>38}"
    ]
    for name, values in found.items():
        constant = getattr(constants, name)
        measured = (
            f"{min(values):.3g}, {statistics.median(values):.3g}, {max(values):.3g}"
            if values
            else "-"
        )
        bounds = f"{constant.low:g} to {constant.high:g}"
        inside = (
            ""
            if not values or constant.low <= statistics.median(values) <= constant.high
            else "  OUTSIDE"
        )
        lines.append(f"{name:<12} {constant.value:>8g} {bounds:>14} {measured:>38}{inside}")
    by_model = {(model, case): speed["step_s"] for model, case, speed in rows}
    for (model, case), seconds in by_model.items():
        base = by_model.get((model.replace(" full", " none"), case))
        if model.endswith(" full") and base is not None:
            factor = statistics.median(seconds) / statistics.median(base)
            lines.append(
                f"full recomputation of {model.split()[0]} {case}: {factor:.2f} times the seconds"
            )
    if not rows:
        lines.append(f"no timed model below {results}: run stages 2 and 3 first")
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.txt").write_text("\n".join(lines) + "\n")
    (out / "result.json").write_text(json.dumps(found, indent=1))
    print("\n".join(lines))
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
