"""Checks of a configuration against the model's shape. `launch` calls them, as `models` is above this layer."""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from pacs_megatron.config.checks import (
    Problem,
    divisors,
    max_response_tokens,
    max_sequence_tokens,
    one_of,
    response_key,
)
from pacs_megatron.config.schema import RunConfig


class ExpertShape(Protocol):
    """Sizes of a mixture-of-experts model's experts."""

    @property
    def num_experts(self) -> int: ...
    @property
    def expert_ffn_size(self) -> int: ...


class ModelShape(Protocol):
    """Sizes that the layout must divide. `pacs_megatron.models.ModelSpec` implements it."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def ffn_size(self) -> int: ...
    @property
    def max_positions(self) -> int: ...
    @property
    def rope_scaling(self) -> Mapping[str, Any] | None: ...
    @property
    def moe(self) -> ExpertShape | None: ...


def shape_problems(config: RunConfig, shape: ModelShape, model_name: str) -> list[Problem]:
    """Problems of the layout with the model's heads, layers, experts and length; `model_name` appears in messages."""
    return list(_shape(config, shape, model_name))


def _shape(config: RunConfig, shape: ModelShape, model_name: str) -> Iterator[Problem]:
    parallel, moe = config.parallel, shape.moe
    # Names as in the checkpoint's config.json.
    ffn = ("intermediate_size", shape.ffn_size) if moe is None else ("moe_intermediate_size", moe.expert_ffn_size)
    sizes = [("num_key_value_heads", shape.num_kv_heads), ("num_attention_heads", shape.num_heads), ffn]
    common = divisors(math.gcd(*(size for _, size in sizes)))
    for name, size in sizes:
        if size % parallel.tp:
            yield Problem(
                "parallel.tp",
                f"parallel.tp={parallel.tp} does not divide {name}={size} of {model_name}; {one_of(common)}",
            )
            break
    stages = parallel.pp * (parallel.vpp or 1)
    if shape.num_layers % stages:
        key, label = ("parallel.pp", "pp") if parallel.vpp is None else ("parallel.vpp", "pp*vpp")
        yield Problem(
            key,
            f"parallel.{label}={stages} does not divide num_hidden_layers={shape.num_layers} of {model_name}; make it "
            f"{one_of(divisors(shape.num_layers)).removeprefix('use ')}",
        )
    if parallel.ep > 1 and moe is None:
        yield Problem("parallel.ep", f"parallel.ep={parallel.ep}, but {model_name} has no experts; set parallel.ep=1")
    if moe is not None and parallel.tp > 1 and not parallel.sequence_parallel:
        yield Problem(
            "parallel.sequence_parallel",
            f"parallel.tp={parallel.tp} with {model_name}, a mixture-of-experts model, requires "
            "parallel.sequence_parallel=true (Megatron's experts expect tokens sharded over the tensor-parallel ranks); set it",
        )
    if moe is not None and moe.num_experts % parallel.ep:
        yield Problem(
            "parallel.ep",
            f"parallel.ep={parallel.ep} does not divide num_experts={moe.num_experts} of {model_name}; "
            f"{one_of(divisors(moe.num_experts))}",
        )
    yield from _positions(config, shape, model_name)
    yield from _server_shape(config, shape, model_name)


def _positions(config: RunConfig, shape: ModelShape, model_name: str) -> Iterator[Problem]:
    longest, limit = max_sequence_tokens(config), shape.max_positions
    scaling = shape.rope_scaling
    if scaling is not None and scaling["rope_type"] == "linear":
        limit = int(limit * float(scaling["factor"]))  # max_position_embeddings is the length before scaling
    if longest > limit:
        yield Problem(
            response_key(config),
            f"data.max_prompt_tokens={config.data.max_prompt_tokens} + {response_key(config)}={max_response_tokens(config)} = "
            f"{longest} positions, but {model_name} has max_position_embeddings={limit}; lower one of them",
        )


def _server_shape(config: RunConfig, shape: ModelShape, model_name: str) -> Iterator[Problem]:
    """SGLang shards heads evenly, and shards key-value heads evenly or replicates each equally often."""
    servers = config.rollout.managed_servers
    if servers is None:
        return
    works = [tp for tp in divisors(shape.num_heads) if shape.num_kv_heads % tp == 0 or tp % shape.num_kv_heads == 0]
    if servers.tp not in works:
        yield Problem(
            "rollout.servers.tp",
            f"rollout.servers.tp={servers.tp} does not divide num_attention_heads={shape.num_heads} and "
            f"num_key_value_heads={shape.num_kv_heads} of {model_name}; {one_of([tp for tp in works if tp <= 16])}",
        )
