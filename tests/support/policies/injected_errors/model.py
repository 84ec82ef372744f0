"""Errors in the model and its head: log-probs, entropies, positions, norms, routers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from tests.support.policies.injected_errors.injection import (
    POLICY,
    TEMPERATURE,
    InjectedError,
    with_attributes,
)

HEAD = f"{POLICY}.head._Head"


def _steep(original: Any, *args: Any, **options: Any) -> Any:
    """The value is right, the derivative 0.1 % high."""
    logprobs, entropy = original(*args, **options)
    return 1.001 * logprobs - (0.001 * logprobs).detach(), entropy


def _entropy_in_bits(original: Any, *args: Any, **options: Any) -> Any:
    logprobs, entropy = original(*args, **options)
    return logprobs, entropy / math.log(2)


def _all_rows(_original: Any, self: Any) -> Any:
    return self.weight.shape[0]


def _at_temperature_1(original: Any, self: Any, *args: Any) -> Any:
    return original(replace(self, temperature=1.0), *args)


def _times_temperature(original: Any, self: Any, *args: Any) -> Any:
    return original(self, *args) * self.temperature


def _rounded(original: Any, self: Any, *args: Any) -> Any:
    return original(self, *args).bfloat16().float()


def _higher_rope_base(original: Any, spec: Any) -> Any:
    return original(replace(spec, rope_theta=1.01 * spec.rope_theta))


def _without_rope_scaling(original: Any, spec: Any) -> Any:
    return original(replace(spec, rope_scaling=None))


def _lower_attention_scale(original: Any, spec: Any, *args: Any) -> Any:
    config = original(spec, *args)
    config.softmax_scale = 0.999 * spec.head_dim**-0.5
    return config


def _exchanged_norms(original: Any, self: Any, read: Any) -> None:
    """In the import and in the export."""

    def exchange(name: str) -> str:
        if "q_norm" in name:
            return name.replace("q_norm", "k_norm")
        return name.replace("k_norm", "q_norm")

    export = self.export_weights
    self.export_weights = lambda: ((exchange(name), tensor) for name, tensor in export())
    original(self, lambda name: read(exchange(name)))


def _untrained_router(original: Any, *args: Any, **options: Any) -> Any:
    probabilities, chosen = original(*args, **options)
    return probabilities.detach(), chosen


def _frozen_norm(original: Any, chunks: Any, *args: Any) -> Any:
    for chunk in chunks:
        norm = getattr(chunk.decoder, "final_layernorm", None)
        if norm is not None:
            norm.weight.register_hook(torch.zeros_like)
    return original(chunks, *args)


MODEL_ERRORS: dict[str, InjectedError] = {
    "gradient of the head 0.1 % high": InjectedError(
        target=f"{POLICY}.model.token_logprobs", change=_steep
    ),
    "entropy in bits": InjectedError(
        target=f"{POLICY}.model.token_logprobs", change=_entropy_in_bits
    ),
    "padding of the vocabulary has probability": InjectedError(
        target=f"{HEAD}.num_valid", change=_all_rows
    ),
    "temperature is missing in the backward pass": InjectedError(
        target=f"{HEAD}.gradient_of_logits", change=_at_temperature_1, changes=TEMPERATURE
    ),
    "the derivative of the logits lacks the temperature": InjectedError(
        target=f"{HEAD}.gradient_of_logits", change=_times_temperature, changes=TEMPERATURE
    ),
    "derivative of a bf16 log-prob": InjectedError(
        target=f"{HEAD}.gradient_of_logits", change=_rounded
    ),
    "bf16 logits": InjectedError(target=f"{HEAD}.logits", change=_rounded),
    "base of the rotary positions 1 % high": InjectedError(
        target=f"{POLICY}.model.rope_frequencies", change=_higher_rope_base
    ),
    "rotary pairs are interleaved": InjectedError(
        target=f"{POLICY}.engine.transformer_config",
        change=with_attributes(rotary_interleaved=True),
    ),
    "low frequencies of llama3 are not scaled": InjectedError(
        target=f"{POLICY}.model.rope_frequencies", change=_without_rope_scaling, family="llama"
    ),
    "scale of the attention 0.1 % low": InjectedError(
        target=f"{POLICY}.engine.transformer_config", change=_lower_attention_scale
    ),
    "epsilon of the norms 1e-5": InjectedError(
        target=f"{POLICY}.engine.transformer_config",
        change=with_attributes(layernorm_epsilon=1e-5),
    ),
    "norms of query and key are exchanged in the weight table": InjectedError(
        target=f"{POLICY}.engine.MegatronPolicy.load_weights", change=_exchanged_norms
    ),
    "the final norm is not trained": InjectedError(
        target=f"{POLICY}.engine.wrap_for_training", change=_frozen_norm
    ),
    "weights of the chosen experts are not normalised": InjectedError(
        target=f"{POLICY}.engine.transformer_config",
        change=with_attributes(moe_router_pre_softmax=True),
        family="qwen3_moe",
    ),
    "the router is not trained": InjectedError(
        target="megatron.core.transformer.moe.router.topk_routing_with_score_function",
        change=_untrained_router,
        family="qwen3_moe",
    ),
}
