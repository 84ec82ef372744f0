"""FLOPs and expected seconds of a step's phases (rollout, score pass, update, sync), for `plan`.
Does not import torch.

FLOPs follow Megatron-LM's `num_floating_point_operations`: two per multiply-add, attention scores
counted in full rows but halved for causality. A test compares them with torch's counter. Seconds
come from the FLOPs and the constants' efficiencies, of which those of training are fitted to
published throughputs (docs/performance.md); they are estimates, not measurements.
"""

import math
from dataclasses import dataclass, replace

from pacs_megatron.config.checks import max_sequence_tokens
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.contracts.layout import Layout
from pacs_megatron.models import ModelSpec
from pacs_megatron.models import flops as model_flops
from pacs_megatron.objectives.ppo import PpoOptions
from pacs_megatron.objectives.registry import build_objective, passes_of
from pacs_megatron.runtime.gpus import Gpu
from pacs_megatron.workbench.plan import constants
from pacs_megatron.workbench.plan.collectives import data_parallel_sums, export_seconds
from pacs_megatron.workbench.plan.constants import Constant
from pacs_megatron.workbench.plan.lengths import Lengths
from pacs_megatron.workbench.plan.memory import (
    StageMemory,
    kv_bytes_per_token,
    kv_cache_bytes,
    most_extra_samples,
    sampler_weight_bytes,
    servers_per_feeder,
)
from pacs_megatron.workbench.plan.state import (
    WIDTH,
    most_offloaded_bytes,
    num_parameters,
    trained_elements,
)

_GB = 1e9
_TAIL_SEQUENCES = 8
"""Concurrent sequences of one sampler while it waits for the longest responses"""


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a step."""

    name: str
    seconds: float
    flops: float
    """Model FLOPs of the whole job; 0 for a phase that only moves bytes."""
    note: str = ""
    span: tuple[float, float] = (1.0, 1.0)
    """shortest and longest time as factors, by the range of the constant that dominates it"""

    @property
    def span_s(self) -> tuple[float, float]:
        """Shortest and longest time."""
        return self.seconds * self.span[0], self.seconds * self.span[1]


def step_phases(
    config: RunConfig,
    spec: ModelSpec,
    layout: Layout,
    gpu: Gpu,
    sampling: StageMemory | None,
    lengths: Lengths,
) -> list[Phase]:
    """The phases of one step, in their order.

    Args:
        config: the run.
        spec: the architecture.
        layout: of the trainer's ranks.
        gpu: all GPUs of the run.
        sampling: one GPU during sampling; None: external servers.
        lengths: mean lengths of the samples.

    Returns:
        Rollout, forward-only passes, updates, off-loading and weight sync, without those that the
        run does not have.
    """
    phases = []
    if config.rollout.is_sampled:
        phases.append(_rollout_phase(config, spec, layout, gpu, sampling, lengths))

    passes = num_forward_passes(config, groups_together=keeps_groups_together(config, lengths))
    if passes:
        phases.append(_forward_phase(config, spec, layout, gpu, lengths, passes))
    phases.append(_update_phase(config, spec, layout, gpu, lengths))

    if config.policy.offload != "none":
        phases.append(_offload_phase(config, spec, layout))
    if config.rollout.sglang is not None:
        phases.append(_sync_phase(config, spec, layout, gpu))
    return phases


def samples_per_step(config: RunConfig) -> int:
    return config.batch.prompts_per_step * config.batch.samples_per_prompt


def _inverse(rate: Constant) -> tuple[float, float]:
    """Range of a time that is inverse to `rate`."""
    return rate.value / rate.high, rate.value / rate.low


# ------------------------------------------------------------------------------------------- FLOPs
def active_matrix_parameters(spec: ModelSpec) -> int:
    """Elements of the layers' matrices that one token uses (top_k experts), without embeddings."""
    if spec.moe is None:
        mlp = 3 * spec.hidden_size * spec.ffn_size
    else:
        # The gate, up and down matrices of each expert, and the router.
        experts = 3 * (spec.moe.top_k * spec.moe.expert_ffn_size + spec.moe.shared_ffn_size)
        mlp = spec.hidden_size * (experts + spec.moe.num_experts)
    return model_flops.attention_parameters(spec) + spec.num_layers * mlp


def forward_flops(
    spec: ModelSpec, num_tokens: float, mean_length: float, num_outputs: float
) -> float:
    """FLOPs of one forward pass: Megatron-LM's formula and the router of experts.

    Args:
        spec: the architecture.
        num_tokens: tokens of all sequences.
        mean_length: tokens of a sequence.
        num_outputs: positions with a log-prob: only they pass the output layer.
    """
    tokens = model_flops.PassedTokens(num_tokens, num_tokens * mean_length, num_outputs)
    by_megatron = model_flops.forward_flops(spec, spec.vocab_size, tokens)
    if spec.moe is None:
        return by_megatron
    router = 2 * spec.num_layers * spec.hidden_size * spec.moe.num_experts * num_tokens
    return by_megatron + router


def recomputed_flops(config: RunConfig, spec: ModelSpec, lengths: Lengths) -> tuple[float, float]:
    """Shares of a forward pass that the backward pass computes again.

    Returns:
        The layers' share, and the output layer's.
    """
    whole = forward_flops(spec, lengths.total, lengths.total_of_token, lengths.response)
    without_head = forward_flops(spec, lengths.total, lengths.total_of_token, 0)
    head = whole - without_head
    layers = whole - head

    recompute = config.parallel.recompute
    recomputed = 0.0
    if recompute.granularity == "full":
        recomputed = layers
    elif recompute.granularity == "selective":
        matrices = 2 * active_matrix_parameters(spec) * lengths.total
        if {"mlp", "moe"} & set(recompute.modules):
            recomputed += matrices - _attention_matrix_flops(spec) * lengths.total
        if "core_attn" in recompute.modules:
            recomputed += layers - matrices

    num_updates = config.batch.num_updates
    head_frac = head / whole * _num_coupled_updates(config, lengths) / num_updates
    return recomputed / whole, head_frac


def _attention_matrix_flops(spec: ModelSpec) -> int:
    """FLOPs of one token in all layers' attention matrices, without the scores."""
    return 2 * model_flops.attention_parameters(spec)


def _num_coupled_updates(config: RunConfig, lengths: Lengths) -> int:
    """Number of a step's updates whose backward pass computes the logits again.

    If a token's coefficient depends on this forward pass, the output layer's gradient needs the
    complete forward pass (docs/decisions/0011-gradients-in-the-head.md).
    """
    updates = range(config.batch.num_updates)
    objective = build_objective(config.objective, updates_per_step=len(updates))
    is_coupled = objective.coupling == "sample"
    if objective.coupling == "group":
        is_coupled = keeps_groups_together(config, lengths)
    return sum(is_coupled and bool(objective.statistics(update)) for update in updates)


# ------------------------------------------------------------------------------------------ passes
def num_forward_passes(config: RunConfig, *, groups_together: bool) -> int:
    """Forward-only passes over a mini-batch (score and log-prob passes), summed over a step's
    updates.
    """
    batch = config.batch
    objective = build_objective(config.objective, updates_per_step=batch.num_updates)

    num_passes = 0
    for minibatch in range(batch.updates_per_step):
        num_passes += len(passes_of(objective, batch.updates_of(minibatch)))

    has_score_pass = objective.coupling == "minibatch"
    if objective.coupling == "group":
        has_score_pass = not groups_together
    if has_score_pass:
        num_passes += sum(bool(objective.statistics(update)) for update in range(batch.num_updates))
    return num_passes


def keeps_groups_together(config: RunConfig, lengths: Lengths) -> bool:
    """Whether groups fit one micro-batch at the mean length, so no update needs a score pass."""
    batch = config.batch
    mean_group_tokens = batch.samples_per_prompt * lengths.total
    return batch.groups != "apart" and mean_group_tokens <= batch.tokens_per_microbatch


def group_tokens(config: RunConfig, lengths: Lengths) -> tuple[int, int] | None:
    """Tokens of a group.

    Returns:
        On average without further samples (`admission.resample`), and at most with them; None
        where no update depends on a group's scores.
    """
    passes_together = num_forward_passes(config, groups_together=True)
    passes_apart = num_forward_passes(config, groups_together=False)
    if config.batch.groups == "apart" or passes_together == passes_apart:
        return None
    samples = config.batch.samples_per_prompt
    most_samples = samples + most_extra_samples(config)
    return math.ceil(samples * lengths.total), most_samples * max_sequence_tokens(config)


# ------------------------------------------------------------------------------------- the trainer
def linear_frac(
    spec: ModelSpec, num_tokens: float, mean_length: float, num_outputs: float
) -> float:
    """Share of `forward_flops` in the layers' linear products; the arguments are the same."""
    linear = 2 * active_matrix_parameters(spec) * num_tokens
    return linear / forward_flops(spec, num_tokens, mean_length, num_outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainWork:
    """Work of all ranks."""

    flops: float
    expert_copies: float = 0.0
    """copies of tokens that experts of all layers process, of updates; a forward pass alone counts
    as a third
    """
    fp8_frac: float = 0.0
    """share of the FLOPs in FP8: the layers' linear products; attention and the output layer stay
    in bf16
    """
    overlaps_tp: bool = False
    """whether `tp_comm_overlap` hides the exchange of tensor parallelism"""


def train_seconds(
    config: RunConfig, layout: Layout, gpu: Gpu, work: TrainWork, lengths: Lengths, mfu: Constant
) -> float:
    """Seconds that all GPUs need, with pipeline bubble, TP and CP losses, and experts' exchange.

    Args:
        config: the run.
        layout: of the trainer's ranks.
        gpu: of each rank.
        work: of all ranks.
        lengths: mean lengths of the samples.
        mfu: share of the bf16 peak that one GPU reaches without these losses.
    """
    work = replace(work, overlaps_tp=config.parallel.megatron.tp_comm_overlap)
    return busy_seconds(work, layout, gpu, mfu) * (1 + bubble(config, layout, lengths))


def busy_seconds(work: TrainWork, layout: Layout, gpu: Gpu, mfu: Constant) -> float:
    """Seconds of a rank without the pipeline's bubble.

    Args:
        work: of all ranks.
        layout: of the ranks.
        gpu: of each rank.
        mfu: share of the bf16 peak that one GPU reaches in matrix products without TP and CP.
    """
    # bit_length() - 1 is the number of doublings of an axis.
    efficiency = mfu.value
    if not work.overlaps_tp:
        efficiency *= (1 - constants.TP_LOSS.value) ** (layout.tp.bit_length() - 1)
    efficiency *= (1 - constants.CP_LOSS.value) ** (layout.cp.bit_length() - 1)

    slowness = 1 - work.fp8_frac + work.fp8_frac / constants.FP8_SPEEDUP.value
    products_s = work.flops * slowness / (gpu.bf16_flops_s * efficiency)
    return (products_s + _exchange_s(work, gpu)) / layout.world_size


def _exchange_s(work: TrainWork, gpu: Gpu) -> float:
    """Seconds of all ranks' experts beside their matrix products."""
    return work.expert_copies * constants.EXPERT_COPY_BYTES.value / (gpu.nvlink_gb_s * _GB)


def train_span(work: TrainWork, layout: Layout, gpu: Gpu, mfu: Constant) -> tuple[float, float]:
    """Shortest and longest time as factors on `busy_seconds`, by the ranges of its constants."""
    busy_s = busy_seconds(work, layout, gpu, mfu)
    exchange_frac = _exchange_s(work, gpu) / layout.world_size / busy_s
    of_products = _inverse(mfu)
    of_exchange = constants.EXPERT_COPY_BYTES.span
    low = (1 - exchange_frac) * of_products[0] + exchange_frac * of_exchange[0]
    high = (1 - exchange_frac) * of_products[1] + exchange_frac * of_exchange[1]
    return low, high


def bubble(config: RunConfig, layout: Layout, lengths: Lengths) -> float:
    """Idle time of the pipeline over its working time.

    (pp - 1) / (micro-batches of a rank in an update * vpp), of Narayanan et al., arXiv:2104.04473,
    section 2.2.
    """
    num_microbatches = _num_microbatches(config, layout, lengths)
    return (layout.pp - 1) / (num_microbatches * (layout.vpp or 1))


def _num_microbatches(config: RunConfig, layout: Layout, lengths: Lengths) -> int:
    """Micro-batches of a rank in an update."""
    batch = config.batch
    samples = batch.prompts_per_step * batch.samples_per_prompt / batch.updates_per_step
    tokens = samples * lengths.total / layout.dp
    return max(1, round(tokens / batch.tokens_per_microbatch))


def _fp8_frac(config: RunConfig, spec: ModelSpec, lengths: Lengths) -> float:
    """Share of a run's FLOPs in FP8."""
    if config.precision.fp8 is None:
        return 0.0
    return linear_frac(spec, 1.0, lengths.total_of_token, lengths.response / lengths.total)


def _step_forward_flops(config: RunConfig, spec: ModelSpec, lengths: Lengths) -> float:
    """FLOPs of one forward pass over all samples of a step, with a log-prob for each response
    token.
    """
    samples = samples_per_step(config)
    num_tokens = samples * lengths.total
    return forward_flops(spec, num_tokens, lengths.total_of_token, samples * lengths.response)


def _update_flops(config: RunConfig, spec: ModelSpec, lengths: Lengths) -> float:
    """FLOPs of forward and backward passes over all samples of a step, without recomputation.

    The gradients of a matrix product's two factors are one product each: 3 forward passes. A frozen
    matrix has the one of its input.
    """
    policy = _step_forward_flops(config, spec, lengths)
    if config.policy.lora is None:
        return 3 * policy
    samples = samples_per_step(config)
    tokens = samples * lengths.total
    products = forward_flops(spec, tokens, 0.0, samples * lengths.response)
    adapters = 2 * trained_elements(config, spec) * tokens
    return 3 * policy - products + 3 * adapters


def _step_expert_copies(config: RunConfig, spec: ModelSpec, lengths: Lengths) -> float:
    """Copies of all tokens of a step that the experts of all layers process in one pass."""
    if spec.moe is None:
        return 0.0
    return samples_per_step(config) * lengths.total * spec.num_layers * spec.moe.top_k


def _forward_phase(
    config: RunConfig, spec: ModelSpec, layout: Layout, gpu: Gpu, lengths: Lengths, num_passes: int
) -> Phase:
    """The score and log-prob passes; one is over a mini-batch."""
    mfu = constants.FORWARD_MFU
    step_flops = _step_forward_flops(config, spec, lengths)
    flops = step_flops * num_passes / config.batch.updates_per_step

    passes = num_passes / config.batch.updates_per_step
    copies = _step_expert_copies(config, spec, lengths) * passes / 3
    fp8_frac = _fp8_frac(config, spec, lengths)
    work = TrainWork(flops=flops, expert_copies=copies, fp8_frac=fp8_frac)
    seconds = train_seconds(config, layout, gpu, work, lengths, mfu)
    note = f"{num_passes} passes over a mini-batch"
    span = train_span(work, layout, gpu, mfu)
    return Phase("score and log-prob passes", seconds, flops, note, span)


def _update_phase(
    config: RunConfig, spec: ModelSpec, layout: Layout, gpu: Gpu, lengths: Lengths
) -> Phase:
    """Forward and backward passes of all updates, of the policy and the critic.

    `flops` of the phase does not count recomputation; its seconds do.
    """
    mfu = constants.TRAIN_MFU
    epochs = config.batch.epochs
    policy = _step_forward_flops(config, spec, lengths)
    critic = 0.0
    if isinstance(config.objective, PpoOptions):
        tokens = samples_per_step(config) * lengths.total
        critic = forward_flops(spec, tokens, lengths.total_of_token, 0)

    epoch = _update_flops(config, spec, lengths) + 3 * critic
    layers_frac, head_frac = recomputed_flops(config, spec, lengths)
    again_in_layers = (policy + critic) * layers_frac
    again_in_head = policy * head_frac
    executed = epoch + again_in_layers + again_in_head

    # A recomputed forward pass is a third of an update's exchange.
    copies = _step_expert_copies(config, spec, lengths) * (1 + layers_frac / 3)
    work = TrainWork(
        flops=executed * epochs,
        expert_copies=copies * epochs,
        fp8_frac=_fp8_frac(config, spec, lengths),
    )
    seconds = train_seconds(config, layout, gpu, work, lengths, mfu)

    num_updates = config.batch.num_updates
    sums = data_parallel_sums(config, spec, layout, gpu)
    microbatch_s = seconds / num_updates / _num_microbatches(config, layout, lengths)
    visible_s = num_updates * sums.visible_s(microbatch_s)
    seconds += visible_s

    both_models = " of both models" if critic else ""
    note = (
        f"{num_updates} updates{both_models}, bubble "
        f"{bubble(config, layout, lengths):.0%}, of the time "
        f"{again_in_layers / executed:.0%} recomputes layers, {again_in_head / executed:.0%} "
        f"logits; sums over replicas {num_updates * sums.seconds:.1f} s, {visible_s:.1f} s of them "
        "visible"
    )
    span = train_span(work, layout, gpu, mfu)
    return Phase("updates", seconds, epoch * epochs, note, span)


def _offload_phase(config: RunConfig, spec: ModelSpec, layout: Layout) -> Phase:
    """The trainer's state to host memory and back, once a step."""
    moved_bytes = most_offloaded_bytes(config, spec, layout)
    seconds = 2 * moved_bytes / (constants.HOST_GB_S.value * _GB)
    note = f"{moved_bytes / _GB:.1f} GB a rank to host memory and back"
    return Phase("off-load", seconds, 0.0, note, _inverse(constants.HOST_GB_S))


# ------------------------------------------------------------------------------------ the samplers
def _rollout_phase(
    config: RunConfig,
    spec: ModelSpec,
    layout: Layout,
    gpu: Gpu,
    sampling: StageMemory | None,
    lengths: Lengths,
) -> Phase:
    """The rollout phase.

    Samples run in rounds that fill the cache; the last round has low concurrency until the response
    limit.
    """
    if sampling is None:
        return Phase("rollout", 0.0, 0.0, "attached servers: not estimated")
    samples = samples_per_step(config)
    servers = config.rollout.managed_servers
    num_samplers = layout.world_size if servers is None else servers.count
    tp = 1 if servers is None else servers.tp
    num_gpus = num_samplers * tp

    # A decoding step finds half of a response's tokens on average; long responses have more steps.
    per_token = kv_bytes_per_token(spec, tp, _sampler_width(config))
    mean_context = lengths.prompt + lengths.response_of_token / 2
    fit_cache = kv_cache_bytes(sampling) / (per_token * mean_context)
    limit = _max_concurrent(config)
    concurrent = max(1.0, min(fit_cache, limit, samples / num_samplers))
    weight_bytes = _read_weight_bytes(config, spec, tp, concurrent)

    # Full rounds: every decoding step gives `concurrent` tokens.
    read_bytes = weight_bytes + per_token * concurrent * mean_context
    full_step_s = decode_step_s(spec, gpu, tp, read_bytes, concurrent, mean_context)
    tokens = samples * lengths.response / num_samplers
    steady_s = tokens / concurrent * full_step_s

    # The last round: low concurrency from the mean length to the longest, of which half counts.
    weight_bytes = _read_weight_bytes(config, spec, tp, _TAIL_SEQUENCES)
    read_bytes = weight_bytes + per_token * _TAIL_SEQUENCES * mean_context
    tail_step_s = decode_step_s(spec, gpu, tp, read_bytes, _TAIL_SEQUENCES, mean_context)
    tail_tokens = max(0.0, lengths.longest - lengths.response)
    tail_s = tail_tokens * tail_step_s / 2

    # One prefill a prompt: the samples of a prompt share its cache.
    prompt_tokens = config.batch.prompts_per_step * lengths.prompt
    prefill_flops = forward_flops(spec, prompt_tokens, lengths.prompt, 0)
    prefill_s = prefill_flops / (num_gpus * gpu.bf16_flops_s * constants.FORWARD_MFU.value)

    seconds = steady_s + tail_s + prefill_s
    response_tokens = samples * lengths.response
    decode_flops = forward_flops(spec, response_tokens, lengths.total_of_token, response_tokens)
    tokens_per_s = response_tokens / seconds / num_gpus
    note = (
        f"{num_samplers} samplers x {concurrent:.0f} sequences, {tokens_per_s:,.0f} tokens/s a GPU"
    )
    span = constants.DECODE_TIME.span
    return Phase("rollout", seconds, decode_flops + prefill_flops, note, span)


def _max_concurrent(config: RunConfig) -> float:
    """The engine's limit of concurrent sequences of one sampler."""
    if config.rollout.embedded is not None:
        return config.rollout.embedded.batch_sequences
    if config.rollout.sglang is not None:
        return config.rollout.sglang.max_in_flight
    return math.inf


def _sampler_width(config: RunConfig) -> int:
    """Bytes of an element of the sampler's weights and cache, without quantization."""
    rollout = config.rollout.embedded or config.rollout.sglang
    return 2 if rollout is None else WIDTH[rollout.dtype]


def _read_weight_bytes(config: RunConfig, spec: ModelSpec, tp: int, concurrent: float) -> float:
    """Bytes of weights that one GPU of a sampler reads in a decoding step."""
    rollout = config.rollout.sglang
    if rollout is None:
        weight_bytes = _sampler_width(config) * num_parameters(spec) / tp
    else:
        weight_bytes = sampler_weight_bytes(rollout, spec) / tp

    return weight_bytes * read_expert_frac(spec, concurrent)


def read_expert_frac(spec: ModelSpec, concurrent: float) -> float:
    """Share of the experts that a decoding step reads; 1 for a dense model.

    Few sequences read few experts, many read all.
    """
    if spec.moe is None:
        return 1.0
    unread_by_one = 1 - spec.moe.top_k / spec.moe.num_experts
    return 1 - math.pow(unread_by_one, concurrent)


def decode_step_s(
    spec: ModelSpec,
    gpu: Gpu,
    tp: int,
    read_bytes: float,
    concurrent: float,
    mean_context: float,
) -> float:
    """Seconds of one decoding step: reads, matrix products and launches, one after the other.

    Args:
        spec: the architecture.
        gpu: of the server.
        tp: tensor-parallel size of the server.
        read_bytes: weights and cache that each GPU reads.
        concurrent: sequences of the step, one token each.
        mean_context: tokens before it.
    """
    memory_s = read_bytes / (gpu.memory_gb_s * _GB * constants.DECODE_BANDWIDTH_FRAC.value)
    # `forward_flops` counts half of the scores of a causal sequence, twice as long.
    flops = forward_flops(spec, concurrent, 2 * mean_context, concurrent) / tp
    compute_s = flops / (gpu.bf16_flops_s * constants.DECODE_MFU.value)
    sequences_s = concurrent * constants.DECODE_SEQUENCE_S.value
    return memory_s + compute_s + sequences_s + constants.DECODE_OVERHEAD_S.value


def _sync_phase(config: RunConfig, spec: ModelSpec, layout: Layout, gpu: Gpu) -> Phase:
    """Weights from the trainer to all servers: every rank gathers them, packs them into buckets and
    computes their digest, and a server loads each bucket. But with `disk`, which writes a bucket
    first, the next bucket is filled meanwhile.
    """
    rollout = config.rollout.sglang
    assert rollout is not None
    num_bytes = sampler_weight_bytes(rollout, spec)
    transport = rollout.sync.transport
    note = f"{num_bytes / _GB:.1f} GB"

    if transport == "disk":
        # Written once, read once.
        sent_s = 2 * num_bytes / (constants.DISK_GB_S.value * _GB)
        rate = constants.DISK_GB_S
    else:
        link_gb_s = gpu.nvlink_gb_s if transport == "ipc" else constants.NETWORK_GB_S.value
        copies = servers_per_feeder(config, layout)
        sent_s = copies * num_bytes / (link_gb_s * _GB * constants.SYNC_FRAC.value)
        rate = constants.SYNC_FRAC
        if transport == "broadcast":
            note += f", {copies} on the fullest link"

    gathered_s = export_seconds(config, spec, layout, gpu)
    memory_gb_s = gpu.memory_gb_s * constants.COPY_FRAC.value
    copied_s = constants.SYNC_COPIES.value * num_bytes / (memory_gb_s * _GB)
    num_buckets = math.ceil(num_bytes / (rollout.sync.bucket_mib * 2**20))
    requests_s = num_buckets * constants.BUCKET_S.value

    filled = _sums(
        (gathered_s, _inverse(constants.NVLINK_FRAC)), (copied_s, constants.SYNC_COPIES.span)
    )
    loaded = _sums((sent_s, _inverse(rate)), (requests_s, constants.BUCKET_S.span))
    bounds = []
    for fill_s, load_s in zip(filled, loaded, strict=True):
        if transport == "disk":
            bounds.append(fill_s + load_s)
        else:
            # The first bucket is filled, and the last one loaded, with nothing beside it.
            bounds.append(max(fill_s, load_s) + min(fill_s, load_s) / num_buckets)
    low_s, seconds, high_s = bounds
    note += (
        f"; {gathered_s:.2f} s to gather, {copied_s:.2f} s to copy, {sent_s:.2f} s to send, "
        f"{requests_s:.2f} s for {num_buckets} requests"
    )
    span = (low_s / seconds, high_s / seconds)
    return Phase(f"weight sync ({transport})", seconds, 0.0, note, span)


def _sums(*parts: tuple[float, tuple[float, float]]) -> tuple[float, float, float]:
    """Shortest, expected and longest seconds of parts, each with its factors."""
    low_s = sum(seconds * span[0] for seconds, span in parts)
    high_s = sum(seconds * span[1] for seconds, span in parts)
    return low_s, sum(seconds for seconds, _ in parts), high_s
