"""FLOPs of a model's passes, by Megatron-LM's formula, and the tokens that they depend on."""

from dataclasses import dataclass, replace

import numpy as np

from pacs_megatron.models.config_reader import ModelSpec

TRAINING_FACTOR = 3
"""FLOPs of forward and backward over those of forward: the backward pass has two products for each
product of the forward pass (`forward_backward_expansion_factor`)
"""


@dataclass(slots=True)
class PassedTokens:
    """Numbers of tokens that passed a model."""

    inputs: float = 0.0
    """sum over sequences of the length L"""
    squares: float = 0.0
    """sum over sequences of L * L"""
    outputs: float = 0.0
    """positions that passed the output layer"""

    def add(self, input_lens: np.ndarray, output_lens: np.ndarray) -> None:
        """Adds sequences.

        Args:
            input_lens: int64 [n], input tokens of each sequence.
            output_lens: int64 [n], positions of each sequence that pass the output layer.
        """
        lens = input_lens.astype(np.float64)
        self.inputs += float(lens.sum())
        self.squares += float(np.square(lens).sum())
        self.outputs += float(output_lens.sum())


def num_attention_layers(spec: ModelSpec) -> int:
    """Layers with attention; the others have a gated delta net."""
    return spec.num_layers if spec.delta is None else spec.delta.layers.count(False)


def attention_parameters(spec: ModelSpec) -> int:
    """Elements of the matrices of all layers' attention: queries, keys, values and its output, in a
    hybrid also its gate. Delta nets: input and output projection, and the convolution's kernels.
    """
    queries = spec.num_heads * spec.head_dim
    keys = spec.num_kv_heads * spec.head_dim
    delta = spec.delta
    if delta is None:
        return spec.num_layers * spec.hidden_size * (2 * queries + 2 * keys)

    of_attention = spec.hidden_size * (3 * queries + 2 * keys)
    delta_keys = delta.num_key_heads * delta.key_head_dim
    delta_values = delta.num_value_heads * delta.value_head_dim
    projected = 2 * delta_keys + 3 * delta_values + 2 * delta.num_value_heads
    kernels = delta.conv_kernel * (2 * delta_keys + delta_values)
    of_delta_net = spec.hidden_size * projected + kernels
    num_attention = num_attention_layers(spec)
    return num_attention * of_attention + (spec.num_layers - num_attention) * of_delta_net


def _state_flops(spec: ModelSpec) -> int:
    """FLOPs of one token in the states of all delta nets: by Megatron-LM's formula four products of
    a value head's size squared.
    """
    if spec.delta is None:
        return 0
    products = 4 * spec.delta.num_value_heads * spec.delta.value_head_dim**2
    return 2 * products * spec.delta.layers.count(True)


def forward_flops(spec: ModelSpec, vocab_size: int, tokens: PassedTokens) -> float:
    """FLOPs of a forward pass by Megatron-LM's formula.

    Source: `num_floating_point_operations` of Megatron-LM, megatron/training/training.py
    (megatron-core 0.19.2, lines 390 to 902; `transformer_flops`), without its factor 3 for the
    backward pass. Two FLOPs are one multiply-add. The scores of the attention are halved for the
    causal mask. Norms, rotations, softmax and the router of experts are not counted.

    One term has another number of tokens: Megatron computes logits at every position, this trainer
    only where a response token is predicted. With `outputs = inputs` the result is Megatron's.

    Args:
        spec: the architecture; a critic's output layer has one row.
        vocab_size: rows of the output layer; Megatron counts the padded ones.
        tokens: of all sequences.
    """
    mlp_width = spec.ffn_size
    if spec.moe is not None:
        mlp_width = spec.moe.top_k * spec.moe.expert_ffn_size + spec.moe.shared_ffn_size
    # Gate, up and down matrix of SwiGLU.
    mlp = 3 * spec.hidden_size * mlp_width
    matrices = 2 * (attention_parameters(spec) + spec.num_layers * mlp) * tokens.inputs
    states = _state_flops(spec) * tokens.inputs

    # Scores and their product with the values: 2 * 2 * L * L for each element of the queries, half
    # of it masked.
    queries = spec.num_heads * spec.head_dim
    attention = 2 * num_attention_layers(spec) * queries * tokens.squares

    rows = 1 if spec.head == "value" else vocab_size
    head = 2 * spec.hidden_size * rows * tokens.outputs
    return matrices + states + attention + head


def update_flops(
    spec: ModelSpec, vocab_size: int, tokens: PassedTokens, num_adapted: int | None = None
) -> float:
    """FLOPs of the forward and backward pass of an update, without recomputation.

    A frozen matrix has one product in the backward pass, that of the gradient of its input.

    Args:
        spec: the architecture.
        vocab_size: rows of the output layer.
        tokens: of the update.
        num_adapted: elements of the adapters, if these alone are trained; None: all are.
    """
    whole = forward_flops(spec, vocab_size, tokens)
    if num_adapted is None:
        return TRAINING_FACTOR * whole
    matrices = replace(tokens, squares=0.0)
    scores = whole - forward_flops(spec, vocab_size, matrices)
    products = scores + _state_flops(spec) * tokens.inputs
    adapters = 2 * num_adapted * tokens.inputs
    return 2 * whole + products + TRAINING_FACTOR * adapters


def total_flops(
    spec: ModelSpec,
    vocab_size: int,
    forward: PassedTokens,
    trained: PassedTokens,
    num_adapted: int | None = None,
) -> float:
    """FLOPs of forward-only passes and of updates, without recomputation.

    Args:
        spec: the architecture.
        vocab_size: rows of the output layer.
        forward: tokens of the forward-only passes.
        trained: tokens of the updates.
        num_adapted: as in `update_flops`.
    """
    of_forward = forward_flops(spec, vocab_size, forward)
    return of_forward + update_flops(spec, vocab_size, trained, num_adapted)
