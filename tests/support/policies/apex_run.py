"""Updates of a tiny policy where NVIDIA Apex is installed: `python -m tests.support.policies.
apex_run MODEL OUT`, in a process of its own, because Megatron-Core looks for Apex on import.

Apex is the stand-in of tests/support/apex_stand_in, and the CUDA branch of the policy runs on the
CPU. OUT gets the exported weights of each layout, and the calls of Apex's kernels as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pacs_megatron.config.schema import PrecisionOptions
from pacs_megatron.objectives.pacs import PacsOptions
from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.parallel import cpu_redirects
from pacs_megatron.policy import precision
from tests.support.policies.policy_cases import make_policy, random_step, train
from tests.support.ranks import run_ranks

BUDGET = 64
OPTIMIZER = {"weight_decay": 0.1}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp": 2}),
    "dp2-distopt": (2, {"distributed_optimizer": True}),
    "bf16": (1, {"dtype": "bf16"}),
}


def steps() -> list[Any]:
    """Three random steps, the same in every process."""
    return [random_step(seed) for seed in range(3)]


def updated(model: Path, layout: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Weights and facts of rank 0 after one update of each step."""
    world, options = LAYOUTS[layout]

    def on_rank(_rank: int, world: int) -> Any:
        policy = make_policy(
            model, world, tokens_per_microbatch=BUDGET, optimizer=OPTIMIZER, **options
        )
        objective = build_objective(PacsOptions(name="pacs"), updates_per_step=1)
        reports = train(policy, objective, steps(), tokens_per_microbatch=BUDGET)
        calls: dict[str, int] = {}
        if "amp_C" in sys.modules:
            calls = dict(sys.modules["amp_C"].CALLS)
        weights = {name: t.float().numpy().copy() for name, t in policy.export_weights()}
        return weights, {
            "calls": calls,
            "adam": sorted({type(adam).__module__ for adam in policy.optimizer.adams()}),
            "adam_step": policy.optimizer.adam_step,
            "grad_norms": [report.grad_norm for report in reports],
            "num_layers": policy.spec.num_layers,
        }

    result: tuple[dict[str, np.ndarray], dict[str, Any]] = run_ranks(on_rank, world)[0]
    return result


def main(model: Path, out: Path) -> None:
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    sys.path.insert(0, str(Path(__file__).parents[1] / "apex_stand_in"))
    # Megatron-Core sees Apex, as on a host with CUDA; Transformer Engine is not installed.
    cpu_redirects._CUDA_ONLY = ("transformer_engine",)  # type: ignore[assignment]
    here = precision.inspect_machine()
    machine = replace(here, cuda=True)
    precision.inspect_machine = lambda: machine
    options = PrecisionOptions(dtype="bf16")
    report: dict[str, Any] = {"line": precision.describe(options, machine)}

    arrays: dict[str, np.ndarray] = {}
    for layout in LAYOUTS:
        weights, report[layout] = updated(model, layout)
        for name, weight in weights.items():
            arrays[f"{layout}/{name}"] = weight
    np.savez(out / "weights.npz", **arrays)  # type: ignore[arg-type]
    (out / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
