"""FLOPs by Megatron-LM's formula, against its own values."""

from __future__ import annotations

import numpy as np
import pytest
import transformers

from pacs_megatron.models import read_spec
from pacs_megatron.models.flops import PassedTokens, forward_flops, total_flops, update_flops
from pacs_megatron.workbench.plan.known_models import find_spec

LENS = np.array([100, 2000, 777])
# num_floating_point_operations of megatron-core 0.19.2 (megatron/training/training.py) with these
# lengths as `total_real_tokens_in_batch` and `seqlen_squared_sum_in_batch`.
BY_MEGATRON = {
    "Qwen/Qwen3-8B": 134722427387904.0,
    "Qwen/Qwen3-30B-A3B": 57730450194432.0,
}


@pytest.mark.parametrize("name", BY_MEGATRON)
def test_an_update_has_the_flops_of_megatrons_formula(name: str) -> None:
    spec = find_spec(name)
    assert spec is not None
    trained = PassedTokens()
    trained.add(LENS[:1], LENS[:1])
    trained.add(LENS[1:], LENS[1:])
    assert total_flops(spec, 151936, PassedTokens(), trained) == BY_MEGATRON[name]
    assert total_flops(spec, 151936, trained, PassedTokens()) == BY_MEGATRON[name] / 3


def test_a_hybrid_has_the_flops_of_megatrons_formula() -> None:
    """Its terms of a gated delta net, with the numbers of Qwen3.5-35B-A3B's config class."""
    spec = read_spec(
        transformers.Qwen3_5MoeTextConfig(
            rope_parameters={"rope_type": "default", "rope_theta": 1e7}
        ).to_dict()
    )
    hidden = 2048
    heads = 32
    keys = 16 * 128
    values = heads * 128
    delta_net = (
        hidden * (2 * keys + 2 * values + 2 * heads)
        + 4 * (2 * keys + values)
        + heads * 128**2 * 4
        + hidden * values
    )
    queries = 16 * 256
    kv = 2 * 256
    attention = hidden * (2 * queries + 2 * kv + queries)
    mlp = 3 * hidden * (8 * 512 + 512)
    layers = 30 * delta_net + 10 * attention + 40 * mlp
    tokens = PassedTokens(1000.0, 250000.0, 0.0)
    expected = 2 * layers * 1000 + 10 * 2 * queries * 250000
    assert forward_flops(spec, 248320, tokens) == expected


def test_logits_are_counted_where_they_are_computed() -> None:
    spec = find_spec("Qwen/Qwen3-8B")
    assert spec is not None
    some = PassedTokens()
    some.add(LENS, LENS // 2)
    every = PassedTokens()
    every.add(LENS, LENS)
    fewer = int(LENS.sum() - (LENS // 2).sum())
    head = 2 * spec.hidden_size * 151936
    assert forward_flops(spec, 151936, every) - forward_flops(spec, 151936, some) == head * fewer

    critic = spec.critic()
    values = forward_flops(critic, 151936, some)
    assert (
        forward_flops(spec, 151936, some) - values == (head - 2 * spec.hidden_size) * some.outputs
    )


def test_frozen_matrices_have_one_product_in_the_backward_pass() -> None:
    """Qwen3-8B (36 layers, hidden 4096, 32 heads and 8 key-value heads of 128, MLP 12288), by hand:
    a frozen matrix has 4 FLOPs for each element and token, an adapter's 6, and the scores of the
    attention their 3 passes.
    """
    spec = find_spec("Qwen/Qwen3-8B")
    assert spec is not None
    tokens = PassedTokens(inputs=1000.0, squares=300000.0, outputs=400.0)
    matrices = 36 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288)
    scores = 36 * 2 * 4096 * 300000
    head = 4 * 4096 * 151936 * 400
    expected = 4 * matrices * 1000 + 3 * scores + head + 6 * 7_000_000 * 1000
    assert update_flops(spec, 151936, tokens, 7_000_000) == expected
