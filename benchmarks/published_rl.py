"""Steps of reinforcement learning by `plan` beside published ones; nothing is fitted to them.

    python benchmarks/published_rl.py

All rows: NVIDIA-NeMo/RL, commit 06beed91, docs/about/performance-summary.md, version 0.4: GRPO on
OpenMathInstruct-2, 2,048 samples a step, four updates, responses of at most 4,096 tokens, H100,
bf16. Recomputation, memory of the servers and prompts are not published: here none, 60 % of a GPU
and 100 tokens.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.published_throughput import CONFIGS  # noqa: E402
from pacs_megatron.config import RunConfig, load_config  # noqa: E402
from pacs_megatron.config.checks import max_response_tokens  # noqa: E402
from pacs_megatron.config.layout import layout_of, ranks_to_start  # noqa: E402
from pacs_megatron.models import ModelSpec, read_spec  # noqa: E402
from pacs_megatron.runtime.gpus import GPUS  # noqa: E402
from pacs_megatron.workbench.plan import memory, timing  # noqa: E402
from pacs_megatron.workbench.plan.known_models import KNOWN_MODELS  # noqa: E402
from pacs_megatron.workbench.plan.lengths import Lengths  # noqa: E402

GPU = GPUS["h100"]
SAMPLES = 2048
PROMPT_TOKENS = 100
RUNS = ROOT / "configs" / "runs"


class Row(NamedTuple):
    """One published step."""

    model: str
    gpus: int
    is_ahead: bool
    """one step off-policy, on as many nodes of servers as of trainers"""
    tokens: float
    """of a sample, on average"""
    server_tp: int
    tp: int
    ep: int
    pp: int
    step_s: float


ROWS = [
    Row("llama3-8b", 16, False, 1060, 1, 1, 1, 2, 97.7),
    Row("qwen3-30b", 32, False, 3154, 4, 2, 8, 1, 225),
    Row("qwen3-32b", 32, False, 3206, 4, 4, 1, 4, 393),
    Row("qwen3-32b", 64, True, 3207, 4, 4, 1, 4, 215),
]
"""Of the table, models that `plan` knows, with servers of at most eight GPUs. Not 30B-A3B one step
off-policy: it is slower than on-policy there.
"""


def spec_of(row: Row) -> ModelSpec:
    if row.model == "qwen3-32b":
        return read_spec(KNOWN_MODELS["Qwen/Qwen3-32B"])
    return read_spec(CONFIGS[row.model])


def config_of(row: Row) -> RunConfig:
    nodes = row.gpus // 8
    trainers = nodes // 2 if row.is_ahead else nodes
    server_gpus = 8 * (nodes - trainers) if row.is_ahead else row.gpus
    overrides = [
        "resources.gpu=h100",
        f"resources.nodes={trainers}",
        f"batch.prompts_per_step={SAMPLES // 32}",
        "batch.samples_per_prompt=32",
        "batch.tokens_per_microbatch=9216",
        f"parallel.tp={row.tp}",
        f"parallel.sequence_parallel={str(row.tp > 1).lower()}",
        f"parallel.ep={row.ep}",
        f"parallel.pp={row.pp}",
        f"rollout.servers.count={server_gpus // row.server_tp}",
        f"rollout.servers.tp={row.server_tp}",
        "rollout.servers.mem_fraction=0.6",
        "rollout.sampling.max_response_tokens=4096",
    ]
    if row.is_ahead:
        overrides.append(f"resources.rollout_nodes={nodes - trainers}")
        return load_config(RUNS / "grpo-qwen3-32b-5n8g-tp4-ahead.yaml", overrides).config
    return load_config(RUNS / "grpo-qwen3-30b-a3b-4n8g-ep8.yaml", overrides).config


def planned_s(row: Row) -> tuple[float, float, float]:
    """Seconds of a step by `plan`, and its shortest and longest time."""
    config = config_of(row)
    spec = spec_of(row)
    layout = layout_of(config, ranks_to_start(config))
    sampling = memory.rollout_memory(config, spec, layout, GPU.memory_bytes)
    response = row.tokens - PROMPT_TOKENS
    longest = max_response_tokens(config)
    lengths = Lengths(PROMPT_TOKENS, response, longest, response_of_token=response)
    phases = timing.step_phases(config, spec, layout, GPU, sampling, lengths)

    by_name = {phase.name.split(" (")[0]: phase for phase in phases}
    names = list(by_name)
    step_s = _step_s(row, dict(zip(names, [phase.seconds for phase in phases], strict=True)))
    low_s = _step_s(row, dict(zip(names, [phase.span_s[0] for phase in phases], strict=True)))
    high_s = _step_s(row, dict(zip(names, [phase.span_s[1] for phase in phases], strict=True)))
    return step_s, low_s, high_s


def _step_s(row: Row, seconds: dict[str, float]) -> float:
    """Seconds of a step from those of its phases, by name."""
    trainer_s = sum(seconds.values()) - seconds["rollout"]
    if row.is_ahead:
        return max(seconds["rollout"] + seconds["weight sync"], trainer_s)
    return seconds["rollout"] + trainer_s


def main() -> None:
    """Prints the table."""
    print("model      GPUs  ahead  published s  plan s  range")
    for row in ROWS:
        step_s, low_s, high_s = planned_s(row)
        ahead = "yes" if row.is_ahead else "no"
        print(
            f"{row.model:10} {row.gpus:4d}  {ahead:5} {row.step_s:11.0f} {step_s:7.0f}  "
            f"{low_s:.0f} to {high_s:.0f}"
        )


if __name__ == "__main__":
    main()
