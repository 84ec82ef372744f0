"""Published training throughputs beside `plan` and beside traces of the program.

    python benchmarks/published_traces.py [MODEL ...]

Needs Transformer Engine, no GPU. The rows are those of published_throughput.py. A rank of each is
traced without pipeline stages, in FP8 with one scale a tensor, with 2 and 4 layers and two
micro-batches, extrapolated to all layers, and divided by the stages. The optimizer runs once a
step, the rest once a micro-batch, and the published layout has its bubble. The recipes overlap the
collectives of tensor and context parallelism (`tp_comm_overlap`) and of data parallelism, so only
those of expert parallelism count here.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import published_throughput  # noqa: E402
from benchmarks.published_throughput import CONFIGS, Row, sequence_length  # noqa: E402
from pacs_megatron.config import load_config  # noqa: E402
from pacs_megatron.contracts.layout import Layout  # noqa: E402
from pacs_megatron.models import ModelSpec, read_spec  # noqa: E402
from pacs_megatron.runtime.gpus import GPUS  # noqa: E402
from pacs_megatron.workbench.trace.estimate import RankEstimate, extrapolate  # noqa: E402
from pacs_megatron.workbench.trace.rank import TraceRequest  # noqa: E402
from pacs_megatron.workbench.trace.runs import trace_ranks  # noqa: E402
from pacs_megatron.workbench.trace.seconds import (  # noqa: E402
    FASTEST,
    LIKELY,
    SLOWEST,
    Rates,
    kernel_seconds,
    traffic_seconds,
)

DENSE = ROOT / "configs" / "runs" / "grpo-qwen3-8b-1n8g-tp1.yaml"
EXPERTS = ROOT / "configs" / "runs" / "grpo-qwen3-30b-a3b-4n8g-ep8.yaml"
GPUS_PER_NODE = 8
LAYERS = 2
PROMPT = 16
"""tokens that do not pass the output layer"""
MICRO_BATCH = {
    ("llama3-8b", "b200", "25.09"): 2,
    ("llama3-8b", "b200", "25.11"): 2,
    ("qwen3-30b", "h100", "25.11"): 2,
}
"""sequences of a micro-batch, by model, GPU and release; 1 for all others"""
OF_MICROBATCH = "forward and backward"
OF_STEP = "optimizer"


@dataclass(frozen=True, slots=True)
class Traced:
    """Seconds of one rank's step."""

    kernels: Mapping[str, float]
    """of products, attention, memory and launches, of all micro-batches"""
    experts: float
    """collectives of expert parallelism"""
    optimizer: float
    bubble: float
    """idle time over working time"""

    @property
    def total(self) -> float:
        """Of the step."""
        busy_s = sum(self.kernels.values()) + self.experts
        return busy_s * (1 + self.bubble) + self.optimizer


def traced_rank(row: Row, spec: ModelSpec, folder: Path) -> tuple[RankEstimate, int]:
    """A rank with all layers, two micro-batches and no pipeline stages; GPUs of a node.

    Args:
        row: the published figure.
        spec: of its model.
        folder: for the model's config.json.
    """
    (folder / "config.json").write_text(json.dumps(CONFIGS[row.model]))
    world_size = row.world // row.pp
    per_node = min(GPUS_PER_NODE, world_size)
    micro_batch = micro_batch_of(row)
    length = sequence_length(spec)
    path = DENSE if spec.moe is None else EXPERTS
    overrides = [
        f"model.path={folder}",
        f"resources.nodes={world_size // per_node}",
        f"resources.gpus_per_node={per_node}",
        f"resources.gpu={row.gpu}",
        f"parallel.tp={row.tp}",
        f"parallel.cp={row.cp}",
        f"parallel.ep={row.ep}",
        f"parallel.sequence_parallel={str(row.tp > 1).lower()}",
        "parallel.recompute.granularity=none",
        "precision.fp8={recipe: tensorwise, format: hybrid}",
        f"batch.tokens_per_microbatch={micro_batch * length}",
        f"data.max_prompt_tokens={PROMPT}",
        f"rollout.sampling.max_response_tokens={length - PROMPT}",
        f"rollout.servers.count={world_size}",
        "rollout.servers.tp=1",
    ]
    layout = Layout(world_size=world_size, tp=row.tp, cp=row.cp, ep=row.ep)
    few = TraceRequest(
        config=str(path),
        overrides=overrides,
        num_layers=LAYERS,
        prompt_tokens=PROMPT,
        response_tokens=length - PROMPT,
        num_groups=layout.dp,
        group_size=2 * micro_batch,
        updates=1,
    )
    loaded = load_config(path, overrides)
    pair = trace_ranks(loaded, [few, replace(few, num_layers=2 * LAYERS)])
    estimate = extrapolate(0, spec.num_layers, few, (pair[0], pair[1]), layout)
    return estimate, per_node


def micro_batch_of(row: Row) -> int:
    """Sequences of a micro-batch."""
    return MICRO_BATCH.get((row.model, row.gpu, row.release), 1)


def traced_seconds(
    row: Row, estimate: RankEstimate, per_node: int, rates: Rates = LIKELY
) -> Traced:
    """Seconds of a published step by the trace.

    Args:
        row: the published figure.
        estimate: of the rank without pipeline stages.
        per_node: its GPUs of a node.
        rates: of kernels and links.
    """
    gpu = GPUS[row.gpu]
    replicas = row.world // (row.tp * row.cp * row.pp)
    num_microbatches = row.global_batch / replicas / micro_batch_of(row)
    # Of the traced micro-batches and layers, those of the rank's stage.
    share = num_microbatches / estimate.num_microbatches / row.pp

    by_phase: dict[str, dict[str, float]] = {}
    for phase in (OF_MICROBATCH, OF_STEP):
        work = {key: count for key, count in estimate.work.items() if key[0] == phase}
        by_phase[phase] = kernel_seconds(work, gpu, rates)
    experts_s = sum(
        traffic_seconds(traffic, per_node, gpu)
        for traffic in estimate.traffic
        if traffic.phase == OF_MICROBATCH and traffic.operation.startswith("alltoall")
    )
    return Traced(
        kernels={kind: share * seconds for kind, seconds in by_phase[OF_MICROBATCH].items()},
        experts=share * experts_s / rates.link_factor,
        optimizer=sum(by_phase[OF_STEP].values()) / row.pp,
        bubble=(row.pp - 1) / (num_microbatches * row.vpp),
    )


def main() -> int:
    """Prints the table and the median errors."""
    wanted = sys.argv[1:]
    errors: list[tuple[float, float]] = []
    estimates: dict[tuple[Row, int], tuple[RankEstimate, int]] = {}
    print("model gpu release, tokens/s a GPU: published, plan, trace, its range, seconds by kind")
    for row in published_throughput.ROWS:
        if wanted and row.model not in wanted:
            continue
        spec = read_spec(CONFIGS[row.model])
        published_s = published_throughput.published_seconds(row, spec)
        planned_s, _ = published_throughput.planned_seconds(row, spec)
        key = row._replace(release="", global_batch=0, vpp=0, published=0.0, is_fitted=False)
        if (key, micro_batch_of(row)) not in estimates:
            with tempfile.TemporaryDirectory(prefix="pacs-published-") as folder:
                estimates[key, micro_batch_of(row)] = traced_rank(row, spec, Path(folder))
        estimate, per_node = estimates[key, micro_batch_of(row)]
        traced, fastest, slowest = (
            traced_seconds(row, estimate, per_node, rates) for rates in (LIKELY, FASTEST, SLOWEST)
        )

        by_plan = published_s / planned_s
        by_trace = published_s / traced.total
        if not row.is_fitted:
            errors.append((abs(by_plan - 1), abs(by_trace - 1)))
        parts = {**traced.kernels, "experts": traced.experts, "optimizer": traced.optimizer}
        kinds = ", ".join(f"{kind} {seconds:.2f}" for kind, seconds in parts.items())
        print(
            f"{row.model:12} {row.gpu:5} {row.release}  {row.published:9,.0f} "
            f"{row.published * by_plan:6,.0f} {by_plan - 1:+6.0%} "
            f"{row.published * by_trace:6,.0f} {by_trace - 1:+6.0%}  "
            f"{row.published * published_s / slowest.total:6,.0f} to "
            f"{row.published * published_s / fastest.total:6,.0f}  "
            f"{kinds}, bubble {traced.bubble:.0%}, published {published_s:.2f}",
            flush=True,
        )
    for name, values in zip(("plan", "trace"), zip(*errors, strict=True), strict=True):
        print(
            f"held out, {name}: median {statistics.median(values):.1%}, {max(values):.1%} at most"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
