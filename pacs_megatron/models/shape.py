"""Checks of a configuration against the model's shape."""

import math
from collections.abc import Iterator

from pacs_megatron.config.checks import (
    changed,
    divisors,
    max_response_tokens,
    max_sequence_tokens,
    one_of,
    response_key,
)
from pacs_megatron.config.schema import RunConfig
from pacs_megatron.models.config_reader import ModelSpec


def shape_problems(config: RunConfig, shape: ModelSpec, model_name: str) -> list[str]:
    """Problems of the layout with the model's heads, layers, experts and length; `model_name`
    appears in messages.
    """
    checks = (_layout, _fp8_shape, _positions, _server_shape)
    return [problem for check in checks for problem in check(config, shape, model_name)]


def _layout(config: RunConfig, shape: ModelSpec, model_name: str) -> Iterator[str]:
    parallel = config.parallel
    moe = shape.moe
    # Names as in the checkpoint's config.json.
    ffn = (
        ("intermediate_size", shape.ffn_size)
        if moe is None
        else ("moe_intermediate_size", moe.expert_ffn_size)
    )
    sizes = [
        ("num_key_value_heads", shape.num_kv_heads),
        ("num_attention_heads", shape.num_heads),
        ffn,
    ]
    common = divisors(math.gcd(*(size for _, size in sizes)))
    for name, size in sizes:
        if size % parallel.tp:
            yield f"parallel.tp={parallel.tp} does not divide {name}={size} of {model_name}; {one_of(common)}"
            break
    stages = parallel.pp * (parallel.vpp or 1)
    if shape.num_layers % stages:
        label = "pp" if parallel.vpp is None else "pp*vpp"
        yield (
            f"parallel.{label}={stages} does not divide num_hidden_layers={shape.num_layers} of "
            f"{model_name}; make it "
            f"{one_of(divisors(shape.num_layers)).removeprefix('use ')}"
        )
    wrong = {"mlp"} if moe is not None else {"moe", "moe_act"}
    for module in wrong & set(parallel.recompute.modules):
        yield f"parallel.recompute.modules has {module}, which {model_name} does not contain; remove it"
    for name in changed(parallel.megatron):
        if name.startswith("moe_") and moe is None:
            yield f"parallel.megatron.{name} is for a model with experts, {model_name} has none; remove it"
    for key, value, default in (
        ("policy.routing", config.policy.routing, "own"),
        ("parallel.ep", parallel.ep, 1),
    ):
        if value != default and moe is None:
            yield f"{key}={value}, but {model_name} has no experts; set {key}={default}"
    if moe is not None and parallel.tp > 1 and not parallel.sequence_parallel:
        yield (
            f"parallel.sequence_parallel=false with parallel.tp={parallel.tp} and {model_name}, a "
            "mixture-of-experts model, which requires parallel.sequence_parallel=true (Megatron's "
            "experts expect tokens sharded over the tensor-parallel ranks); set it"
        )
    if moe is not None and moe.num_experts % parallel.ep:
        yield (
            f"parallel.ep={parallel.ep} does not divide num_experts={moe.num_experts} of "
            f"{model_name}; "
            f"{one_of(divisors(moe.num_experts))}"
        )


def _fp8_shape(config: RunConfig, shape: ModelSpec, model_name: str) -> Iterator[str]:
    """Transformer Engine's `assert_dim_for_fp8_exec` and `assert_dim_for_all_gather`, which fail at
    the first forward.
    """
    fp8 = config.precision.fp8
    tp = config.parallel.tp
    moe = shape.moe
    if fp8 is None:
        return
    heads = shape.num_heads + 2 * shape.num_kv_heads
    sizes = (
        ("(num_attention_heads + 2 * num_key_value_heads) * head_dim", heads * shape.head_dim),
        ("num_attention_heads * head_dim", shape.num_heads * shape.head_dim),
        ("intermediate_size", shape.ffn_size)
        if moe is None
        else ("moe_intermediate_size", moe.expert_ffn_size),
    )
    wrong = [f"{name}={size}" for name, size in sizes if size % (16 * tp)]
    if wrong:
        yield (
            f"precision.fp8 needs multiples of 16 on every tensor-parallel rank, but {model_name} "
            f"has {' and '.join(wrong)} with parallel.tp={tp}; "
            f"{'lower parallel.tp or ' if tp > 1 else ''}remove precision.fp8"
        )
    gathers_blocks = fp8.recipe == "blockwise" and config.parallel.sequence_parallel
    multiple = 128 if gathers_blocks else 16
    if shape.hidden_size % multiple:
        yield (
            f"precision.fp8.recipe={fp8.recipe}{' with parallel.sequence_parallel' if gathers_blocks else ''} needs a "
            f"multiple of {multiple} as hidden_size, {model_name} has {shape.hidden_size}; "
            f"{'use recipe tensorwise' if gathers_blocks else 'remove precision.fp8'}"
        )


def _positions(config: RunConfig, shape: ModelSpec, model_name: str) -> Iterator[str]:
    longest = max_sequence_tokens(config)
    limit = shape.max_positions
    scaling = shape.rope_scaling
    if scaling is not None and scaling["rope_type"] == "linear":
        limit = int(
            limit * float(scaling["factor"])
        )  # max_position_embeddings is the length before scaling
    if longest > limit:
        yield (
            f"{response_key(config)}={max_response_tokens(config)} + "
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} = "
            f"{longest} positions, but {model_name} has max_position_embeddings={limit}; lower "
            "one of them"
        )


def _server_shape(config: RunConfig, shape: ModelSpec, model_name: str) -> Iterator[str]:
    """SGLang shards heads evenly, and shards key-value heads evenly or replicates each equally
    often.
    """
    servers = config.rollout.managed_servers
    if servers is None:
        return
    works = [
        tp
        for tp in divisors(shape.num_heads)
        if shape.num_kv_heads % tp == 0 or tp % shape.num_kv_heads == 0
    ]
    if servers.tp not in works:
        yield (
            f"rollout.servers.tp={servers.tp} does not divide "
            f"num_attention_heads={shape.num_heads} and "
            f"num_key_value_heads={shape.num_kv_heads} of {model_name}; "
            f"{one_of([tp for tp in works if tp <= 16])}"
        )
