"""Bytes of one rank's weights, gradients and optimizer state, for `plan`. Does not import torch.

The sizes come from the weight table and are exact: a test compares them with the tensors of a live
Megatron model. Units are bytes, and elements where a name does not end in `bytes`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache

from pacs_megatron.config.schema import LoraOptions, RunConfig
from pacs_megatron.contracts.layout import Layout
from pacs_megatron.models import ModelSpec, weight_table
from pacs_megatron.models.lora import adapter_matrices, all_matrices
from pacs_megatron.models.table import WeightTable
from pacs_megatron.objectives.ppo import PpoOptions
from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.workbench.plan import constants

WIDTH = {"bf16": 2, "fp32": 4}
"""Bytes of an element."""
SAVED_OPTIMIZER_BYTES = 4 + 4 + 4
"""Bytes of an element in a checkpoint beside its weight: fp32 weight and two fp32 moments."""
_HOST_OPTIMIZER_BYTES = 4 + 4 + 4 + 4
"""Bytes of an element that `optimizer_cpu_offload` keeps in host memory: weight, gradient and two
moments, all in fp32.
"""
_NUM_OVERLAP_BUFFERS = 12
"""Buffers that Transformer Engine creates for `tp_comm_overlap`, bf16 [tokens, hidden] each."""
_OFFLOADED_ITEMS = {
    "none": (),
    "optimizer": ("Adam", "master"),
    "all": ("Adam", "master", "weights"),
}
"""`policy.offload` -> first words of the items that it moves to host memory"""


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the memory table."""

    name: str
    num_bytes: float
    source: str
    """`exact`, `computed` (from shapes), or the source of its constants."""
    span: tuple[float, float] = (1.0, 1.0)
    """lowest and highest value as factors, by the range of an assumed constant"""


def assumed_item(name: str, constant: constants.Constant, factor: float = 1.0) -> Item:
    """An item of `factor` times a constant, with the constant's source and range."""
    return Item(name, constant.value * factor, constant.source, constant.span)


def total_bytes(items: Sequence[Item]) -> float:
    return sum(item.num_bytes for item in items)


# ------------------------------------------------------------------------------------- whole model
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


def trained_models(config: RunConfig, spec: ModelSpec) -> dict[str, ModelSpec]:
    """The policy and, if the objective has one, the critic.

    Returns:
        Suffix of the names of the model's items -> its architecture.
    """
    models = {"": spec}
    if isinstance(config.objective, PpoOptions):
        models[" of the critic"] = spec.critic()
    return models


def trained_elements(config: RunConfig, spec: ModelSpec) -> int:
    """Elements of the whole model that are trained: all of them, or those of the adapters."""
    adapters = config.policy.lora
    if adapters is None:
        return megatron_elements(spec)
    return sum(math.prod(matrix.shape) for matrix in all_matrices(table_of(spec), adapters))


def needs_reference_snapshot(config: RunConfig) -> bool:
    """Whether a frozen copy of the trained weights is kept (in host memory).

    The reference of new adapters is the model without them, until a reset.
    """
    adapters = config.policy.lora
    is_reset = getattr(config.objective, "reset_every", None) is not None
    if adapters is not None and adapters.path is None and not is_reset:
        return False
    objective = build_objective(config.objective, updates_per_step=config.batch.num_updates)
    return "reference" in objective.logprob_passes(0)


# ----------------------------------------------------------------------------- tensors of one rank
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
    num_chunks = layout.vpp or 1
    chunk_size = num_layers // (layout.pp * num_chunks)

    layers: list[int] = []
    for chunk in range(num_chunks):
        start = (chunk * layout.pp + stage) * chunk_size
        layers.extend(range(start, start + chunk_size))
    return layers


@lru_cache(maxsize=4096)
def rank_parameters(spec: ModelSpec, layout: Layout, stage: int) -> RankParameters:
    """Sizes of all tensors of one rank of `stage`."""
    layers = set(layers_of_stage(spec.num_layers, layout, stage))
    is_first = stage == 0
    is_last = stage == layout.pp - 1
    is_shared = spec.tied and layout.pp > 1  # the first and the last stage have the embedding
    experts_per_rank = 0 if spec.moe is None else spec.moe.num_experts // layout.ep

    dense = []
    experts = []
    shared_embedding = 0
    for entry in table_of(spec).entries:
        tp = layout.tp if entry.expert is None else layout.expert_tp
        size = math.prod(entry.shard_shape(tp))

        if entry.place == "embedding":
            if is_shared and (is_first or is_last):
                shared_embedding = size
            elif is_first:
                dense.append(size)
        elif entry.place == "layer":
            if entry.layer not in layers:
                continue
            if entry.expert is None:
                dense.append(size)
            elif entry.expert < experts_per_rank:
                experts.append(size)
        elif is_last:  # the final norm and the output layer
            dense.append(size)
    return RankParameters(tuple(dense), tuple(experts), shared_embedding)


@lru_cache(maxsize=4096)
def adapter_parameters(
    spec: ModelSpec, adapters: LoraOptions, layout: Layout, stage: int
) -> RankParameters:
    """Sizes of the adapters of one rank of `stage`."""
    layers = set(layers_of_stage(spec.num_layers, layout, stage))
    sizes = []
    for entry in table_of(spec).entries:
        if entry.layer not in layers:
            continue
        for matrix in adapter_matrices(entry, adapters):
            size = math.prod(matrix.shape)
            sizes.append(size if matrix.split_dim is None else size // layout.tp)
    return RankParameters(tuple(sizes), ())


def trained_parameters(
    config: RunConfig, spec: ModelSpec, layout: Layout, stage: int
) -> RankParameters:
    """Sizes of the trained tensors of one rank of `stage`: all of them, or the adapters."""
    adapters = config.policy.lora
    if adapters is None:
        return rank_parameters(spec, layout, stage)
    return adapter_parameters(spec, adapters, layout, stage)


def buffer_elements(
    parameters: RankParameters, layout: Layout, *, distributed_optimizer: bool
) -> tuple[int, int]:
    """Elements of the gradient buffers of one rank.

    Args:
        parameters: of the rank.
        layout: of the ranks.
        distributed_optimizer: whether the buffers have its padding.

    Returns:
        Elements of the dense parameters' buffers, and of the experts'.
    """
    if not distributed_optimizer:
        return sum(parameters.dense) + parameters.shared_embedding, sum(parameters.experts)

    dense_ranks = layout.dp * layout.cp
    dense = _padded_bucket(parameters.dense, dense_ranks)
    shared_embedding = _padded_bucket([parameters.shared_embedding], dense_ranks)
    experts = _padded_bucket(parameters.experts, expert_replicas(layout))
    return dense + shared_embedding, experts


def expert_replicas(layout: Layout) -> int:
    """Number of ranks with the same experts of a stage."""
    return layout.world_size // (layout.pp * layout.expert_tp * layout.ep)


def _padded_bucket(sizes: Sequence[int], num_ranks: int) -> int:
    """Elements of a bucket with parameters of these sizes, which `num_ranks` ranks divide.

    Megatron aligns the start of each parameter to 64 elements and the end of a bucket to
    lcm(ranks, 128) (megatron/core/distributed/param_and_grad_buffer.py).
    """
    aligned = sum(_round_up(size, 64) for size in sizes)
    return _round_up(aligned, math.lcm(num_ranks, 128))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# ------------------------------------------------------------------------------------ device bytes
def state_items(config: RunConfig, spec: ModelSpec, layout: Layout, stage: int) -> list[Item]:
    """Parameters, gradients and optimizer state of one rank, which exist for the whole run.

    Args:
        config: the run.
        spec: the policy's architecture.
        layout: of the ranks.
        stage: the rank's pipeline stage.

    Returns:
        The items of the policy, then those of the critic, if the objective has one.
    """
    items = []
    for suffix, model in trained_models(config, spec).items():
        for item in _state_items(config, model, layout, stage):
            items.append(replace(item, name=item.name + suffix))
    return items


def _state_items(config: RunConfig, spec: ModelSpec, layout: Layout, stage: int) -> list[Item]:
    """The items of one model."""
    parameters = trained_parameters(config, spec, layout, stage)
    is_distributed = config.parallel.distributed_optimizer
    dense, experts = buffer_elements(parameters, layout, distributed_optimizer=is_distributed)
    width = WIDTH[config.precision.dtype]

    # With the distributed optimizer the parameters are views of buffers with the gradients' shape.
    weights = dense + experts if is_distributed else parameters.total
    items = []
    if config.policy.lora is not None:
        frozen = rank_parameters(spec, layout, stage).total
        name = f"weights, frozen ({config.precision.dtype})"
        items.append(Item(name, frozen * width, "exact"))
    items += [
        Item(f"weights ({config.precision.dtype})", weights * width, "exact"),
        Item("gradients (fp32)", (dense + experts) * 4, "exact"),
    ]

    optimized = dense + experts
    if is_distributed:
        optimized = _optimizer_share(dense, experts, layout)
    on_device = optimized * (1 - _host_optimizer_frac(config))
    items.extend(_optimizer_items(config, on_device))

    if config.parallel.megatron.tp_comm_overlap:
        tokens = config.batch.tokens_per_microbatch / layout.cp
        overlap_bytes = _NUM_OVERLAP_BUFFERS * 2 * tokens * spec.hidden_size
        items.append(Item("buffers of tp_comm_overlap", overlap_bytes, "exact"))
    if config.precision.fp8 is not None:
        copies = constants.FP8_WEIGHT_COPIES_BYTES
        items.append(assumed_item("FP8 copies of the weights", copies, parameters.total))
    return items


def _optimizer_items(config: RunConfig, num_elements: float) -> list[Item]:
    """Adam's moments and the master weights of `num_elements` elements."""
    options = config.parallel.megatron
    moment_dtypes = [options.exp_avg_dtype, options.exp_avg_sq_dtype]
    name = f"Adam moments ({', '.join(sorted(set(moment_dtypes)))})"
    moment_bytes = sum(WIDTH[dtype] for dtype in moment_dtypes)

    items = [Item(name, num_elements * moment_bytes, "exact")]
    if config.precision.dtype == "bf16":
        items.append(Item("master weights (fp32)", num_elements * 4, "exact"))
    return items


def _optimizer_share(dense: int, experts: int, layout: Layout) -> int:
    """Elements whose state one rank has under the distributed optimizer."""
    dense_share = dense // (layout.dp * layout.cp)
    expert_share = experts // expert_replicas(layout)
    return dense_share + expert_share


def _host_optimizer_frac(config: RunConfig) -> float:
    """Share of the optimizer's state that `optimizer_cpu_offload` keeps in host memory."""
    options = config.parallel.megatron
    return options.optimizer_offload_fraction if options.optimizer_cpu_offload else 0.0


# -------------------------------------------------------------------------------------- host bytes
def host_state_bytes(config: RunConfig, spec: ModelSpec, layout: Layout) -> float:
    """Host memory of one rank of GPUs, of the stage with the most.

    The sum of two parts: the state of `optimizer_cpu_offload` (weights, gradients and moments in
    fp32), and the copies of a save (fp32 weights, moments and weights that this rank writes, and
    its frozen reference).
    """
    width = WIDTH[config.precision.dtype]
    shares = []
    saved_bytes = []
    for stage in range(layout.pp):
        parameters_of_models = [
            trained_parameters(config, model, layout, stage)
            for model in trained_models(config, spec).values()
        ]
        share = 0
        for parameters in parameters_of_models:
            dense, experts = buffer_elements(parameters, layout, distributed_optimizer=True)
            share += _optimizer_share(dense, experts, layout)
        shares.append(share)

        policy = parameters_of_models[0]
        reference_bytes = policy.total * width if needs_reference_snapshot(config) else 0
        saved_bytes.append(share * (SAVED_OPTIMIZER_BYTES + width) + reference_bytes)

    optimizer_bytes = _HOST_OPTIMIZER_BYTES * max(shares) * _host_optimizer_frac(config)
    return optimizer_bytes + max(saved_bytes)


def offloaded_bytes(config: RunConfig, items: Sequence[Item]) -> float:
    """Bytes of these state items that are in host memory while colocated servers sample
    (`policy.offload`).
    """
    names = _OFFLOADED_ITEMS[config.policy.offload]
    return sum(item.num_bytes for item in items if item.name.startswith(names))


def most_offloaded_bytes(config: RunConfig, spec: ModelSpec, layout: Layout) -> float:
    """`offloaded_bytes` of the stage with the most: host memory of one rank."""
    bytes_of_stages = []
    for stage in range(layout.pp):
        items = state_items(config, spec, layout, stage)
        bytes_of_stages.append(offloaded_bytes(config, items))
    return max(bytes_of_stages)
