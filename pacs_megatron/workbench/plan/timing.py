"""Computes FLOPs and expected seconds of a step's phases (rollout, score pass, update, sync).

Does not import torch.

FLOPs follow Megatron's formula: two per multiply-add, attention scores counted in full rows but
halved for causality. Seconds come from the FLOPs and the constants' assumed efficiencies; they are
estimates, not measurements.
"""

import math
from dataclasses import dataclass

from pacs_megatron.config.checks import max_response_tokens, max_sequence_tokens
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.contracts.layout import Layout
from pacs_megatron.models import ModelSpec
from pacs_megatron.objectives.ppo import PpoOptions
from pacs_megatron.objectives.registry import build_objective, passes_of
from pacs_megatron.workbench.plan import constants
from pacs_megatron.workbench.plan.constants import Constant, Gpu
from pacs_megatron.workbench.plan.memory import (
    StageMemory,
    kv_bytes_per_token,
    kv_cache_bytes,
    most_offloaded_bytes,
    num_parameters,
    sampler_weight_bytes,
    servers_per_feeder,
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Assumed mean lengths in tokens."""

    prompt: float
    response: float

    @property
    def total(self) -> float:
        return self.prompt + self.response


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


def mean_lengths(config: RunConfig) -> Lengths:
    """Mean lengths for the plan, as assumed shares of the limits."""
    prompt = config.data.max_prompt_tokens * constants.MEAN_PROMPT_FRAC.value
    return Lengths(prompt, max_response_tokens(config) * constants.MEAN_RESPONSE_FRAC.value)


def active_matrix_parameters(spec: ModelSpec) -> int:
    """Elements of the layers' matrices that one token uses (top_k experts), without embeddings."""
    queries = spec.num_heads * spec.head_dim
    keys = spec.num_kv_heads * spec.head_dim
    attention = spec.hidden_size * (2 * queries + 2 * keys)
    mlp = 3 * spec.hidden_size * spec.ffn_size
    if spec.moe is not None:
        mlp = spec.hidden_size * (
            spec.moe.top_k * 3 * spec.moe.expert_ffn_size + spec.moe.num_experts
        )
    return spec.num_layers * (attention + mlp)


def forward_flops(
    spec: ModelSpec, num_tokens: float, mean_length: float, num_outputs: float
) -> float:
    """FLOPs of one forward pass over `num_tokens` in sequences of `mean_length`, with `num_outputs`
    log-probs.
    """
    matrices = 2 * active_matrix_parameters(spec) * num_tokens
    # Scores and their product with the values: 2 * 2 * s * heads * head_dim per token, half of it
    # masked.
    attention = 2 * mean_length * spec.num_heads * spec.head_dim * spec.num_layers * num_tokens
    head = 2 * spec.hidden_size * spec.vocab_size * num_outputs
    return matrices + attention + head


def recomputed_flops(config: RunConfig, spec: ModelSpec, lengths: Lengths) -> tuple[float, float]:
    """Share of a forward pass that the backward pass computes again: (layers, output layer)."""
    whole = forward_flops(spec, lengths.total, lengths.total, lengths.response)
    head = whole - forward_flops(spec, lengths.total, lengths.total, 0)
    recompute = config.parallel.recompute
    layers = 0.0
    matrices = 2 * active_matrix_parameters(spec) * lengths.total
    attention = spec.num_heads * spec.head_dim
    if recompute.granularity == "full":
        layers = whole - head
    elif recompute.granularity == "selective":
        queries_keys = (
            2 * spec.hidden_size * (2 * attention + 2 * spec.num_kv_heads * spec.head_dim)
        )
        in_mlp = matrices - queries_keys * spec.num_layers * lengths.total
        layers += in_mlp if {"mlp", "moe"} & set(recompute.modules) else 0.0
        layers += whole - head - matrices if "core_attn" in recompute.modules else 0.0
    # If a token's coefficient depends on this forward, the output layer's gradient needs the
    # complete forward pass.
    updates = range(config.batch.num_updates)
    objective = build_objective(config.objective, updates_per_step=len(updates))
    is_together = keeps_groups_together(config, lengths)
    is_coupled = objective.coupling == "sample" or (objective.coupling == "group" and is_together)
    waiting = sum(is_coupled and bool(objective.statistics(update)) for update in updates)
    return layers / whole, head / whole * waiting / len(updates)


def num_forward_passes(config: RunConfig, *, groups_together: bool) -> int:
    """Forward-only passes over a mini-batch (score and log-prob passes), summed over a step's
    updates.
    """
    batch = config.batch
    objective = build_objective(config.objective, updates_per_step=batch.num_updates)
    has_scores = objective.coupling == "minibatch" or (
        objective.coupling == "group" and not groups_together
    )
    before = sum(
        len(passes_of(objective, batch.updates_of(part))) for part in range(batch.updates_per_step)
    )
    return before + sum(
        bool(has_scores and objective.statistics(update)) for update in range(batch.num_updates)
    )


def keeps_groups_together(config: RunConfig, lengths: Lengths) -> bool:
    """Whether groups fit one micro-batch at the mean length, so no update needs a score pass."""
    batch = config.batch
    return (
        batch.groups != "apart"
        and batch.samples_per_prompt * lengths.total <= batch.tokens_per_microbatch
    )


def group_tokens(config: RunConfig, lengths: Lengths) -> tuple[int, int] | None:
    """Tokens of a group: on average, and at most. None where no update depends on a group's scores."""
    together, apart = (num_forward_passes(config, groups_together=kept) for kept in (True, False))
    if config.batch.groups == "apart" or together == apart:
        return None
    samples = config.batch.samples_per_prompt
    return math.ceil(samples * lengths.total), samples * max_sequence_tokens(config)


def train_seconds(
    config: RunConfig, layout: Layout, gpu: Gpu, flops: float, lengths: Lengths, mfu: Constant
) -> float:
    """Seconds that all GPUs need for `flops` FLOPs, with pipeline bubble, TP and CP losses."""
    efficiency = mfu.value
    for ways, loss in ((layout.tp, constants.TP_LOSS), (layout.cp, constants.CP_LOSS)):
        efficiency *= (1 - loss.value) ** (ways.bit_length() - 1)
    if config.precision.fp8 is not None:
        efficiency *= constants.FP8_SPEEDUP.value
    seconds = flops / (layout.world_size * gpu.bf16_tflops * 1e12 * efficiency)
    return seconds * (1 + bubble(config, layout, lengths))


def bubble(config: RunConfig, layout: Layout, lengths: Lengths) -> float:
    """Idle time of the pipeline over its working time:

    (pp - 1) / (micro-batches of a rank in an update * vpp).
    """
    batch = config.batch
    samples = batch.prompts_per_step * batch.samples_per_prompt / batch.updates_per_step
    num_microbatches = max(
        1, round(samples * lengths.total / layout.dp / batch.tokens_per_microbatch)
    )
    return (layout.pp - 1) / (num_microbatches * (layout.vpp or 1))


def step_phases(
    config: RunConfig,
    spec: ModelSpec,
    layout: Layout,
    gpu: Gpu,
    sampling: StageMemory | None,
    lengths: Lengths,
) -> list[Phase]:
    """Rollout, forward-only passes, updates and weight sync of one step."""
    samples = config.batch.prompts_per_step * config.batch.samples_per_prompt
    forward = forward_flops(
        spec, samples * lengths.total, lengths.total, samples * lengths.response
    )
    phases = []
    if config.rollout.is_sampled:
        phases.append(_rollout(config, spec, layout, gpu, sampling, lengths))
    passes = num_forward_passes(config, groups_together=keeps_groups_together(config, lengths))
    if passes:
        flops = forward * passes / config.batch.updates_per_step
        seconds = train_seconds(config, layout, gpu, flops, lengths, constants.FORWARD_MFU)
        note = f"{passes} passes over a mini-batch"
        phases.append(
            Phase(
                "score and log-prob passes", seconds, flops, note, _inverse(constants.FORWARD_MFU)
            )
        )
    of_critic = 0.0
    if isinstance(config.objective, PpoOptions):
        of_critic = forward_flops(spec, samples * lengths.total, lengths.total, 0)
    layers, head = recomputed_flops(config, spec, lengths)
    epoch = 3 * (forward + of_critic)
    epochs = config.batch.epochs
    whole = epoch + (forward + of_critic) * layers + forward * head
    seconds = train_seconds(config, layout, gpu, whole * epochs, lengths, constants.TRAIN_MFU)
    note = (
        f"{config.batch.num_updates} updates{' of both models' if of_critic else ''}, bubble "
        f"{bubble(config, layout, lengths):.0%}, of the time "
        f"{(forward + of_critic) * layers / whole:.0%} recomputes layers, "
        f"{forward * head / whole:.0%} logits"
    )
    phases.append(Phase("updates", seconds, epoch * epochs, note, _inverse(constants.TRAIN_MFU)))
    if config.policy.offload != "none":
        moved = most_offloaded_bytes(config, spec, layout)
        seconds = 2 * moved / (constants.HOST_GB_S.value * 1e9)
        note = f"{moved / 1e9:.1f} GB a rank to host memory and back"
        phases.append(Phase("off-load", seconds, 0.0, note, _inverse(constants.HOST_GB_S)))
    if config.rollout.sglang is not None:
        phases.append(_sync(config, spec, layout, gpu))
    return phases


def _inverse(rate: Constant) -> tuple[float, float]:
    """Range of a time that is inverse to `rate`."""
    return rate.value / rate.high, rate.value / rate.low


def _rollout(
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
    samples = config.batch.prompts_per_step * config.batch.samples_per_prompt
    servers = config.rollout.managed_servers
    rollout = config.rollout.sglang
    embedded = config.rollout.embedded
    replicas, tp = (layout.world_size, 1) if servers is None else (servers.count, servers.tp)
    if sampling is None:
        return Phase("rollout", 0.0, 0.0, "attached servers: not estimated")
    per_token = kv_bytes_per_token(spec, tp)
    mean = lengths.prompt + lengths.response / 2
    limit = math.inf if rollout is None else rollout.max_in_flight
    limit = limit if embedded is None else embedded.batch_sequences
    concurrent = max(
        1.0, min(kv_cache_bytes(sampling) / (per_token * mean), limit, samples / replicas)
    )
    weights = (
        4 * num_parameters(spec) if rollout is None else sampler_weight_bytes(rollout, spec)
    ) / tp
    if spec.moe is not None:  # few sequences read few experts; many read all
        weights *= min(1.0, concurrent * spec.moe.top_k / spec.moe.num_experts)
    step = _decode_step(spec, gpu, tp, weights + per_token * concurrent * mean, concurrent, lengths)
    tokens = samples * lengths.response / replicas
    steady = tokens / concurrent * step
    few = _decode_step(spec, gpu, tp, weights + per_token * 8 * mean, 8, lengths)
    tail = max(0.0, max_response_tokens(config) - lengths.response) * few / 2
    prefill = forward_flops(spec, config.batch.prompts_per_step * lengths.prompt, lengths.prompt, 0)
    seconds = (
        steady
        + tail
        + prefill / (replicas * tp * gpu.bf16_tflops * 1e12 * constants.FORWARD_MFU.value)
    )
    rate = samples * lengths.response / seconds / (replicas * tp)
    flops = (
        forward_flops(spec, samples * lengths.response, lengths.total, samples * lengths.response)
        + prefill
    )
    note = f"{replicas} samplers x {concurrent:.0f} sequences, {rate:,.0f} tokens/s a GPU"
    return Phase("rollout", seconds, flops, note, _inverse(constants.DECODE_BANDWIDTH_FRAC))


def _decode_step(
    spec: ModelSpec, gpu: Gpu, tp: int, read: float, concurrent: float, lengths: Lengths
) -> float:
    """Seconds of one decoding step of `concurrent` sequences that reads `read` bytes of weights and
    cache on each GPU.
    """
    by_bandwidth = read / (gpu.memory_gb_s * 1e9 * constants.DECODE_BANDWIDTH_FRAC.value)
    flops = forward_flops(spec, concurrent, lengths.total, concurrent) / tp
    by_compute = flops / (gpu.bf16_tflops * 1e12 * constants.DECODE_MFU.value)
    return max(by_bandwidth, by_compute) + constants.DECODE_OVERHEAD_S.value


def _sync(config: RunConfig, spec: ModelSpec, layout: Layout, gpu: Gpu) -> Phase:
    rollout = config.rollout.sglang
    assert rollout is not None
    num_bytes = sampler_weight_bytes(rollout, spec)
    transport = rollout.sync.transport
    note = f"{num_bytes / 1e9:.1f} GB"
    if transport == "disk":
        seconds = 2 * num_bytes / (constants.DISK_GB_S.value * 1e9)
        rate = constants.DISK_GB_S
    else:
        link = gpu.nvlink_gb_s if transport == "ipc" else constants.NETWORK_GB_S.value
        copies = servers_per_feeder(config, layout)
        seconds = copies * num_bytes / (link * 1e9 * constants.SYNC_FRAC.value)
        rate = constants.SYNC_FRAC
        note += f", {copies} on the fullest link" if transport == "broadcast" else ""
    return Phase(f"weight sync ({transport})", seconds, 0.0, note, _inverse(rate))
