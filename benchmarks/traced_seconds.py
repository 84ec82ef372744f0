"""Seconds of an update by `plan --trace` and by `plan`, beside what a GPU session measured.

    python benchmarks/traced_seconds.py h200-results.json [MODEL ...]

Needs Transformer Engine, no GPU; docs/measurements/gpu_session.zip has the file. Each timed model
is traced with 2 and 4 layers, in minutes of CPU, and extrapolated to its layers.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import fit_constants, train_step  # noqa: E402
from pacs_megatron.config import load_config  # noqa: E402
from pacs_megatron.contracts.layout import Layout  # noqa: E402
from pacs_megatron.models import read_spec  # noqa: E402
from pacs_megatron.runtime.gpus import GPUS, Gpu  # noqa: E402
from pacs_megatron.workbench.plan import constants  # noqa: E402
from pacs_megatron.workbench.plan.known_models import need_config  # noqa: E402
from pacs_megatron.workbench.trace.estimate import extrapolate  # noqa: E402
from pacs_megatron.workbench.trace.rank import TraceRequest  # noqa: E402
from pacs_megatron.workbench.trace.runs import trace_ranks  # noqa: E402
from pacs_megatron.workbench.trace.seconds import update_seconds  # noqa: E402

DENSE = "configs/runs/pacs-qwen3-4b-1n8g-tp2.yaml"
EXPERTS = "configs/runs/pacs-qwen3-30b-a3b-4n8g-ep8.yaml"
ONE_GPU = (
    "resources.nodes=1",
    "resources.gpus_per_node=1",
    "rollout.servers.count=1",
    "rollout.servers.tp=1",
    "parallel.tp=1",
    "parallel.ep=1",
    "parallel.sequence_parallel=false",
    "batch.updates_per_step=1",
)
HUB_IDS = {name: hub_id for name, (hub_id, _) in train_step.PRESETS.items() if hub_id is not None}
GROUP = 4
HEAD_BYTES = 28
"""a logit of the head at the session, beside those of today's head (86 and 58)"""


def traced_seconds(case: str, speed: fit_constants.Speed, gpu: Gpu) -> float:
    """Seconds of one update by its trace, with the head of the session.

    Args:
        case: precision of `train_step.CASES`.
        speed: of a timed model.
        gpu: that ran it.
    """
    setup = speed["setup"]
    hub_id = HUB_IDS[setup["preset"]]
    path = ROOT / (EXPERTS if "a3b" in setup["preset"] else DENSE)
    overrides = [
        *ONE_GPU,
        f"model.path={hub_id}",
        f"batch.tokens_per_microbatch={setup['tokens_per_microbatch']}",
        f"parallel.recompute.granularity={setup['recompute']}",
        f"precision={json.dumps(train_step.CASES[case])}",
    ]
    response = round(speed["tokens"] / setup["samples"]) - setup["prompt"]
    few = TraceRequest(
        config=str(path),
        overrides=overrides,
        num_layers=2,
        prompt_tokens=setup["prompt"],
        response_tokens=response,
        num_groups=setup["samples"] // GROUP,
        group_size=GROUP,
        updates=1,
    )
    loaded = load_config(path, overrides)
    layout = Layout(world_size=1)
    smaller, larger = trace_ranks(loaded, [few, replace(few, num_layers=4)])
    estimate = extrapolate(0, setup["layers"], few, (smaller, larger), layout)

    vocabulary = read_spec(need_config(hub_id, "benchmark")).vocab_size
    head_bytes: int = HEAD_BYTES * setup["samples"] * response * vocabulary
    bandwidth = gpu.memory_gb_s * 1e9 * constants.KERNEL_BANDWIDTH_FRAC.value
    seconds = update_seconds(loaded.config, layout, gpu, estimate)
    return seconds.total + head_bytes / bandwidth


def main() -> int:
    results = json.loads(Path(sys.argv[1]).read_text())
    wanted = sys.argv[2:]
    print(f"{'model':<34} {'measured':>8} {'plan':>6} {'error':>6} {'trace':>6} {'error':>6}")
    for name, result in results.items():
        for case, row in result.get("rows", {}).items():
            if "tokens_per_s" not in row.get("speed", {}):
                continue
            setup = result["setup"]
            model = f"{setup['preset']} {setup['recompute']} {case}"
            if "sweep" not in name or (wanted and model not in wanted):
                continue
            speed = row["speed"] | {"setup": setup}
            gpu = next(each for each in GPUS if each in result["machine"]["gpu"].lower())
            config = fit_constants.config_of(setup, case, gpu)
            spec = read_spec(need_config(HUB_IDS[setup["preset"]], "benchmark"))
            spec = replace(spec, num_layers=setup["layers"])

            measured_s = statistics.median(speed["step_s"])
            planned_s = fit_constants.planned_seconds(config, spec, speed, gpu)
            traced_s = traced_seconds(case, speed, GPUS[gpu])
            planned = f"{planned_s:>6.2f} {planned_s / measured_s - 1:>+6.0%}"
            traced = f"{traced_s:>6.2f} {traced_s / measured_s - 1:>+6.0%}"
            print(f"{model:<34} {measured_s:>8.2f} {planned} {traced}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
