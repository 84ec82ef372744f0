"""Computes the bytes on one GPU by pipeline stage and phase, for `plan`. Does not import torch.

Parameters, gradients and optimizer state come from the weight table and are exact (a test compares
them with the tensors of a live Megatron model). Activations follow the layers' saved tensors. All
other numbers are constants with a source.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from pacs_megatron.config.checks import max_sequence_tokens
from pacs_megatron.config.rollout_options import SglangRollout
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.contracts.layout import Layout, logits_per_chunk
from pacs_megatron.models import ModelSpec, weight_table
from pacs_megatron.models.table import WeightTable
from pacs_megatron.objectives.ppo import PpoOptions
from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.runtime.files import GIB
from pacs_megatron.workbench.plan import constants

_KV_CACHE = "KV cache"
WIDTH = {"bf16": 2, "fp32": 4}
"""Bytes of an element."""


@cache
def table_of(spec: ModelSpec) -> WeightTable:
    """`weight_table`, cached: with experts it takes a second, and `--search` needs it hundreds of
    times.
    """
    return weight_table(spec)


@cache
def num_parameters(spec: ModelSpec) -> int:
    """Exact count of the Hugging Face checkpoint's parameters."""
    return table_of(spec).num_parameters


def megatron_elements(spec: ModelSpec) -> int:
    """Elements of the whole model in Megatron's form, padded vocabulary included."""
    return sum(math.prod(entry.megatron_shape) for entry in table_of(spec).entries)


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the memory table."""

    name: str
    num_bytes: float
    source: str
    """`exact`, `computed` (from shapes), or the source of its constants."""
    span: tuple[float, float] = (1.0, 1.0)
    """lowest and highest value as factors, by the range of an assumed constant"""


def _assumed(name: str, constant: constants.Constant, factor: float = 1.0) -> Item:
    return Item(name, constant.value * factor, constant.source, constant.span)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One pipeline stage in one phase."""

    phase: str
    """`train` or `rollout`"""
    stage: int
    items: tuple[Item, ...]

    @property
    def total(self) -> float:
        return sum(item.num_bytes for item in self.items)

    @property
    def span(self) -> tuple[float, float]:
        """Lowest and highest total, by the ranges of the assumed constants."""
        low, high = (sum(item.num_bytes * item.span[end] for item in self.items) for end in (0, 1))
        return low, high


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Elements of one rank's tensors on one pipeline stage; experts have separate shards and
    reductions.
    """

    dense: tuple[int, ...]
    experts: tuple[int, ...]
    shared_embedding: int = 0
    """Elements of a tied embedding that is also on another stage: it gets a separate bucket."""

    @property
    def total(self) -> int:
        return sum(self.dense) + sum(self.experts) + self.shared_embedding


def layers_of_stage(num_layers: int, layout: Layout, stage: int) -> list[int]:
    """Global numbers of a stage's layers; with virtual stages, chunk after chunk."""
    chunks = layout.vpp or 1
    size = num_layers // (layout.pp * chunks)
    starts = [(chunk * layout.pp + stage) * size for chunk in range(chunks)]
    return [layer for start in starts for layer in range(start, start + size)]


@lru_cache(maxsize=4096)
def rank_parameters(spec: ModelSpec, layout: Layout, stage: int) -> RankParameters:
    """Sizes of all tensors of one rank of `stage`."""
    mine = set(layers_of_stage(spec.num_layers, layout, stage))
    first = stage == 0
    last = stage == layout.pp - 1
    split_tied = spec.tied and layout.pp > 1
    dense = []
    experts = []
    shared = 0
    for entry in table_of(spec).entries:
        size = math.prod(entry.shard_shape(layout.tp if entry.expert is None else layout.expert_tp))
        if entry.place == "embedding" and split_tied:
            shared = size if first or last else 0
        elif entry.place == "layer" and entry.expert is not None:
            assert spec.moe is not None
            if entry.layer in mine and entry.expert < spec.moe.num_experts // layout.ep:
                experts.append(size)
        elif {"embedding": first, "layer": entry.layer in mine}.get(entry.place, last):
            dense.append(size)
    return RankParameters(tuple(dense), tuple(experts), shared)


def buffer_elements(
    parameters: RankParameters, layout: Layout, *, distributed_optimizer: bool
) -> tuple[int, int]:
    """Elements of the gradient buffers (dense, experts), with the distributed optimizer's padding."""
    if not distributed_optimizer:
        return sum(parameters.dense) + parameters.shared_embedding, sum(parameters.experts)
    dense_ranks = layout.dp * layout.cp
    dense = _pad_bucket(parameters.dense, dense_ranks) + _pad_bucket(
        [parameters.shared_embedding], dense_ranks
    )
    return dense, _pad_bucket(parameters.experts, expert_replicas(layout))


def expert_replicas(layout: Layout) -> int:
    """Number of ranks with the same experts of a stage."""
    return layout.world_size // (layout.pp * layout.expert_tp * layout.ep)


def _pad_bucket(sizes: Sequence[int], num_ranks: int) -> int:
    # Megatron aligns the start of each parameter to 64 elements and the end of a bucket to
    # lcm(ranks, 128).
    return _pad(sum(_pad(size, 64) for size in sizes), math.lcm(num_ranks, 128))


def _pad(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def trained_models(config: RunConfig, spec: ModelSpec) -> dict[str, ModelSpec]:
    """Suffix of its names -> architecture, of the policy and of the critic, if the objective has
    one.
    """
    return {"": spec} | (
        {" of the critic": spec.critic()} if isinstance(config.objective, PpoOptions) else {}
    )


def state_items(config: RunConfig, spec: ModelSpec, layout: Layout, stage: int) -> list[Item]:
    """Parameters, gradients and optimizer state of one rank, which exist for the whole run."""
    return [
        replace(item, name=item.name + suffix)
        for suffix, own in trained_models(config, spec).items()
        for item in _state_items(config, own, layout, stage)
    ]


def _state_items(config: RunConfig, spec: ModelSpec, layout: Layout, stage: int) -> list[Item]:
    parameters = rank_parameters(spec, layout, stage)
    distributed = config.parallel.distributed_optimizer
    dense, experts = buffer_elements(parameters, layout, distributed_optimizer=distributed)
    width = WIDTH[config.precision.dtype]
    # With the distributed optimizer the parameters are views of buffers with the gradients' shape.
    held = dense + experts if distributed else parameters.total
    shares = (layout.dp * layout.cp, expert_replicas(layout)) if distributed else (1, 1)
    owned = dense // shares[0] + experts // shares[1]
    items = [
        Item(f"weights ({config.precision.dtype})", held * width, "exact"),
        Item("gradients (fp32)", (dense + experts) * 4, "exact"),
    ]
    options = config.parallel.megatron
    kept = owned * (1 - options.optimizer_offload_fraction * options.optimizer_cpu_offload)
    moments = [options.exp_avg_dtype, options.exp_avg_sq_dtype]
    name = f"Adam moments ({', '.join(sorted({*moments}))})"
    items.append(Item(name, kept * sum(WIDTH[kind] for kind in moments), "exact"))
    if width == 2:
        items.append(Item("master weights (fp32)", kept * 4, "exact"))
    if options.tp_comm_overlap:
        tokens = config.batch.tokens_per_microbatch / layout.cp
        items.append(
            Item("buffers of tp_comm_overlap", 12 * 2 * tokens * spec.hidden_size, "exact")
        )
    if config.precision.fp8 is not None:
        items.append(
            _assumed(
                "FP8 copies of the weights", constants.FP8_WEIGHT_COPIES_BYTES, parameters.total
            )
        )
    return items


def host_state_bytes(config: RunConfig, spec: ModelSpec, layout: Layout) -> float:
    """Host memory of one rank of GPUs: of `optimizer_cpu_offload` (weights, gradients and moments
    in fp32), and of a save (fp32 weights, moments and weights that this rank writes, and its frozen
    reference).
    """
    width = WIDTH[config.precision.dtype]
    options = config.parallel.megatron
    shares = []
    saved = []
    for stage in range(layout.pp):
        parameters = [
            rank_parameters(own, layout, stage) for own in trained_models(config, spec).values()
        ]
        buffers = [buffer_elements(own, layout, distributed_optimizer=True) for own in parameters]
        shares.append(
            sum(
                dense // (layout.dp * layout.cp) + cut // expert_replicas(layout)
                for dense, cut in buffers
            )
        )
        reference = parameters[0].total * width if needs_reference_snapshot(config) else 0
        saved.append(shares[-1] * (12 + width) + reference)
    return 16 * max(
        shares
    ) * options.optimizer_offload_fraction * options.optimizer_cpu_offload + max(saved)


_OFFLOADED = {"none": (), "optimizer": ("Adam", "master"), "all": ("Adam", "master", "weights")}


def offloaded_bytes(config: RunConfig, items: Sequence[Item]) -> float:
    """Bytes of these state items that are in host memory while colocated servers sample
    (`policy.offload`).
    """
    return sum(
        item.num_bytes for item in items if item.name.startswith(_OFFLOADED[config.policy.offload])
    )


def most_offloaded_bytes(config: RunConfig, spec: ModelSpec, layout: Layout) -> float:
    """`offloaded_bytes` of the stage with the most: host memory of one rank."""
    return max(
        offloaded_bytes(config, state_items(config, spec, layout, stage))
        for stage in range(layout.pp)
    )


# ----------------------------------------------------------------------------------------------------------
# activations
def layer_activation_bytes(
    config: RunConfig, spec: ModelSpec, *, recomputed: Collection[str] = ()
) -> float:
    """Bytes that one layer saves for the backward pass, per token of the micro-batch on this rank.

    `recomputed`: modules of `parallel.recompute` that save their input only, which another module
    saves too. Transformer Engine's layer saves the inputs of both norms and of the following linear
    layers; queries and keys before their norm and after the rotation; values, attention output and
    its log-sum-exp; both halves of the gated MLP and their product.
    """
    tp = config.parallel.tp
    sequence = tp if config.parallel.sequence_parallel else 1
    width = WIDTH[config.precision.dtype]
    queries = spec.num_heads * spec.head_dim
    keys = spec.num_kv_heads * spec.head_dim
    norms = (2 if "layernorm" in recomputed else 4) * spec.hidden_size / sequence
    before_norm = (queries + keys) if spec.qk_norm else 0
    attention = (before_norm + 2 * queries + 2 * keys) / tp
    mlp = 0.0 if "mlp" in recomputed else 3 * spec.ffn_size / tp
    extra = 0.0
    if spec.moe is not None:
        expert_tp = 1 if config.parallel.ep > 1 else tp
        fullest = constants.EXPERT_IMBALANCE.value if config.parallel.ep > 1 else 1.0
        halves = 2 if "moe_act" in recomputed else 3  # the product of both halves is computed again
        copy = (
            0.0
            if "moe" in recomputed
            else spec.hidden_size + halves * spec.moe.expert_ffn_size / expert_tp
        )
        mlp = expert_copies(config, spec) * copy * fullest
        # The router's logits and probabilities, fp32.
        extra = 0.0 if "moe" in recomputed else 8.0 * spec.moe.num_experts / sequence
    fp8 = 1.0 if config.precision.fp8 is None else constants.FP8_ACTIVATION_FRAC.value
    softmax = 0 if "core_attn" in recomputed else 4 * spec.num_heads / tp
    return width * (norms + attention + mlp) * fp8 + softmax + extra


def expert_copies(config: RunConfig, spec: ModelSpec) -> float:
    """Copies of tokens that a rank's experts process, per token of the micro-batch, on average over
    the ranks.

    Whole experts (ep > 1): every token of this rank's part of the sequence goes to top_k experts on
    any rank, and as many arrive. Experts sharded by tensor parallelism: every rank of the group
    processes all tokens.
    """
    assert spec.moe is not None
    parallel = config.parallel
    is_split = parallel.ep > 1 and parallel.sequence_parallel
    return spec.moe.top_k / (parallel.tp if is_split else 1)


def activation_items(config: RunConfig, spec: ModelSpec, layout: Layout, stage: int) -> list[Item]:
    """Activations at the peak of a stage: its layers for every micro-batch in flight, and the
    output layer.
    """
    tokens = config.batch.tokens_per_microbatch / layout.cp
    width = WIDTH[config.precision.dtype]
    num_layers = len(layers_of_stage(spec.num_layers, layout, stage))
    sequence = layout.tp if layout.sequence_parallel else 1
    in_flight = microbatches_in_flight(layout, stage)
    full = layer_activation_bytes(config, spec) * tokens
    recompute = config.parallel.recompute
    if recompute.granularity == "full":
        kept = width * spec.hidden_size / sequence * tokens * num_layers
        items = [
            Item("layer inputs kept (full recompute)", kept * in_flight, "computed"),
            Item("layers being recomputed", full, "computed"),
        ]
    else:
        modules = recompute.modules if recompute.granularity == "selective" else ()
        kept = layer_activation_bytes(config, spec, recomputed=modules) * tokens
        name = f"activations of {num_layers} layers x {in_flight:g} in flight"
        items = [Item(name, kept * num_layers * in_flight, "computed")]
        if modules:
            items.append(
                Item(f"parts being recomputed ({', '.join(modules)})", full - kept, "computed")
            )
    items.append(
        Item("hidden states and their gradients", 4 * width * spec.hidden_size * tokens, "computed")
    )
    items.append(
        Item(
            "tokens, labels and log-probs of a mini-batch",
            minibatch_bytes(config, layout),
            "computed",
        )
    )
    if stage == layout.pp - 1:
        head = head_bytes(config, spec, layout, tokens)
        items.append(Item("output layer: a chunk of logits and its gradients", head, "computed"))
    return items


def minibatch_bytes(config: RunConfig, layout: Layout) -> float:
    """Device bytes of a rank's share of a mini-batch, if every response reaches the limit: ids,
    positions and labels (int64, divided by cp) and, per response token, its row (int64), log-prob,
    entropy and two other log-probs (fp32).
    """
    batch = config.batch
    samples = batch.prompts_per_step * batch.samples_per_prompt / batch.updates_per_step / layout.dp
    total = max_sequence_tokens(config)
    return samples * (24 * total / layout.cp + 24 * (total - config.data.max_prompt_tokens))


def host_step_bytes(config: RunConfig) -> float:
    """Host memory of the samples on rank 0, and of the driver, if every response reaches the limit:
    ids (int32) and the sampler's log-probs (fp32) of this step and of the steps sampled ahead.
    """
    steps = 1 + config.rollout.steps_ahead
    samples = config.batch.prompts_per_step * config.batch.samples_per_prompt * steps
    total = max_sequence_tokens(config)
    return samples * (4.0 * total + 4.0 * (total - config.data.max_prompt_tokens))


def head_bytes(config: RunConfig, spec: ModelSpec, layout: Layout, tokens: float) -> float:
    """Bytes of the chunked output layer: logits and exponentials in fp32, their gradient, the
    gradients of both factors. `precision.head: bf16` also has the product's logits in bf16, `fp32`
    the hidden states in fp32.
    """
    width = WIDTH[config.precision.dtype]
    hidden_width = 4 if config.precision.head == "fp32" else width
    vocab = table_of(spec).padded_vocab // layout.tp
    gpu = constants.GPUS.get(config.resources.gpu or "")
    device_bytes = None if gpu is None else gpu.memory_gib * GIB
    rows = min(tokens, max(1, logits_per_chunk(device_bytes) // vocab))
    logits = 4 + 4 + (width if width == 4 else 2 + 2 * (config.precision.head == "bf16"))
    grad_weight = vocab * spec.hidden_size * (4 + width if tokens > rows else 2 * width)
    grad_hidden = 2 * hidden_width * spec.hidden_size * tokens
    return rows * vocab * logits + grad_weight + grad_hidden


def microbatches_in_flight(layout: Layout, stage: int) -> float:
    """Number of micro-batches whose activations a stage keeps under 1F1B, in units of the stage's
    whole layers.
    """
    if layout.pp == 1:
        return 1.0
    if layout.vpp is None:
        return float(layout.pp - stage)
    warm_up = (layout.pp - stage - 1) * 2 + (layout.vpp - 1) * layout.pp + 1
    return warm_up / layout.vpp


# ----------------------------------------------------------------------------------------------------------------
# phases
def needs_reference_snapshot(config: RunConfig) -> bool:
    """Whether a frozen copy of the weights is kept (in host memory)."""
    objective = build_objective(config.objective, updates_per_step=config.batch.num_updates)
    return "reference" in objective.logprob_passes(0)


def train_memory(config: RunConfig, spec: ModelSpec, layout: Layout, stage: int) -> StageMemory:
    """One GPU of a pipeline stage at the peak of training."""
    items = [
        *state_items(config, spec, layout, stage),
        *activation_items(config, spec, layout, stage),
    ]
    peak = sum(item.num_bytes for item in items)
    items.append(_assumed("allocator fragmentation", constants.FRAGMENTATION, peak))
    items.extend(_process_items(layout))
    if config.rollout.sglang is not None:
        sync = config.rollout.sglang.sync
        size = sync.bucket_mib * 2**20 + 2 * max(
            math.prod(entry.megatron_shape) for entry in table_of(spec).entries
        )
        items.append(Item("weight sync: a bucket and the largest tensor", size, "computed"))
        if sync.transport == "broadcast":
            groups = servers_per_feeder(config, layout)
            nccl = constants.NCCL_BYTES_PER_GROUP
            items.append(
                Item(
                    f"weight sync: NCCL, servers per rank: {groups}",
                    nccl.value * groups,
                    nccl.source,
                )
            )
        if config.rollout.sglang.servers is not None and config.rollout.sglang.servers.colocated:
            items.append(
                _assumed("SGLang server that released its memory", constants.SGLANG_RELEASED_BYTES)
            )
    return StageMemory("train", stage, tuple(items))


def _process_items(layout: Layout) -> list[Item]:
    groups = 1 + sum(size > 1 for size in (layout.tp, layout.pp, layout.cp, layout.ep, layout.dp))
    return [
        _assumed("CUDA context", constants.CUDA_CONTEXT_BYTES),
        _assumed(f"NCCL, {groups} groups", constants.NCCL_BYTES_PER_GROUP, groups),
    ]


def servers_per_feeder(config: RunConfig, layout: Layout) -> int:
    """Servers that one rank sends weights to, at most.

    `broadcast`: the ranks of one node divide them.
    """
    rollout = config.rollout.sglang
    if rollout is None or rollout.sync.transport != "broadcast":
        return 1
    count = len(rollout.urls) if rollout.servers is None else rollout.servers.count
    return math.ceil(
        count / min(layout.world_size, config.resources.gpus_per_node or layout.world_size)
    )


def kv_bytes_per_token(spec: ModelSpec, tp: int, width: int = 2) -> float:
    """Key-value cache of one token on one GPU of a server; a KV head is never split."""
    return 2 * math.ceil(spec.num_kv_heads / tp) * spec.head_dim * width * spec.num_layers


def kv_cache_bytes(rollout: StageMemory) -> float:
    """Bytes of the key-value cache in `rollout_memory`'s table."""
    return next(item.num_bytes for item in rollout.items if item.name.startswith(_KV_CACHE))


def sampler_weight_bytes(rollout: SglangRollout, spec: ModelSpec) -> float:
    """Weights of one SGLang server.

    FP8: the layers' matrices, with an fp32 scale per block of 128 x 128.
    """
    width = WIDTH[rollout.dtype]
    shapes = [(entry.place, shape) for entry in table_of(spec).entries for shape in entry.hf_shapes]
    if rollout.sync.quantize == "none":
        return sum(math.prod(shape) for _, shape in shapes) * width
    total = 0.0
    for place, shape in shapes:
        is_quantized = place == "layer" and len(shape) == 2
        scales = 4 * math.prod(-(-size // 128) for size in shape)
        total += math.prod(shape) + scales if is_quantized else math.prod(shape) * width
    return total


def rollout_memory(
    config: RunConfig, spec: ModelSpec, layout: Layout, gpu_bytes: float
) -> StageMemory | None:
    """One GPU during sampling; None if this plan's GPUs sample nothing (external servers or no
    servers).
    """
    embedded = config.rollout.embedded
    rollout = config.rollout.sglang
    if embedded is not None:
        width = WIDTH[embedded.dtype]
        longest = config.data.max_prompt_tokens + embedded.sampling.max_response_tokens
        cache = kv_bytes_per_token(spec, 1, width) * embedded.batch_sequences * longest
        trainer = sum(item.num_bytes for item in state_items(config, spec, layout, 0))
        weights: float = num_parameters(spec) * width
        items = [
            Item("trainer's weights, gradients and optimizer", trainer, "exact"),
            Item(f"sampler's weights ({embedded.dtype}), whole on every rank", weights, "exact"),
            Item(f"{_KV_CACHE} of {embedded.batch_sequences} sequences", cache, "computed"),
            *_process_items(layout),
        ]
        return StageMemory("rollout", 0, tuple(items))
    if rollout is None or rollout.servers is None:
        return None
    servers = rollout.servers
    kind = rollout.dtype if rollout.sync.quantize == "none" else rollout.sync.quantize
    weights = sampler_weight_bytes(rollout, spec) / servers.tp
    items = [Item(f"SGLang weights ({kind}), tp={servers.tp}", weights, "exact")]
    items.append(_assumed("SGLang context, graphs, activations", constants.SGLANG_OVERHEAD_BYTES))
    if servers.colocated:
        keeps_gradients = config.policy.offload == "none"  # off-loading frees them
        resident = 0.0
        for state in (state_items(config, spec, layout, stage) for stage in range(layout.pp)):
            kept = sum(
                item.num_bytes for item in state if keeps_gradients or "gradients" not in item.name
            )
            resident = max(resident, kept - offloaded_bytes(config, state))
        what = {
            "none": "weights, gradients and optimizer",
            "optimizer": "weights",
            "all": "FP8 copies",
        }
        if resident:
            items.append(Item(f"trainer's {what[config.policy.offload]}", resident, "exact"))
        items.extend(_process_items(layout))
    assumed = constants.SGLANG_MEMORY_FRAC
    fraction, source = (
        (assumed.value, assumed.source)
        if servers.mem_fraction is None
        else (servers.mem_fraction, "computed")
    )
    cache = gpu_bytes * fraction - items[0].num_bytes
    if servers.max_total_tokens is not None:
        cache = min(cache, kv_bytes_per_token(spec, servers.tp) * servers.max_total_tokens)
    items.append(Item(_KV_CACHE, max(cache, 0.0), source))
    return StageMemory("rollout", 0, tuple(items))
