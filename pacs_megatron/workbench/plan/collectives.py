"""Seconds of an update's data-parallel collectives, and of an export's, for `plan`. Does not import
torch.

After the last backward pass gradients are summed over data-parallel ranks, and after the optimizer
step each rank gathers the weights that the others have updated. Both overlap with a micro-batch:
the sums with its backward pass, the weights with the next forward pass.
"""

import math
from dataclasses import dataclass

from pacs_megatron.config.schema import RunConfig
from pacs_megatron.contracts.layout import Layout
from pacs_megatron.models import ModelSpec
from pacs_megatron.runtime.gpus import Gpu
from pacs_megatron.workbench.plan import constants
from pacs_megatron.workbench.plan.state import (
    WIDTH,
    buffer_elements,
    expert_replicas,
    rank_parameters,
    table_of,
    trained_models,
)

_GRADIENT_BYTES = 4
_FORWARD_SHARE = 1 / 3
"""of a micro-batch's time, without recomputation"""
_GB = 1e9


@dataclass(frozen=True, slots=True)
class DataParallelSums:
    """One update's collectives of the rank with the most parameters."""

    gradients_s: float
    weights_s: float
    overlaps_gradients: bool
    overlaps_weights: bool

    @property
    def seconds(self) -> float:
        return self.gradients_s + self.weights_s

    def visible_s(self, microbatch_s: float) -> float:
        """Seconds that no computation hides.

        Args:
            microbatch_s: forward and backward pass of one micro-batch.
        """
        backward_s = microbatch_s * (1 - _FORWARD_SHARE) if self.overlaps_gradients else 0.0
        forward_s = microbatch_s * _FORWARD_SHARE if self.overlaps_weights else 0.0
        gradients_s = max(0.0, self.gradients_s - backward_s)
        weights_s = max(0.0, self.weights_s - forward_s)
        return gradients_s + weights_s


def data_parallel_sums(
    config: RunConfig, spec: ModelSpec, layout: Layout, gpu: Gpu
) -> DataParallelSums:
    """The collectives of one update, of the policy and the critic.

    With the distributed optimizer, a reduce-scatter of fp32 gradients and an all-gather of weights.
    Without it, an all-reduce of the gradients: twice the bytes, and no weights.
    """
    is_distributed = config.parallel.distributed_optimizer
    gradients_s = 0.0
    weights_s = 0.0
    for model in trained_models(config, spec).values():
        seconds_a_byte = max(
            _seconds_a_byte(config, model, layout, gpu, stage) for stage in range(layout.pp)
        )
        copies = 1 if is_distributed else 2
        gradients_s += copies * _GRADIENT_BYTES * seconds_a_byte
        if is_distributed:
            weights_s += WIDTH[config.precision.dtype] * seconds_a_byte

    options = config.parallel.megatron
    overlaps_gradients = options.overlap_grad_reduce is not False
    overlaps_weights = overlaps_gradients and options.overlap_param_gather is not False
    return DataParallelSums(gradients_s, weights_s, overlaps_gradients, overlaps_weights)


def export_seconds(config: RunConfig, spec: ModelSpec, layout: Layout, gpu: Gpu) -> float:
    """Seconds in which every rank gets the whole weights: tensor-parallel shards, experts of other
    ranks, and other pipeline stages.
    """
    width = WIDTH[config.precision.dtype]
    gpus_per_node = config.resources.gpus_per_node
    dense = 0
    experts = 0
    for entry in table_of(spec).entries:
        size = math.prod(entry.megatron_shape) * width
        if entry.expert is None:
            dense += size
        else:
            experts += size

    ranks_of_stage = layout.world_size // layout.pp
    groups = [
        (dense / layout.pp, layout.tp, 1),
        (experts / layout.pp, layout.expert_tp, 1),
        (experts / layout.pp, layout.ep, layout.expert_tp),
        (dense + experts, layout.pp, ranks_of_stage),
    ]
    seconds = 0.0
    for num_bytes, num_ranks, stride in groups:
        received = num_bytes * (num_ranks - 1) / num_ranks
        seconds += received / link_rate(num_ranks, stride, gpus_per_node, gpu)
    return seconds


def _seconds_a_byte(
    config: RunConfig, spec: ModelSpec, layout: Layout, gpu: Gpu, stage: int
) -> float:
    """Seconds of a collective over the parameters of a stage's rank with one byte each."""
    parameters = rank_parameters(spec, layout, stage)
    dense, experts = buffer_elements(
        parameters, layout, distributed_optimizer=config.parallel.distributed_optimizer
    )
    groups = [(dense, layout.dp * layout.cp, layout.tp)]
    if experts:
        # Ranks with the same experts are expert_tp * ep apart.
        groups.append((experts, expert_replicas(layout), layout.expert_tp * layout.ep))

    seconds = 0.0
    for num_elements, num_ranks, stride in groups:
        sent = num_elements * (num_ranks - 1) / num_ranks
        rate = link_rate(num_ranks, stride, config.resources.gpus_per_node, gpu)
        seconds += sent / rate
    return seconds


def link_rate(num_ranks: int, stride: int, gpus_per_node: int, gpu: Gpu) -> float:
    """Bytes a second of a collective, by its slowest link.

    Between nodes NCCL uses the network links of all of the group's GPUs on a node.

    Args:
        num_ranks: of the group.
        stride: distance of its ranks; those between belong to other groups.
        gpus_per_node: of the job.
        gpu: of each rank.
    """
    nvlink = gpu.nvlink_gb_s * constants.NVLINK_FRAC.value
    if num_ranks * stride <= gpus_per_node:
        return nvlink * _GB
    ranks_here = max(1, gpus_per_node // stride)
    return min(nvlink, ranks_here * constants.NETWORK_GB_S.value) * _GB
