"""Traces of experts need the custom operators of a recent Transformer Engine."""

import pytest


@pytest.fixture(autouse=True)
def _skip_experts_on_an_old_version(request: pytest.FixtureRequest) -> None:
    from transformer_engine.pytorch import permutation

    has_experts = any(word in request.node.name for word in ("a3b", "experts"))
    if has_experts and not hasattr(permutation, "moe_permute_mask_map_forward"):
        pytest.skip("Transformer Engine 2.11 permutes tokens by Triton's kernels, on a GPU only")
