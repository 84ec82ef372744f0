"""Bytes on one GPU by pipeline stage and phase, and host bytes of the samples, for `plan`. Does not
import torch.

A table's items have a source each: `exact` (state.py), `computed` from shapes (activations.py and
this file), or a constant with its source (constants.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pacs_megatron.config.checks import max_sequence_tokens
from pacs_megatron.config.rollout_options import EmbeddedRollout, SglangRollout, SglangServers
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.contracts.layout import Layout
from pacs_megatron.models import ModelSpec
from pacs_megatron.models.flops import num_attention_layers
from pacs_megatron.rollout.resampling import num_extra_samples
from pacs_megatron.workbench.plan import constants
from pacs_megatron.workbench.plan.activations import activation_items
from pacs_megatron.workbench.plan.state import (
    WIDTH,
    Item,
    assumed_item,
    num_parameters,
    offloaded_bytes,
    state_items,
    table_of,
    total_bytes,
)

_KV_CACHE = "KV cache"
_RESIDENT_NAMES = {"none": "weights, gradients and optimizer", "optimizer": "weights"}
"""`policy.offload` -> the trainer's state that stays on the GPU while colocated servers sample"""
_FREED = ("gradients", "FP8 copies")
"""parts of the names of items that off-loading frees"""


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One pipeline stage in one phase."""

    phase: str
    """`train` or `rollout`"""
    stage: int
    items: tuple[Item, ...]

    @property
    def total(self) -> float:
        return total_bytes(self.items)

    @property
    def span(self) -> tuple[float, float]:
        """Lowest and highest total, by the ranges of the assumed constants."""
        low = sum(item.num_bytes * item.span[0] for item in self.items)
        high = sum(item.num_bytes * item.span[1] for item in self.items)
        return low, high


# ---------------------------------------------------------------------------------------- training
def train_memory(config: RunConfig, spec: ModelSpec, layout: Layout, stage: int) -> StageMemory:
    """One GPU of a pipeline stage at the peak of training."""
    items = [
        *state_items(config, spec, layout, stage),
        *activation_items(config, spec, layout, stage),
    ]
    items.extend(items_beside(config, spec, layout, total_bytes(items)))
    return StageMemory("train", stage, tuple(items))


def items_beside(
    config: RunConfig, spec: ModelSpec, layout: Layout, peak_bytes: float
) -> list[Item]:
    """Items that one GPU has beside the tensors of training.

    Args:
        config: the run.
        spec: the architecture.
        layout: of the ranks.
        peak_bytes: largest sum of the tensors of training.
    """
    items = [assumed_item("allocator fragmentation", constants.FRAGMENTATION, peak_bytes)]
    items.extend(_process_items(config, layout))
    if config.rollout.sglang is not None:
        items.extend(_sync_items(config, config.rollout.sglang, spec, layout))
        servers = config.rollout.sglang.servers
        if servers is not None and servers.colocated:
            released = constants.SGLANG_RELEASED_BYTES
            items.append(assumed_item("SGLang server that released its memory", released))
    return items


def _process_items(config: RunConfig, layout: Layout) -> list[Item]:
    """CUDA and NCCL of one rank: a group of all ranks, and one for each axis with several ranks.

    Empty for a run on the CPU, over gloo.
    """
    if not config.resources.gpus_per_node:
        return []
    axes = (layout.tp, layout.pp, layout.cp, layout.ep, layout.dp)
    num_groups = 1 + sum(size > 1 for size in axes)
    return [
        assumed_item("CUDA context", constants.CUDA_CONTEXT_BYTES),
        assumed_item(f"NCCL, {num_groups} groups", constants.NCCL_BYTES_PER_GROUP, num_groups),
    ]


def _sync_items(
    config: RunConfig, rollout: SglangRollout, spec: ModelSpec, layout: Layout
) -> list[Item]:
    """Weight sync: the tensors that a rank has beside its shards, and NCCL's buffers."""
    largest_tensor = max(math.prod(entry.megatron_shape) for entry in table_of(spec).entries)
    bucket_bytes = rollout.sync.bucket_mib * 2**20
    width = WIDTH[config.precision.dtype]
    tensor_bytes = 2 * bucket_bytes + width * largest_tensor
    items = [Item("weight sync: two buckets and the largest tensor", tensor_bytes, "computed")]

    if rollout.sync.transport == "broadcast" and config.resources.gpus_per_node:
        num_servers = servers_per_feeder(config, layout)
        nccl = constants.NCCL_BYTES_PER_GROUP
        name = f"weight sync: NCCL, servers per rank: {num_servers}"
        items.append(Item(name, nccl.value * num_servers, nccl.source))
    return items


def servers_per_feeder(config: RunConfig, layout: Layout) -> int:
    """Servers that one rank sends weights to, at most.

    `broadcast`: the trainer's ranks divide them.
    """
    rollout = config.rollout.sglang
    if rollout is None or rollout.sync.transport != "broadcast":
        return 1
    num_servers = len(rollout.urls) if rollout.servers is None else rollout.servers.count
    return math.ceil(num_servers / layout.world_size)


def most_extra_samples(config: RunConfig) -> int:
    """Largest number of further samples of a prompt (`admission.resample`): one without a correct
    sample.
    """
    options = config.admission.resample
    if options is None:
        return 0
    return num_extra_samples(0.0, config.batch.samples_per_prompt, options)


def most_samples_per_step(config: RunConfig) -> int:
    """Largest number of samples of a step, with those of `admission.oversample`, `refill_rounds`
    and `resample`.
    """
    admission = config.admission
    prompts = math.ceil(config.batch.prompts_per_step * admission.oversample)
    prompts *= 1 + admission.refill_rounds
    return prompts * (config.batch.samples_per_prompt + most_extra_samples(config))


def host_step_bytes(config: RunConfig) -> float:
    """Host memory of the samples on rank 0, and of the driver, if every response reaches the limit
    and admission samples as much as it may: those of this step and of the steps sampled ahead.
    """
    num_steps = 1 + config.rollout.steps_ahead
    samples = most_samples_per_step(config) * num_steps
    sequence_tokens = max_sequence_tokens(config)
    response_tokens = sequence_tokens - config.data.max_prompt_tokens

    ids_bytes = 4.0 * sequence_tokens  # int32
    logprobs_bytes = 4.0 * response_tokens  # fp32, of the sampler
    return samples * (ids_bytes + logprobs_bytes)


# ---------------------------------------------------------------------------------------- sampling
def rollout_memory(
    config: RunConfig, spec: ModelSpec, layout: Layout, gpu_bytes: float
) -> StageMemory | None:
    """One GPU during sampling.

    Args:
        config: the run.
        spec: the architecture.
        layout: of the trainer's ranks.
        gpu_bytes: memory of one GPU.

    Returns:
        None if this plan's GPUs sample nothing (external servers or no servers).
    """
    if config.rollout.embedded is not None:
        items = _embedded_items(config, config.rollout.embedded, spec, layout)
        return StageMemory("rollout", 0, tuple(items))

    rollout = config.rollout.sglang
    if rollout is None or rollout.servers is None:
        return None
    items = _server_items(rollout, rollout.servers, spec)
    if rollout.servers.colocated:
        items.extend(_trainer_items(config, spec, layout))
    items.append(_cache_item(rollout, rollout.servers, spec, gpu_bytes))
    return StageMemory("rollout", 0, tuple(items))


def _embedded_items(
    config: RunConfig, embedded: EmbeddedRollout, spec: ModelSpec, layout: Layout
) -> list[Item]:
    """The embedded engine beside the trainer's state."""
    width = WIDTH[embedded.dtype]
    trainer_bytes = total_bytes(state_items(config, spec, layout, 0))
    weight_bytes = num_parameters(spec) * width

    sequence_tokens = config.data.max_prompt_tokens + embedded.sampling.max_response_tokens
    per_token = kv_bytes_per_token(spec, 1, width)
    cache_bytes = per_token * embedded.batch_sequences * sequence_tokens
    return [
        Item("trainer's weights, gradients and optimizer", trainer_bytes, "exact"),
        Item(f"sampler's weights ({embedded.dtype}), whole on every rank", weight_bytes, "exact"),
        Item(f"{_KV_CACHE} of {embedded.batch_sequences} sequences", cache_bytes, "computed"),
        *_process_items(config, layout),
    ]


def _server_items(rollout: SglangRollout, servers: SglangServers, spec: ModelSpec) -> list[Item]:
    """One GPU of an SGLang server without its cache."""
    quantize = rollout.sync.quantize
    kind = rollout.dtype if quantize == "none" else quantize
    weight_bytes = sampler_weight_bytes(rollout, spec) / servers.tp
    return [
        Item(f"SGLang weights ({kind}), tp={servers.tp}", weight_bytes, "exact"),
        assumed_item("SGLang context, graphs, activations", constants.SGLANG_OVERHEAD_BYTES),
    ]


def _trainer_items(config: RunConfig, spec: ModelSpec, layout: Layout) -> list[Item]:
    """The memory of a trainer beside a colocated server, of the stage with the most."""
    offload = config.policy.offload
    if offload == "all":
        return _process_items(config, layout)

    resident_bytes = 0.0
    for stage in range(layout.pp):
        items = state_items(config, spec, layout, stage)
        moved_bytes = offloaded_bytes(config, items)
        if offload != "none":
            items = [item for item in items if not any(name in item.name for name in _FREED)]
        resident_bytes = max(resident_bytes, total_bytes(items) - moved_bytes)

    state = Item(f"trainer's {_RESIDENT_NAMES[offload]}", resident_bytes, "exact")
    return [state, *_process_items(config, layout)]


def _cache_item(
    rollout: SglangRollout, servers: SglangServers, spec: ModelSpec, gpu_bytes: float
) -> Item:
    """A server's key-value cache: SGLang's share of the memory without the weights, or the token
    limit if that is less.
    """
    fraction = constants.SGLANG_MEMORY_FRAC.value
    source = constants.SGLANG_MEMORY_FRAC.source
    if servers.mem_fraction is not None:
        fraction = servers.mem_fraction
        source = "computed"

    weight_bytes = sampler_weight_bytes(rollout, spec) / servers.tp
    cache_bytes = gpu_bytes * fraction - weight_bytes
    if servers.max_total_tokens is not None:
        per_token = kv_bytes_per_token(spec, servers.tp, WIDTH[rollout.dtype])
        limit_bytes = per_token * servers.max_total_tokens
        cache_bytes = min(cache_bytes, limit_bytes)
    return Item(_KV_CACHE, max(cache_bytes, 0.0), source)


def kv_bytes_per_token(spec: ModelSpec, tp: int, width: int) -> float:
    """Key-value cache of one token on one GPU of a server. The state of a gated delta net does not
    grow with tokens.

    Args:
        spec: the architecture.
        tp: tensor-parallel size of the server; a KV head is never split.
        width: bytes of an element.
    """
    heads_per_gpu = math.ceil(spec.num_kv_heads / tp)
    keys_and_values = 2 * heads_per_gpu * spec.head_dim
    return keys_and_values * width * num_attention_layers(spec)


def kv_cache_bytes(rollout: StageMemory) -> float:
    """Bytes of the key-value cache in `rollout_memory`'s table."""
    return next(item.num_bytes for item in rollout.items if item.name.startswith(_KV_CACHE))


def sampler_weight_bytes(rollout: SglangRollout, spec: ModelSpec) -> float:
    """Weights of one SGLang server.

    FP8: the layers' matrices, with an fp32 scale per block of 128 x 128.
    """
    width = WIDTH[rollout.dtype]
    is_fp8 = rollout.sync.quantize != "none"

    num_bytes = 0.0
    for entry in table_of(spec).entries:
        for shape in entry.hf_shapes:
            num_elements = math.prod(shape)
            if is_fp8 and entry.place == "layer" and len(shape) == 2:
                scale_bytes = 4 * _num_blocks(shape)
                num_bytes += num_elements + scale_bytes
            else:
                num_bytes += num_elements * width
    return num_bytes


def _num_blocks(shape: Sequence[int]) -> int:
    """Number of blocks of 128 x 128 that cover a matrix."""
    return math.prod(math.ceil(size / 128) for size in shape)
