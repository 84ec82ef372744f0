"""Bytes of one rank's activations, output layer and mini-batch, for `plan`. Does not import torch.

The activations are the tensors that the modules of Transformer Engine's layer save for the backward
pass, and those that a layer has beside them while it works. `tests/te/workbench/plan` compares
their sums with traces. Functions whose names end in `elements` count per token of a micro-batch on
this rank, and per layer.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from pacs_megatron.config.checks import max_sequence_tokens
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.contracts.layout import Layout, logits_per_chunk
from pacs_megatron.models import ModelSpec
from pacs_megatron.models.flops import num_attention_layers
from pacs_megatron.objectives.registry import build_objective
from pacs_megatron.runtime.gpus import GPUS
from pacs_megatron.workbench.plan import constants
from pacs_megatron.workbench.plan.state import (
    WIDTH,
    Item,
    layers_of_stage,
    table_of,
    total_bytes,
)

_WORKSPACE_BYTES = 32 * 2**20
"""of cuBLAS, for products (transformer_engine/pytorch/cpp_extensions/gemm.py)"""
_NUM_GROUPED_WORKSPACES = 4
"""of cuBLAS, for the products of experts"""


def activation_items(
    config: RunConfig,
    spec: ModelSpec,
    layout: Layout,
    stage: int,
    *,
    imbalance: float = constants.EXPERT_IMBALANCE.value,
) -> list[Item]:
    """Activations at the peak of a stage.

    A stage has its highest sum either while a layer works, beside what the others saved, or, on the
    last stage, in the output layer.

    Args:
        config: the run.
        spec: the architecture.
        layout: of the ranks.
        stage: of the pipeline.
        imbalance: tokens of the fullest expert-parallel rank over the mean.
    """
    constant = constants.EXPERT_IMBALANCE
    moments = _moments(config, spec, layout, stage, imbalance)
    items = max(moments, key=total_bytes)

    # With another imbalance the peak may be at the other moment.
    low = max(map(total_bytes, _moments(config, spec, layout, stage, constant.low)))
    high = max(map(total_bytes, _moments(config, spec, layout, stage, constant.high)))
    others = total_bytes(items[:-1])
    last = items[-1]
    span = ((low - others) / last.num_bytes, (high - others) / last.num_bytes)
    items[-1] = replace(last, span=span)

    if config.resources.gpu is not None:
        items.append(_kernel_item(config, spec, layout))
    batch_bytes = minibatch_bytes(config, layout)
    items.append(Item("tokens, labels and log-probs of a mini-batch", batch_bytes, "computed"))
    return items


def _moments(
    config: RunConfig, spec: ModelSpec, layout: Layout, stage: int, imbalance: float
) -> list[list[Item]]:
    """The items of each moment that may be the peak of a stage."""
    tokens = config.batch.tokens_per_microbatch / layout.cp
    kept = _kept_item(config, spec, layout, stage, imbalance)
    moments = [[kept, *_working_items(config, spec, stage, tokens, imbalance)]]
    if stage == layout.pp - 1:
        # The input of the final norm.
        output_bytes = _hidden_bytes(config, spec) * tokens
        output_bytes += head_bytes(config, spec, layout, tokens)
        name = "output layer: a chunk of logits and its gradients"
        moments.append([kept, Item(name, output_bytes, "computed")])
    return moments


def _kept_item(
    config: RunConfig, spec: ModelSpec, layout: Layout, stage: int, imbalance: float
) -> Item:
    """The tensors that a stage's layers save for all micro-batches in flight, and the outputs of a
    stage that is not the last one, which wait for their gradients.
    """
    tokens = config.batch.tokens_per_microbatch / layout.cp
    num_layers = len(layers_of_stage(spec.num_layers, layout, stage))
    in_flight = microbatches_in_flight(layout, stage)
    state_bytes = _hidden_bytes(config, spec) * tokens
    output_bytes = state_bytes if stage < layout.pp - 1 else 0.0

    if config.parallel.recompute.granularity == "full":
        num_bytes = (state_bytes * num_layers + output_bytes) * in_flight
        return Item("layer inputs kept (full recompute)", num_bytes, "computed")

    saved = layer_activation_bytes(
        config, spec, recomputed=_recomputed_modules(config), imbalance=imbalance
    )
    num_bytes = (saved * tokens * num_layers + output_bytes) * in_flight
    return Item(
        f"activations of {num_layers} layers x {in_flight:g} in flight", num_bytes, "computed"
    )


def _working_items(
    config: RunConfig, spec: ModelSpec, stage: int, tokens: float, imbalance: float
) -> list[Item]:
    """Tensors of one layer beside the saved ones: recomputed ones, those of its operations, and the
    gradient that the stage sends to the one before.
    """
    whole = layer_activation_bytes(config, spec, imbalance=imbalance)
    modules = _recomputed_modules(config)
    items = []
    if config.parallel.recompute.granularity == "full":
        # The layer's input is among the kept ones, and its output is here beside what it saves.
        items.append(Item("layers being recomputed", whole * tokens, "computed"))
    elif modules:
        saved = layer_activation_bytes(config, spec, recomputed=modules, imbalance=imbalance)
        name = f"parts being recomputed ({', '.join(modules)})"
        items.append(Item(name, max(0.0, whole - saved) * tokens, "computed"))

    working_bytes = _working_bytes(config, spec, imbalance) * tokens
    if stage > 0:
        working_bytes += _hidden_bytes(config, spec) * tokens
    items.append(Item("working tensors of a layer", working_bytes, "computed"))
    return items


def _recomputed_modules(config: RunConfig) -> tuple[str, ...]:
    recompute = config.parallel.recompute
    return tuple(recompute.modules) if recompute.granularity == "selective" else ()


def microbatches_in_flight(layout: Layout, stage: int) -> float:
    """Number of micro-batches whose activations a stage keeps under 1F1B, in units of the stage's
    whole layers.
    """
    if layout.pp == 1:
        return 1.0
    if layout.vpp is None:
        return float(layout.pp - stage)

    # Warm-up passes of the interleaved schedule, each over one of the stage's `vpp` chunks, and the
    # first steady one (get_pp_rank_microbatches in megatron/core/pipeline_parallel/schedules.py).
    warm_up = (layout.pp - stage - 1) * 2 + (layout.vpp - 1) * layout.pp + 1
    return warm_up / layout.vpp


# --------------------------------------------------------------------------------------- one layer
def _sequence_ranks(config: RunConfig) -> int:
    """Ranks that divide the tokens of hidden states."""
    parallel = config.parallel
    return parallel.tp if parallel.sequence_parallel else 1


def _hidden_bytes(config: RunConfig, spec: ModelSpec) -> float:
    """Bytes of one hidden state per token of the micro-batch on this rank."""
    return WIDTH[config.precision.dtype] * spec.hidden_size / _sequence_ranks(config)


def layer_activation_bytes(
    config: RunConfig,
    spec: ModelSpec,
    *,
    recomputed: Collection[str] = (),
    imbalance: float = constants.EXPERT_IMBALANCE.value,
) -> float:
    """Bytes that one layer saves for the backward pass, per token of the micro-batch on this rank.

    Args:
        config: the run.
        spec: the architecture.
        recomputed: modules of `parallel.recompute` that save their inputs only.
        imbalance: tokens of the fullest expert-parallel rank over the mean; without expert
            parallelism it does not matter.
    """
    parallel = config.parallel
    sequence_ranks = _sequence_ranks(config)
    width = WIDTH[config.precision.dtype]
    fp8_frac = 1.0 if config.precision.fp8 is None else constants.FP8_ACTIVATION_FRAC.value

    norms = _num_hidden(spec, recomputed) * spec.hidden_size / sequence_ranks
    attention = _attention_elements(spec, parallel.tp, recomputed)
    if spec.moe is None:
        mlp = _mlp_elements(spec, parallel.tp, recomputed)
        router_bytes = 0.0
    else:
        mlp = _expert_elements(config, spec, recomputed, imbalance)
        router_bytes = 0.0 if "moe" in recomputed else _router_bytes(spec) / sequence_ranks

    # fp32: the scales of both norms, the log-sum-exp of each head's softmax, and the scales of each
    # query's and key's norm.
    attention_frac = num_attention_layers(spec) / spec.num_layers
    scale_bytes = 8 / sequence_ranks
    if "core_attn" not in recomputed:
        scale_bytes += attention_frac * 4 * spec.num_heads / parallel.tp
    if spec.qk_norm:
        num_normed = attention_frac * (spec.num_heads + spec.num_kv_heads)
        scale_bytes += 4 * num_normed / parallel.tp

    tensor_bytes = width * (norms + attention + mlp) * fp8_frac
    return tensor_bytes + scale_bytes + router_bytes


def _num_hidden(spec: ModelSpec, recomputed: Collection[str]) -> int:
    """Hidden states that a layer saves: the inputs of both norms and of the linear layers that
    follow them.

    Transformer Engine fuses a norm with the linear layer that follows, and then recomputes it with
    that layer only. With experts the second norm is a module of its own.
    """
    second_norm_module = "mlp" if spec.moe is None else "layernorm"
    return 3 if second_norm_module in recomputed else 4


def _attention_elements(spec: ModelSpec, tp: int, recomputed: Collection[str]) -> float:
    """Queries and keys before their norm; queries, keys, values and the attention's output.

    Recomputed attention saves its arguments. The values are a view of the product of queries, keys
    and values, and so keep all of it. In a hybrid the result is the mean over the layers.
    """
    queries = spec.num_heads * spec.head_dim
    keys = spec.num_kv_heads * spec.head_dim
    before_norm = (queries + keys) if spec.qk_norm else 0
    values = keys
    if "core_attn" in recomputed:
        values = queries + 2 * keys
    # The output has the size of the queries.
    of_attention = before_norm + 2 * queries + keys + values
    delta = spec.delta
    if delta is None:
        return of_attention / tp

    # Its gate, and the output times the gate.
    of_attention += 2 * queries
    delta_keys = delta.num_key_heads * delta.key_head_dim
    delta_values = delta.num_value_heads * delta.value_head_dim
    projected = 2 * delta_keys + 2 * delta_values + 2 * delta.num_value_heads
    convolved = 2 * delta_keys + delta_values
    # One query and key for each value head, before and after their division by the length; the
    # rule's output and its product with the gate.
    heads = 4 * delta.num_value_heads * delta.key_head_dim
    of_delta_net = projected + convolved + heads + 2 * delta_values
    frac = num_attention_layers(spec) / spec.num_layers
    return (frac * of_attention + (1 - frac) * of_delta_net) / tp


def _mlp_elements(spec: ModelSpec, tp: int, recomputed: Collection[str]) -> float:
    """Both halves of the gated MLP and their product."""
    return 0.0 if "mlp" in recomputed else 3 * spec.ffn_size / tp


def _expert_elements(
    config: RunConfig, spec: ModelSpec, recomputed: Collection[str], imbalance: float
) -> float:
    """The experts' part of the MLP: for each copy of a token that an expert processes, its input,
    both halves of the gated MLP and their product.
    """
    assert spec.moe is not None
    has_whole_experts = config.parallel.ep > 1
    expert_tp = 1 if has_whole_experts else config.parallel.tp
    factor = imbalance if has_whole_experts else 1.0

    copy = 0.0
    if "moe" not in recomputed:
        # `moe_act` computes the product of both halves again.
        num_halves = 2 if "moe_act" in recomputed else 3
        copy = spec.hidden_size + num_halves * spec.moe.expert_ffn_size / expert_tp
    of_shared_expert = 3 * spec.moe.shared_ffn_size / config.parallel.tp
    return expert_copies(config, spec) * copy * factor + of_shared_expert


def _router_bytes(spec: ModelSpec) -> float:
    """Bytes of a token's routing: a bool and two places for each expert; for each of the top-k
    index, probability and places in the sorted order.
    """
    assert spec.moe is not None
    by_expert = 1 + 2 * 4
    return by_expert * spec.moe.num_experts + (8 + 4 + 12) * spec.moe.top_k


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


def _working_bytes(config: RunConfig, spec: ModelSpec, imbalance: float) -> float:
    """Bytes that a layer's operations have beside the saved tensors, per token of the micro-batch.

    Dense: the larger of two moments of the MLP's backward pass. Experts: the end of their forward
    pass, with the tokens before and after each exchange and each sort.
    """
    parallel = config.parallel
    width = WIDTH[config.precision.dtype]
    if spec.moe is not None:
        copy = expert_copies(config, spec) * spec.hidden_size * width
        factor = imbalance if parallel.ep > 1 else 1.0
        # Permuted on this rank; received, processed and sorted on the experts' rank.
        return copy * (1 + 3 * factor)

    # The gradients of both halves as Megatron's unfused SwiGLU computes them, of which a fused
    # kernel needs half, and that of the layer's output.
    half = width * spec.ffn_size / parallel.tp
    of_activation = 4 * half + _hidden_bytes(config, spec)

    # The first product's gathered input and the gradient of it, when the product is already free.
    gathered = width * spec.hidden_size * (2 if parallel.sequence_parallel else 1)
    return max(of_activation, gathered - half)


def _kernel_item(config: RunConfig, spec: ModelSpec, layout: Layout) -> Item:
    """Tensors of Transformer Engine: cuBLAS workspaces, and an empty gradient for each shape of a
    matrix, for the fused addition to the fp32 gradients.
    """
    shapes = set()
    for entry in table_of(spec).entries:
        is_matrix = len(entry.megatron_shape) > 1 and not entry.megatron_name.endswith(
            "router.weight"
        )
        if entry.layer == 0 and is_matrix:
            tp = layout.tp if entry.expert is None else layout.expert_tp
            shapes.add(entry.shard_shape(tp))

    # Frozen weights have no gradient.
    num_trained = sum(map(math.prod, shapes)) if config.policy.lora is None else 0
    gradient_bytes = WIDTH[config.precision.dtype] * num_trained
    num_workspaces = 1 if spec.moe is None else 1 + _NUM_GROUPED_WORKSPACES
    num_bytes = gradient_bytes + num_workspaces * _WORKSPACE_BYTES
    return Item("Transformer Engine's workspaces and empty gradients", num_bytes, "computed")


# --------------------------------------------------------------------- mini-batch and output layer
def minibatch_bytes(config: RunConfig, layout: Layout) -> float:
    """Device bytes of a rank's share of a mini-batch, if every response reaches the limit."""
    batch = config.batch
    samples = batch.prompts_per_step * batch.samples_per_prompt / batch.updates_per_step / layout.dp
    sequence_tokens = max_sequence_tokens(config)
    response_tokens = sequence_tokens - config.data.max_prompt_tokens

    # Ids, positions, labels and the index among the input tokens, int64; context parallelism
    # divides them.
    per_token = 8 + 8 + 8 + 8
    # The row and the slot (int64), the sampler's log-prob, log-prob, entropy and two other
    # log-probs (fp32).
    per_response_token = 8 + 8 + 4 + 4 + 4 + 4 + 4

    sequence_bytes = per_token * sequence_tokens / layout.cp
    response_bytes = per_response_token * response_tokens
    return samples * (sequence_bytes + response_bytes)


def head_bytes(config: RunConfig, spec: ModelSpec, layout: Layout, tokens: float) -> float:
    """Bytes of the chunked output layer of policy/head.py at its highest moment.

    Args:
        config: the run. `precision.head: fp32` has the hidden states in fp32.
        spec: the architecture.
        layout: of the ranks.
        tokens: of a micro-batch on this rank; at most that many positions predict a token.
    """
    width = WIDTH[config.precision.dtype]
    hidden_width = width if config.precision.head == "bf16" else 4
    vocab = table_of(spec).padded_vocab // layout.tp

    # The positions of a chunk, as policy/head.py chooses them.
    gpu = GPUS.get(config.resources.gpu or "")
    device_bytes = None if gpu is None else gpu.memory_bytes
    rows = min(tokens, max(1, logits_per_chunk(device_bytes) // vocab))
    logits = rows * vocab
    # Frozen weights have no gradient.
    weights = vocab * spec.hidden_size if config.policy.lora is None else 0

    # The hidden states of the predicting positions, and of all: this rank's and the gathered ones.
    states = hidden_width * spec.hidden_size * tokens
    all_states = states / _sequence_ranks(config)
    if _sequence_ranks(config) > 1:
        all_states += states

    # Several chunks add their weight gradients in fp32, and a copy has the weights' dtype at the
    # end. One chunk has a sum and a product, both in the weights' dtype.
    is_one_chunk = tokens <= rows
    weight_gradient = (width if is_one_chunk else 4) * weights
    # The product's logits. Others than fp32 stay beside the fp32 tensors that follow from them.
    is_product = config.precision.head == "bf16" and config.rollout.sampling.temperature == 1.0
    logit_width = width if is_product else 4
    beside = logit_width if logit_width < 4 else 0
    # Probabilities, their gradient in the weights' dtype, and a product.
    gradient_width = width if width < 4 else 0
    of_product = (beside + 4 + gradient_width) * logits
    of_product += width * weights if is_one_chunk else hidden_width * spec.hidden_size * rows
    at_end = 0.0 if is_one_chunk else width * weights
    with_gradients = 2 * states + weight_gradient

    knows_gradient, waits_for_forward = _head_gradients(config)
    moments = []
    if knows_gradient:
        # Logits, shifted logits and their exponentials, beside the gradients so far.
        of_chunk = max((logit_width + 8) * logits, of_product, at_end)
        moments.append(with_gradients + all_states + of_chunk)
    if waits_for_forward:
        # Forward: shifted logits and their exponentials, no gradients.
        moments.append(states + all_states + (beside + 8) * logits)
        moments.append(with_gradients + max(of_product, at_end))
    return max(moments)


def _head_gradients(config: RunConfig) -> Sequence[bool]:
    """How the updates of a step differentiate the output layer.

    Returns:
        Whether an update computes its gradient in the forward pass, and whether one does after it
        (docs/decisions/0011-gradients-in-the-head.md).
    """
    updates = range(config.batch.num_updates)
    objective = build_objective(config.objective, updates_per_step=len(updates))
    have_statistics = [bool(objective.statistics(update)) for update in updates]

    waits_for_forward = objective.coupling in ("sample", "group") and any(have_statistics)
    # A group that does not fit a micro-batch has a score pass before the update.
    knows_gradient = objective.coupling != "sample" or not all(have_statistics)
    return knows_gradient, waits_for_forward
