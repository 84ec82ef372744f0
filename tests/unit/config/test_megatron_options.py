"""Options of `parallel.megatron` and `recompute.modules` that the run does not use or support are one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.config.checks import find_problems
from pacs_megatron.errors import ConfigError
from pacs_megatron.models.shape import shape_problems
from pacs_megatron.plan.known_models import find_spec

DENSE = Path(__file__).parents[3] / "configs" / "runs" / "pacs-qwen3-8b-1n8g-tp2.yaml"


def problems(*overrides: str) -> list[str]:
    config = load_config(DENSE, list(overrides)).config
    spec = find_spec("Qwen/Qwen3-8B")
    assert spec is not None
    return find_problems(config) + shape_problems(config, spec, "Qwen3-8B")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["megatron.overlap_grad_reduce=false", "megatron.overlap_param_gather=true"],
            "requires parallel.megatron.over",
        ),
        (["megatron.overlap_param_gather=true", "distributed_optimizer=false"], "requires parallel.distributed_optimi"),
        (["megatron.moe_flex_dispatcher_backend=hybridep"], "requires parallel.megatron.moe_token_dispatcher_type"),
        (["megatron.moe_router_fusion=true"], "moe_router_fusion is for a model with experts, Qwen3-8B has none"),
        (["recompute.granularity=full", "recompute.modules=[mlp]"], "modules is used by granularity=selective only"),
        (["recompute.granularity=selective", "recompute.modules=[moe]"], "has moe, which Qwen3-8B does not contain"),
    ],
)
def test_an_option_without_use_is_an_error(overrides: list[str], message: str) -> None:
    with_prefix = [f"parallel.{override}" for override in overrides]
    try:
        found = problems(*with_prefix)
    except ConfigError as error:
        found = [str(error)]
    assert any(message in problem for problem in found), found


def test_fused_options_need_gpus_and_bf16() -> None:
    assert not problems("parallel.megatron.gradient_accumulation_fusion=true")
    with pytest.raises(ConfigError, match=r"requires precision.dtype=bf16, got fp32"):
        problems("parallel.megatron.gradient_accumulation_fusion=true", "precision.dtype=fp32")


def test_a_refused_option_names_its_reason_and_an_unknown_one_its_name() -> None:
    with pytest.raises(ConfigError, match=r"tp_comm_overlap does not combine with this project: .*one fixed shape"):
        load_config(DENSE, ["parallel.megatron.tp_comm_overlap=true"])
    with pytest.raises(ConfigError, match=r"parallel.megatron.overlap_grad_reduction"):
        load_config(DENSE, ["parallel.megatron.overlap_grad_reduction=true"])
