"""A step on 64 to 16,384 GPUs: the tables of docs/scale.md, which has the source of each figure.

python benchmarks/scale.py
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pacs_megatron.config import load_config
from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.workbench.plan import constants
from pacs_megatron.workbench.plan.plan import Plan, make_plan

CONFIG = Path(__file__).parents[1] / "configs" / "runs" / "pacs-qwen3-14b-2n8g-tp4.yaml"
# With servers on nodes of their own, on H100.
APART = [
    "resources.gpu=h100",
    "policy.offload=none",
    "rollout.servers.colocated=false",
    "rollout.sync.transport=broadcast",
    "batch.tokens_per_microbatch=9216",
]
SIZES = [64 * 2**doublings for doublings in range(9)]
PROMPTS_OF_64_GPUS = 1024
GPUS_PER_NODE = 8
SERVER_TP = 2
VISIBLE_LIMIT = 0.05
HIDDEN_LIMIT = 0.5
GIB = 2**30

# Measured: docs/measurements/host_path.md ("after"), math_judge.md, rewards.md.
MEASURED_TOKENS = 8192 * 4096
# Of 8,192 responses of 4,096 and of 1,024 tokens.
DRIVER_TOKEN_S = (18.8 - 6.8) / (8192 * (4096 - 1024))
DRIVER_SAMPLE_S = 6.8 / 8192 - 1024 * DRIVER_TOKEN_S
RANK_0_TOKEN_S = 0.64 / (8192 * 1024)
HOST_TOKEN_BYTES = (426 + 892) * 2**20 / MEASURED_TOKENS
MATH_WORKER_S = 29.3 / 8192
CODE_WORKER_S = 2 / 6.3
WORKERS = 16
# Computed: the columns of a sample and its id as JSON, a value and its flag, an id or a log-prob.
FACT_BYTES = 6 * 8 + 1 + 24
STATISTIC_BYTES = 2 * 8
TOKEN_BYTES = 4


class Assumed(NamedTuple):
    """Figures without a measurement of this project."""

    gloo_gb_s: float
    message_s: float
    gpu_hours_per_failure: float
    restart_s: float
    sync_frac: float
    disk_gb_s: float


LIKELY = Assumed(1.0, 2e-4, 50_700, 600, constants.SYNC_FRAC.value, constants.DISK_GB_S.value)
BEST = Assumed(3.0, 1e-4, 100_000, 300, constants.SYNC_FRAC.high, constants.DISK_GB_S.high)
WORST = Assumed(0.3, 1e-3, 25_000, 1800, constants.SYNC_FRAC.low, constants.DISK_GB_S.low)


class Size(NamedTuple):
    """A planned step: seconds of the rollout, of all the GPUs' work, of the weight sync."""

    gpus: int
    plan: Plan
    samples: int
    response_tokens: float
    rollout_s: float
    gpu_s: float
    sync_s: float


def size_of(gpus: int, prompts: int) -> Size:
    """Half of the GPUs train (data parallelism grows), half are servers."""
    nodes = gpus // 2 // GPUS_PER_NODE
    overrides = [
        *APART,
        f"resources.nodes={nodes}",
        f"resources.rollout_nodes={nodes}",
        f"rollout.servers.count={gpus // 2 // SERVER_TP}",
        f"rollout.servers.tp={SERVER_TP}",
        f"batch.prompts_per_step={prompts}",
    ]
    plan = make_plan(load_config(CONFIG, overrides))
    samples = prompts * plan.config.batch.samples_per_prompt
    seconds = {phase.name: phase.seconds for phase in plan.phases}
    sync_s = seconds.pop("weight sync (broadcast)")
    tokens = samples * plan.lengths.response
    return Size(gpus, plan, samples, tokens, seconds["rollout"], sum(seconds.values()), sync_s)


def linear_s(size: Size, _: Assumed, *, token_s: float = 0.0, sample_s: float = 0.0) -> float:
    return size.response_tokens * token_s + size.samples * sample_s


def checkpoint_s(size: Size, assumed: Assumed) -> float:
    every = size.plan.config.checkpoint.every or 1
    return size.plan.checkpoint_bytes / (assumed.disk_gb_s * 1e9) / every


def payloads_s(size: Size, assumed: Assumed) -> float:
    """Facts to all ranks, tokens to each replica, statistics between all ranks."""
    batch = size.plan.config.batch
    rounds = math.ceil(math.log2(size.plan.layout.world_size))
    facts = rounds * size.samples * FACT_BYTES
    prompt_tokens = size.samples * size.plan.lengths.prompt
    tokens = TOKEN_BYTES * (prompt_tokens + 2 * size.response_tokens)
    objective = build_objective(size.plan.config.objective, updates_per_step=batch.num_updates)
    gathers = sum(len(objective.statistics(update)) for update in range(batch.num_updates))
    messages = size.plan.layout.dp * batch.updates_per_step
    # gloo's all-reduce is a ring: each rank sends its part to the next one, twice around.
    messages += gathers * 2 * (size.plan.layout.world_size - 1)
    num_bytes = facts + tokens + gathers * 2 * statistic_bytes(size)
    return num_bytes / (assumed.gloo_gb_s * 1e9) + messages * assumed.message_s


def statistic_bytes(size: Size) -> float:
    """One statistic of a mini-batch on one rank."""
    return STATISTIC_BYTES * size.samples / size.plan.config.batch.updates_per_step


def weight_sync_s(size: Size, assumed: Assumed) -> float:
    """With another share of the link, as if all seconds of the sync depended on it."""
    return size.sync_s * constants.SYNC_FRAC.value / assumed.sync_frac


def requeue_s(size: Size, assumed: Assumed) -> float:
    """Expected loss: half of the steps between two checkpoints, the restart and the read."""
    every = size.plan.config.checkpoint.every or 1
    failures = size.gpu_s * size.gpus / (assumed.gpu_hours_per_failure * 3600)
    restart_s = assumed.restart_s + every * checkpoint_s(size, assumed)
    return failures * (every * size.gpu_s / 2 + restart_s)


class Part(NamedTuple):
    name: str
    seconds: Callable[[Size, Assumed], float]
    beside: str = ""

    def share(self, size: Size, assumed: Assumed = LIKELY) -> float:
        whole_s = size.rollout_s if self.beside == "rollout" else size.gpu_s
        return self.seconds(size, assumed) / whole_s

    def first_over(self, sizes: list[Size], assumed: Assumed) -> str:
        limit = HIDDEN_LIMIT if self.beside else VISIBLE_LIMIT
        over = [size.gpus for size in sizes if self.share(size, assumed) > limit]
        return f"{over[0]:,}" if over else "none"


DRIVER = partial(linear_s, token_s=DRIVER_TOKEN_S, sample_s=DRIVER_SAMPLE_S)
PARTS = [
    Part("driver", DRIVER, "rollout"),
    Part("verifiers: math", partial(linear_s, sample_s=MATH_WORKER_S / WORKERS), "rollout"),
    Part("verifiers: code", partial(linear_s, sample_s=CODE_WORKER_S / WORKERS), "rollout"),
    Part("checkpoint", checkpoint_s, "step"),
    Part("rank 0", partial(linear_s, token_s=RANK_0_TOKEN_S)),
    Part("gloo payloads", payloads_s),
    Part("weight sync", weight_sync_s),
    Part("requeue", requeue_s),
]


def shares_table(sizes: list[Size]) -> str:
    rows = [["GPUs", "samples", "GPUs' work, s", *[part.name for part in PARTS], "GPUs busy"]]
    for size in sizes:
        visible_s = sum(part.seconds(size, LIKELY) for part in PARTS if not part.beside)
        visible_s += max(0.0, DRIVER(size, LIKELY) - size.rollout_s)
        shares = [f"{100 * part.share(size):,.1f} %" for part in PARTS]
        busy = f"{size.gpu_s / (size.gpu_s + visible_s):.0%}"
        rows.append([f"{size.gpus:,}", f"{size.samples:,}", f"{size.gpu_s:.0f}", *shares, busy])
    return markdown(rows)


def memory_table(sizes: list[Size]) -> str:
    rows = [["GPUs", "driver and rank 0, GiB", "trainer, GiB a GPU"]]
    for size in sizes:
        stage = size.plan.stages[0]
        numbers = [size.response_tokens * HOST_TOKEN_BYTES, stage.total]
        rows.append([f"{size.gpus:,}", *[f"{number / GIB:,.1f}" for number in numbers]])
    return markdown(rows)


def limits_table(growing: list[Size], fixed: list[Size]) -> str:
    rows = [["part", "batch grows", "best, worst", "same batch", "best, worst"]]
    for part in PARTS:
        cells = [part.name]
        for sizes in (growing, fixed):
            likely, best, worst = (part.first_over(sizes, given) for given in (LIKELY, BEST, WORST))
            cells += [likely, f"{best}, {worst}"]
        rows.append(cells)
    return markdown(rows)


def markdown(rows: list[list[str]]) -> str:
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def tables() -> list[str]:
    """The tables of docs/scale.md, in its order."""
    growing = [size_of(gpus, PROMPTS_OF_64_GPUS * gpus // SIZES[0]) for gpus in SIZES]
    fixed = [size_of(gpus, PROMPTS_OF_64_GPUS) for gpus in SIZES]
    shares = [shares_table(growing), shares_table(fixed)]
    return [*shares, memory_table(growing), limits_table(growing, fixed)]


if __name__ == "__main__":
    print("\n\n".join(tables()))
