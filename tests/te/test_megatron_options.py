"""`parallel.megatron` reaches Transformer Engine's modules, its optimizer and Megatron's dispatcher."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from pacs_megatron.errors import ConfigError
from tests.support.policies.policy_cases import make_policy
from tests.support.ranks import run_ranks
from tests.support.tiny_families import make_family


def _constructed(tmp_path: Path, family: str, look: Any, **options: Any) -> Any:
    folder = make_family(tmp_path / family, family)
    return run_ranks(lambda _rank, world: look(make_policy(folder, world, dtype="bf16", **options)), 1)[0]


def test_overlap_and_gradient_fusion_are_on_by_default(tmp_path: Path) -> None:
    def look(policy: Any) -> Any:
        layer = policy.models[0].decoder.layers[0]
        linears = (layer.self_attention.linear_qkv, layer.self_attention.linear_proj, layer.mlp.linear_fc1)
        ddp = policy.chunks[0].ddp_config
        return [x.fuse_wgrad_accumulation for x in linears], ddp.overlap_grad_reduce, ddp.overlap_param_gather

    assert _constructed(tmp_path, "qwen3", look, distributed_optimizer=True) == ([True] * 3, True, True)
    off = {"overlap_grad_reduce": False, "gradient_accumulation_fusion": False}
    assert _constructed(tmp_path, "qwen2", look, megatron=off) == ([False] * 3, False, False)


def test_fused_permutation_and_router(tmp_path: Path) -> None:
    def look(policy: Any) -> Any:
        return policy.config.moe_permute_fusion, policy.config.moe_router_fusion

    options = {"moe_permute_fusion": True, "moe_router_fusion": True}
    assert _constructed(tmp_path, "qwen3_moe", look, megatron=options) == (True, True)


def test_flex_dispatcher_without_its_package_is_an_error(tmp_path: Path) -> None:
    folder = make_family(tmp_path / "moe", "qwen3_moe")

    def on_rank(_rank: int, world: int) -> str:
        with pytest.raises((ConfigError, ImportError)) as caught:
            make_policy(folder, world, dtype="bf16", ep=2, megatron={"moe_token_dispatcher_type": "flex"})
        return str(caught.value)

    assert "DeepEP is not installed" in run_ranks(on_rank, 2)[0]


def test_the_refusal_of_the_precision_aware_optimizer_is_still_needed() -> None:
    """Megatron's `init_state_fn` calls `initialize_state(parameter)`, which Transformer Engine 2.11 refuses."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    needed = inspect.signature(FusedAdam.initialize_state).parameters["store_param_remainders"]
    assert needed.default is inspect.Parameter.empty


def test_a_checkpoint_has_no_trace_of_the_head(tmp_path: Path) -> None:
    """The final norm is Transformer Engine's with both heads, so are the keys of a checkpoint, objects included."""
    folder = make_family(tmp_path / "model", "qwen3")

    def keys(head: Any) -> tuple[torch.dtype, set[str]]:
        def on_rank(_rank: int, world: int) -> tuple[torch.dtype, set[str]]:
            from pacs_megatron.policy import state

            model = make_policy(folder, world, dtype="bf16", head=head).models[0]
            sharded = model.sharded_state_dict(metadata=state.sharding_metadata())
            norm = model.decoder.final_layernorm
            assert type(norm).__module__.startswith("transformer_engine.")
            x = torch.randn(3, 1, norm.weight.shape[0], dtype=torch.bfloat16)
            return norm(x).dtype, {entry.key for entry in sharded.values()}

        return run_ranks(on_rank, 1)[0]

    (bf16_type, bf16), (fp32_type, fp32) = keys("bf16"), keys("fp32")
    assert (bf16_type, fp32_type) == (torch.bfloat16, torch.float32)
    assert bf16 == fp32
