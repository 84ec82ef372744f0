"""Bytes of one rank's activations, output layer and mini-batch, for `plan`. Does not import torch.

The activations are the tensors that the modules of Transformer Engine's layer save for the backward
pass. Functions whose names end in `elements` count per token of a micro-batch on this rank, and per
layer.
"""

from collections.abc import Collection

from pacs_megatron.config.checks import max_sequence_tokens
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.contracts.layout import Layout, logits_per_chunk
from pacs_megatron.models import ModelSpec
from pacs_megatron.runtime.gpus import GPUS
from pacs_megatron.workbench.plan import constants
from pacs_megatron.workbench.plan.state import WIDTH, Item, layers_of_stage, table_of


def activation_items(config: RunConfig, spec: ModelSpec, layout: Layout, stage: int) -> list[Item]:
    """Activations at the peak of a stage: its layers for every micro-batch in flight, and the
    output layer.
    """
    tokens = config.batch.tokens_per_microbatch / layout.cp
    items = _layer_items(config, spec, layout, stage)

    # Two hidden states of the whole micro-batch and the gradient of each.
    hidden_bytes = 4 * WIDTH[config.precision.dtype] * spec.hidden_size * tokens
    items.append(Item("hidden states and their gradients", hidden_bytes, "computed"))

    batch_bytes = minibatch_bytes(config, layout)
    items.append(Item("tokens, labels and log-probs of a mini-batch", batch_bytes, "computed"))

    if stage == layout.pp - 1:
        output_bytes = head_bytes(config, spec, layout, tokens)
        name = "output layer: a chunk of logits and its gradients"
        items.append(Item(name, output_bytes, "computed"))
    return items


def _layer_items(config: RunConfig, spec: ModelSpec, layout: Layout, stage: int) -> list[Item]:
    """The tensors that a stage's layers save, with the part that is recomputed."""
    recompute = config.parallel.recompute
    tokens = config.batch.tokens_per_microbatch / layout.cp
    num_layers = len(layers_of_stage(spec.num_layers, layout, stage))
    in_flight = microbatches_in_flight(layout, stage)
    whole_layer = layer_activation_bytes(config, spec) * tokens
    span = _imbalance_span(config, spec, ())

    if recompute.granularity == "full":
        sequence_ranks = layout.tp if layout.sequence_parallel else 1
        width = WIDTH[config.precision.dtype]
        layer_inputs = width * spec.hidden_size / sequence_ranks * tokens * num_layers
        return [
            Item("layer inputs kept (full recompute)", layer_inputs * in_flight, "computed"),
            Item("layers being recomputed", whole_layer, "computed", span),
        ]

    modules = recompute.modules if recompute.granularity == "selective" else ()
    saved_layer = layer_activation_bytes(config, spec, recomputed=modules) * tokens
    name = f"activations of {num_layers} layers x {in_flight:g} in flight"
    saved_span = _imbalance_span(config, spec, modules)
    items = [Item(name, saved_layer * num_layers * in_flight, "computed", saved_span)]
    if modules:
        name = f"parts being recomputed ({', '.join(modules)})"
        items.append(Item(name, whole_layer - saved_layer, "computed", span))
    return items


def _imbalance_span(
    config: RunConfig, spec: ModelSpec, recomputed: Collection[str]
) -> tuple[float, float]:
    """Lowest and highest bytes of a layer as factors, by the imbalance of experts."""
    constant = constants.EXPERT_IMBALANCE
    planned = layer_activation_bytes(config, spec, recomputed=recomputed)
    low = layer_activation_bytes(config, spec, recomputed=recomputed, imbalance=constant.low)
    high = layer_activation_bytes(config, spec, recomputed=recomputed, imbalance=constant.high)
    return low / planned, high / planned


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
        recomputed: modules of `parallel.recompute` that save their input only, which another module
            saves too.
        imbalance: tokens of the fullest expert-parallel rank over the mean; without expert
            parallelism it does not matter.
    """
    parallel = config.parallel
    sequence_ranks = parallel.tp if parallel.sequence_parallel else 1
    width = WIDTH[config.precision.dtype]
    fp8_frac = 1.0 if config.precision.fp8 is None else constants.FP8_ACTIVATION_FRAC.value

    # The inputs of both norms and of the linear layers that follow them; a recomputed norm saves
    # its input only.
    num_hidden = 2 if "layernorm" in recomputed else 4
    norms = num_hidden * spec.hidden_size / sequence_ranks
    attention = _attention_elements(spec, parallel.tp)
    if spec.moe is None:
        mlp = _mlp_elements(spec, parallel.tp, recomputed)
        router_bytes = 0.0
    else:
        mlp = _expert_elements(config, spec, recomputed, imbalance)
        # The router's logits and probabilities, fp32.
        router_bytes = 8.0 * spec.moe.num_experts / sequence_ranks
        router_bytes = 0.0 if "moe" in recomputed else router_bytes

    # The log-sum-exp of the attention's softmax, fp32, one for each head.
    softmax_bytes = 0 if "core_attn" in recomputed else 4 * spec.num_heads / parallel.tp

    tensor_bytes = width * (norms + attention + mlp) * fp8_frac
    return tensor_bytes + softmax_bytes + router_bytes


def _attention_elements(spec: ModelSpec, tp: int) -> float:
    """Queries and keys before their norm; queries, keys, values and the attention's output."""
    queries = spec.num_heads * spec.head_dim
    keys = spec.num_kv_heads * spec.head_dim
    before_norm = (queries + keys) if spec.qk_norm else 0
    # The output has the size of the queries, the values that of the keys.
    return (before_norm + 2 * queries + 2 * keys) / tp


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
    return expert_copies(config, spec) * copy * factor


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


# --------------------------------------------------------------------- mini-batch and output layer
def minibatch_bytes(config: RunConfig, layout: Layout) -> float:
    """Device bytes of a rank's share of a mini-batch, if every response reaches the limit."""
    batch = config.batch
    samples = batch.prompts_per_step * batch.samples_per_prompt / batch.updates_per_step / layout.dp
    sequence_tokens = max_sequence_tokens(config)
    response_tokens = sequence_tokens - config.data.max_prompt_tokens

    # Ids, positions and labels, int64; context parallelism divides them.
    per_token = 8 + 8 + 8
    # The row (int64), log-prob, entropy and two other log-probs (fp32).
    per_response_token = 8 + 4 + 4 + 4 + 4

    sequence_bytes = per_token * sequence_tokens / layout.cp
    response_bytes = per_response_token * response_tokens
    return samples * (sequence_bytes + response_bytes)


def head_bytes(config: RunConfig, spec: ModelSpec, layout: Layout, tokens: float) -> float:
    """Bytes of the chunked output layer of policy/head.py.

    Args:
        config: the run. `precision.head: bf16` also has the product's logits in bf16, `fp32` the
            hidden states in fp32.
        spec: the architecture.
        layout: of the ranks.
        tokens: of a micro-batch on this rank.
    """
    width = WIDTH[config.precision.dtype]
    is_bf16_head = config.precision.head == "bf16"
    vocab = table_of(spec).padded_vocab // layout.tp

    # The positions of a chunk, as policy/head.py chooses them.
    gpu = GPUS.get(config.resources.gpu or "")
    device_bytes = None if gpu is None else gpu.memory_bytes
    rows = min(tokens, max(1, logits_per_chunk(device_bytes) // vocab))

    # Bytes of one logit of a chunk: itself and its exponential in fp32, and its gradient in the
    # weights' dtype. A bf16 product is a separate tensor, which the fp32 logits copy.
    gradient = width
    product = 2 if is_bf16_head and width == 2 else 0
    per_logit = 4 + 4 + gradient + product

    # Several chunks: an fp32 sum and its copy in the weights' dtype. One chunk: the sum and the
    # product, both in the weights' dtype.
    per_weight = 4 + width if tokens > rows else 2 * width

    # The hidden states and their gradient.
    per_hidden = 2 * (width if is_bf16_head else 4)

    chunk_bytes = rows * vocab * per_logit
    weight_gradient_bytes = vocab * spec.hidden_size * per_weight
    hidden_bytes = per_hidden * spec.hidden_size * tokens
    return chunk_bytes + weight_gradient_bytes + hidden_bytes
