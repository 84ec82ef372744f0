"""The frequencies of scaled rotary positions equal transformers'."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pacs_megatron.config.schema import ParallelOptions, PrecisionOptions
from pacs_megatron.models import read_spec
from pacs_megatron.policy import model, precision
from tests.support.tiny_families import LLAMA3_ROPE, YARN_ROPE, config_of

ROTATIONS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 300.0, "factor": 3.0},
    "llama3": LLAMA3_ROPE,
    "yarn": YARN_ROPE,
    "yarn, published": YARN_ROPE
    | {"rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn, not rounded": YARN_ROPE | {"truncate": False, "beta_fast": 9.0, "beta_slow": 0.5},
    "yarn, one dimension": YARN_ROPE | {"beta_fast": 1.1, "beta_slow": 1.0, "truncate": False},
    "yarn, DeepSeek's factor": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.7},
}


@pytest.mark.parametrize("name", ROTATIONS)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_frequencies_and_their_factor(name: str, head_dim: int) -> None:
    rotation = ROTATIONS[name]
    config = config_of("qwen3", {"head_dim": head_dim, "rope_parameters": dict(rotation)})
    spec = read_spec(config.to_dict())
    expected, factor = ROPE_INIT_FUNCTIONS[rotation["rope_type"]](config, torch.device("cpu"))
    torch.testing.assert_close(model.rope_frequencies(spec), expected, rtol=2e-6, atol=0.0)

    machine = precision.inspect_machine()
    arguments = (spec, ParallelOptions(), PrecisionOptions(dtype="fp32"), machine)
    built = model.transformer_config(*arguments)
    assert _factor_of_megatron(built) == pytest.approx(factor, rel=1e-12)
    if name in ("yarn", "yarn, published"):
        # Equation 22 of arXiv:2309.00071, whose temperature divides the logits of attention.
        assert factor == pytest.approx(0.1 * math.log(rotation["factor"]) + 1, rel=1e-12)
        assert not built.apply_rope_fusion


def _factor_of_megatron(config: Any) -> float:
    from megatron.core.transformer import attention

    return float(attention._yarn_get_concentration_factor_from_config(config))
