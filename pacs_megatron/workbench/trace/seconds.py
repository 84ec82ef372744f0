"""Seconds of an update from a trace: kernels by their arithmetic intensity, collectives by bytes
and link. Does not import torch.

A kernel takes as long as the slower of its FLOPs and its bytes, and at least the launch. The
gradients' sums and the weights' gathers of data parallelism overlap with a micro-batch, as in
`plan/collectives.py`; all other collectives are visible.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from pacs_megatron.config.schema import RunConfig
from pacs_megatron.contracts.layout import Layout
from pacs_megatron.runtime.gpus import Gpu
from pacs_megatron.workbench.plan import constants
from pacs_megatron.workbench.plan.collectives import DataParallelSums, link_rate
from pacs_megatron.workbench.plan.plan import Plan
from pacs_megatron.workbench.plan.timing import samples_per_step
from pacs_megatron.workbench.trace.estimate import UPDATE_PHASES, GroupTraffic, RankEstimate

IN_FP8 = " in fp8"
"""end of the name of a product with quantized factors"""
_GB = 1e9
_ATTENTION = ("attn", "attention")
"""parts of the names of attention's kernels"""


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds of kernels and links."""

    product_frac: float
    """of the bf16 peak, in matrix products"""
    attention_frac: float
    """of the bf16 peak, in attention"""
    bandwidth_frac: float
    """of the memory bandwidth"""
    fp8_speedup: float
    """of a product in FP8"""
    launch_s: float
    """least seconds of a kernel"""
    link_factor: float
    """on the rate of links"""


LIKELY = Rates(
    product_frac=constants.PRODUCT_PEAK_FRAC.value,
    attention_frac=constants.ATTENTION_PEAK_FRAC.value,
    bandwidth_frac=constants.KERNEL_BANDWIDTH_FRAC.value,
    fp8_speedup=constants.FP8_SPEEDUP.value,
    launch_s=constants.LAUNCH_S.value,
    link_factor=1.0,
)
FASTEST = Rates(
    product_frac=constants.PRODUCT_PEAK_FRAC.high,
    attention_frac=constants.ATTENTION_PEAK_FRAC.high,
    bandwidth_frac=constants.KERNEL_BANDWIDTH_FRAC.high,
    fp8_speedup=constants.FP8_SPEEDUP.high,
    launch_s=constants.LAUNCH_S.low,
    link_factor=constants.NVLINK_FRAC.span[1],
)
SLOWEST = Rates(
    product_frac=constants.PRODUCT_PEAK_FRAC.low,
    attention_frac=constants.ATTENTION_PEAK_FRAC.low,
    bandwidth_frac=constants.KERNEL_BANDWIDTH_FRAC.low,
    fp8_speedup=constants.FP8_SPEEDUP.low,
    launch_s=constants.LAUNCH_S.high,
    link_factor=constants.NVLINK_FRAC.span[0],
)


@dataclass(frozen=True, slots=True)
class UpdateSeconds:
    """One update of a rank."""

    kernels: Mapping[str, float]
    """of `products`, `attention`, `memory` (copies, sums, norms) and `launches`"""
    collectives: float
    """of tensor, context, expert and pipeline parallelism"""
    data_parallel: float
    """sums of gradients and gathers of weights"""
    visible_data_parallel: float
    bubble: float
    """idle time of the pipeline over its working time"""

    @property
    def total(self) -> float:
        """Seconds of the update."""
        busy_s = sum(self.kernels.values()) + self.collectives
        return busy_s * (1 + self.bubble) + self.visible_data_parallel


def update_seconds(
    config: RunConfig,
    layout: Layout,
    gpu: Gpu,
    estimate: RankEstimate,
    rates: Rates = LIKELY,
) -> UpdateSeconds:
    """Seconds of one update of the estimate's micro-batches.

    Args:
        config: of the run.
        layout: of its ranks.
        gpu: of each rank.
        estimate: of a rank with all of its layers.
        rates: of kernels and links.
    """
    work = {key: count for key, count in estimate.work.items() if key[0] in UPDATE_PHASES}
    kernels = kernel_seconds(work, gpu, rates)

    gradients_s = 0.0
    weights_s = 0.0
    others_s = 0.0
    for traffic in estimate.traffic:
        if traffic.phase not in UPDATE_PHASES or traffic.backend != "nccl":
            continue
        seconds = traffic_seconds(traffic, config.resources.gpus_per_node, gpu)
        seconds /= rates.link_factor
        if not traffic.group.startswith("dp"):
            others_s += seconds
        elif traffic.operation.startswith("allgather"):
            weights_s += seconds
        else:
            gradients_s += seconds

    options = config.parallel.megatron
    overlaps_gradients = options.overlap_grad_reduce is not False
    overlaps_weights = overlaps_gradients and options.overlap_param_gather is not False
    sums = DataParallelSums(gradients_s, weights_s, overlaps_gradients, overlaps_weights)
    busy_s = sum(kernels.values()) + others_s
    return UpdateSeconds(
        kernels=kernels,
        collectives=others_s,
        data_parallel=sums.seconds,
        visible_data_parallel=sums.visible_s(busy_s / estimate.num_microbatches),
        bubble=(layout.pp - 1) / (estimate.num_microbatches * (layout.vpp or 1)),
    )


def formula_seconds(plan: Plan) -> float:
    """Seconds of one micro-batch with the whole token budget, by the formulas of `plan`."""
    batch = plan.config.batch
    tokens = samples_per_step(plan.config) * plan.lengths.total * batch.epochs / plan.layout.dp
    updates_s = sum(phase.seconds for phase in plan.phases if phase.name == "updates")
    return updates_s * batch.tokens_per_microbatch / tokens


def kernel_seconds(
    work: Mapping[tuple[str, str, float, float], float], gpu: Gpu, rates: Rates = LIKELY
) -> dict[str, float]:
    """Seconds of kernels by class.

    Args:
        work: number of kernels by (phase, operation, FLOPs, bytes).
        gpu: that runs them.
        rates: of the kernels.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for (_phase, operation, flops, num_bytes), count in work.items():
        memory_s = num_bytes / (gpu.memory_gb_s * _GB * rates.bandwidth_frac)
        is_attention = any(name in operation for name in _ATTENTION)
        frac = rates.attention_frac if is_attention else rates.product_frac
        flops_s = flops / (gpu.bf16_flops_s * frac)
        if operation.endswith(IN_FP8):
            flops_s /= rates.fp8_speedup

        kind = "memory"
        if flops_s > memory_s:
            kind = "attention" if is_attention else "products"
        busy_s = max(flops_s, memory_s)
        seconds[kind] += count * busy_s
        seconds["launches"] += count * max(0.0, rates.launch_s - busy_s)
    return dict(seconds)


def traffic_seconds(traffic: GroupTraffic, gpus_per_node: int, gpu: Gpu) -> float:
    """Seconds of collectives of one kind in one group.

    Args:
        traffic: with the bytes of all of its buffers.
        gpus_per_node: of the job.
        gpu: of each rank.
    """
    num_ranks = len(traffic.ranks)
    if num_ranks < 2:
        return 0.0
    stride = traffic.ranks[1] - traffic.ranks[0]
    rate = link_rate(num_ranks, stride, gpus_per_node, gpu)
    return traffic.num_bytes * _sent_frac(traffic.operation, num_ranks) / rate


def _sent_frac(operation: str, num_ranks: int) -> float:
    """Bytes that a rank sends over the bytes of its buffers, inputs and outputs together."""
    others = num_ranks - 1
    if operation.startswith("allreduce"):  # in place: a reduce-scatter and an all-gather
        return 2 * others / num_ranks
    if operation.startswith(("allgather", "reduce_scatter")):  # a whole buffer and a shard
        return others / (num_ranks + 1)
    if operation.startswith("alltoall"):
        return others / num_ranks / 2
    return 1.0
