"""Checks of a configuration against the model's shape."""

import math
from collections.abc import Iterator

from pacs_megatron.config.checks import (
    changed,
    divisors,
    longest_request,
    max_response_tokens,
    max_sequence_tokens,
    min_server_context,
    one_of,
    response_key,
)
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.models.config_reader import ModelSpec

_FP8_MULTIPLE = 16
_FP8_BLOCK = 128
_MAX_ADVISED_TP = 16
"""Largest tensor-parallel size of a server that a message suggests"""


def shape_problems(config: RunConfig, shape: ModelSpec, model_name: str) -> list[str]:
    """Problems of the layout with the model's heads, layers, experts and length.

    Args:
        config: The run.
        shape: The model.
        model_name: Name of the model in messages.
    """
    problems: list[str] = []
    for check in (
        _layer_problems,
        _delta_problems,
        _expert_problems,
        _fp8_problems,
        _length_problems,
        _context_problems,
        _server_problems,
    ):
        problems += check(config, shape, model_name)
    return problems


def _layer_problems(config: RunConfig, shape: ModelSpec, model_name: str) -> Iterator[str]:
    """Tensor and pipeline parallelism, and modules that the model does not contain."""
    parallel = config.parallel
    # Names as in the checkpoint's config.json.
    sizes = [
        ("num_key_value_heads", shape.num_kv_heads),
        ("num_attention_heads", shape.num_heads),
        _ffn_size(shape),
    ]
    if shape.moe is not None and shape.moe.shared_ffn_size:
        sizes.append(("shared_expert_intermediate_size", shape.moe.shared_ffn_size))
    common_divisors = divisors(math.gcd(*(size for _, size in sizes)))
    for name, size in sizes:
        if size % parallel.tp:
            yield (
                f"parallel.tp={parallel.tp} does not divide {name}={size} of {model_name}; "
                f"{one_of(common_divisors)}"
            )
            break

    stages = parallel.pp * (parallel.vpp or 1)
    if shape.num_layers % stages:
        label = "pp" if parallel.vpp is None else "pp*vpp"
        yield (
            f"parallel.{label}={stages} does not divide num_hidden_layers={shape.num_layers} of "
            f"{model_name}; make it {one_of(divisors(shape.num_layers)).removeprefix('use ')}"
        )

    missing_modules = {"moe", "moe_act"} if shape.moe is None else {"mlp"}
    for module in parallel.recompute.modules:
        if module in missing_modules:
            yield (
                f"parallel.recompute.modules has {module}, which {model_name} does not contain; "
                "remove it"
            )


def _delta_problems(config: RunConfig, shape: ModelSpec, model_name: str) -> Iterator[str]:
    """Tensor and context parallelism split the heads of a gated delta net, servers by their tp."""
    delta = shape.delta
    if delta is None:
        return
    heads = (
        ("linear_num_key_heads", delta.num_key_heads),
        ("linear_num_value_heads", delta.num_value_heads),
    )
    parallel = config.parallel
    num_parts = parallel.tp * parallel.cp
    for name, number in heads:
        if number % num_parts:
            yield (
                f"parallel.tp*cp={num_parts} does not divide {name}={number} of {model_name}; make "
                f"it {one_of(divisors(delta.num_key_heads)).removeprefix('use ')}"
            )
            break

    servers = config.rollout.managed_servers
    if servers is not None and delta.num_key_heads % servers.tp:
        yield (
            f"rollout.servers.tp={servers.tp} does not divide linear_num_key_heads="
            f"{delta.num_key_heads} of {model_name}; {one_of(divisors(delta.num_key_heads))}"
        )


def _expert_problems(config: RunConfig, shape: ModelSpec, model_name: str) -> Iterator[str]:
    parallel = config.parallel
    moe = shape.moe
    if moe is None:
        for name in changed(parallel.megatron):
            if name.startswith("moe_"):
                yield (
                    f"parallel.megatron.{name} is for a model with experts, {model_name} has none; "
                    "remove it"
                )
        if config.policy.routing != "own":
            yield (
                f"policy.routing={config.policy.routing}, but {model_name} has no experts; set "
                "policy.routing=own"
            )
        if parallel.ep != 1:
            yield (f"parallel.ep={parallel.ep}, but {model_name} has no experts; set parallel.ep=1")
        return

    if parallel.tp > 1 and not parallel.sequence_parallel:
        yield (
            f"parallel.sequence_parallel=false with parallel.tp={parallel.tp} and {model_name}, a "
            "mixture-of-experts model, which requires parallel.sequence_parallel=true (Megatron's "
            "experts expect tokens sharded over the tensor-parallel ranks); set it"
        )
    if moe.num_experts % parallel.ep:
        yield (
            f"parallel.ep={parallel.ep} does not divide num_experts={moe.num_experts} of "
            f"{model_name}; {one_of(divisors(moe.num_experts))}"
        )


def _ffn_size(shape: ModelSpec) -> tuple[str, int]:
    """(key in config.json, intermediate size of the MLP or of an expert)."""
    if shape.moe is None:
        return "intermediate_size", shape.ffn_size
    return "moe_intermediate_size", shape.moe.expert_ffn_size


def _fp8_problems(config: RunConfig, shape: ModelSpec, model_name: str) -> Iterator[str]:
    """Transformer Engine's `assert_dim_for_fp8_exec` and `assert_dim_for_all_gather`, which fail at
    the first forward.
    """
    fp8 = config.precision.fp8
    if fp8 is None:
        return

    tp = config.parallel.tp
    qkv_heads = shape.num_heads + 2 * shape.num_kv_heads
    sizes = [
        ("(num_attention_heads + 2 * num_key_value_heads) * head_dim", qkv_heads * shape.head_dim),
        ("num_attention_heads * head_dim", shape.num_heads * shape.head_dim),
        _ffn_size(shape),
    ]
    if shape.delta is not None:
        delta = shape.delta
        keys = delta.num_key_heads * delta.key_head_dim
        values = delta.num_value_heads * delta.value_head_dim
        rows = 2 * (keys + values + delta.num_value_heads)
        sizes.append(("rows of a delta net's input projection", rows))
        sizes.append(("linear_num_value_heads * linear_value_head_dim", values))
    uneven = [f"{name}={size}" for name, size in sizes if size % (_FP8_MULTIPLE * tp)]
    if uneven:
        advice = "lower parallel.tp or " if tp > 1 else ""
        yield (
            f"precision.fp8 needs multiples of {_FP8_MULTIPLE} on every tensor-parallel rank, but "
            f"{model_name} has {' and '.join(uneven)} with parallel.tp={tp}; {advice}remove "
            "precision.fp8"
        )

    if fp8.recipe == "blockwise" and config.parallel.sequence_parallel:
        multiple = _FP8_BLOCK
        setting = " with parallel.sequence_parallel"
        fix = "use recipe tensorwise"
    else:
        multiple = _FP8_MULTIPLE
        setting = ""
        fix = "remove precision.fp8"
    if shape.hidden_size % multiple:
        yield (
            f"precision.fp8.recipe={fp8.recipe}{setting} needs a multiple of {multiple} as "
            f"hidden_size, {model_name} has {shape.hidden_size}; {fix}"
        )


def _length_problems(config: RunConfig, shape: ModelSpec, model_name: str) -> Iterator[str]:
    limit = shape.max_context
    longest = max_sequence_tokens(config)
    if longest > limit:
        yield (
            f"{response_key(config)}={max_response_tokens(config)} + "
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} = {longest} positions, but "
            f"{model_name} has max_position_embeddings={limit}; lower one of them"
        )

    sampling = config.evaluation.sampling
    if sampling is not None and sampling.max_response_tokens >= limit:
        yield (
            f"evaluation.sampling.max_response_tokens={sampling.max_response_tokens} leaves no "
            f"position for a problem: {model_name} has max_position_embeddings={limit}; lower it"
        )


def _context_problems(config: RunConfig, shape: ModelSpec, model_name: str) -> Iterator[str]:
    """The context of managed servers, which is the model's if it is not set."""
    servers = config.rollout.managed_servers
    if servers is None:
        return

    limit = shape.max_context
    if servers.context_length is not None and servers.context_length > limit:
        yield (
            f"rollout.servers.context_length={servers.context_length}, but {model_name} has "
            f"{limit} positions, and SGLang does not start with more; use at most {limit}"
        )

    needed_tokens = min_server_context(config)
    if servers.context_length is None and needed_tokens > limit:
        prompt_tokens, response_tokens = longest_request(config)
        yield (
            f"{model_name} has {limit} positions, but SGLang needs a context of {needed_tokens} "
            f"for a response of {response_tokens} tokens to a prompt of data.max_prompt_tokens="
            f"{prompt_tokens}; lower one of them by {needed_tokens - limit}"
        )


def _server_problems(config: RunConfig, shape: ModelSpec, model_name: str) -> Iterator[str]:
    """SGLang shards heads evenly, and shards key-value heads evenly or replicates each equally
    often.
    """
    servers = config.rollout.managed_servers
    if servers is None:
        return

    num_kv_heads = shape.num_kv_heads
    possible = [
        tp for tp in divisors(shape.num_heads) if num_kv_heads % tp == 0 or tp % num_kv_heads == 0
    ]
    if servers.tp not in possible:
        advised = [tp for tp in possible if tp <= _MAX_ADVISED_TP]
        yield (
            f"rollout.servers.tp={servers.tp} does not divide num_attention_heads="
            f"{shape.num_heads} and num_key_value_heads={num_kv_heads} of {model_name}; "
            f"{one_of(advised)}"
        )
