"""Options of `parallel.megatron` and `recompute.modules` that the run does not use or support are
one clear line.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pacs_megatron.config import load_config
from pacs_megatron.config.checks import find_problems
from pacs_megatron.errors import ConfigError
from pacs_megatron.models.shape import shape_problems
from pacs_megatron.workbench.plan.known_models import find_spec
from pacs_megatron.workbench.plan.plan import make_plan
from pacs_megatron.workbench.plan.state import state_items

DENSE = Path(__file__).parents[3] / "configs" / "runs" / "pacs-qwen3-8b-1n8g-tp2.yaml"


CPU_ADAM = ["megatron.use_precision_aware_optimizer=true", "megatron.optimizer_cpu_offload=true"]


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
        (
            ["megatron.overlap_param_gather=true", "distributed_optimizer=false"],
            "requires parallel.distributed_optimi",
        ),
        (
            ["megatron.moe_flex_dispatcher_backend=hybridep"],
            "requires parallel.megatron.moe_token_dispatcher_type",
        ),
        (
            ["megatron.moe_permute_fusion=true"],
            "moe_permute_fusion is for a model with experts, Qwen3-8B has none",
        ),
        (
            ["megatron.tp_comm_overlap=true", "sequence_parallel=false"],
            "requires parallel.sequence_parallel=true",
        ),
        (
            ["megatron.exp_avg_dtype=bf16"],
            "requires parallel.megatron.use_precision_aware_optimizer",
        ),
        (
            ["megatron.use_precision_aware_optimizer=true", "distributed_optimizer=false"],
            "requires parallel.distributed",
        ),
        (
            ["megatron.optimizer_cpu_offload=true"],
            "requires parallel.megatron.use_precision_aware_optimizer",
        ),
        (
            [*CPU_ADAM, "megatron.exp_avg_dtype=bf16"],
            "optimizer_cpu_offload=true requires parallel.megatron.exp_avg_dtype=fp32",
        ),
        (
            ["megatron.optimizer_offload_fraction=0.5"],
            "requires parallel.megatron.optimizer_cpu_offload",
        ),
        (
            ["recompute.granularity=full", "recompute.modules=[mlp]"],
            "requires parallel.recompute.granularity=selective",
        ),
        (
            ["recompute.granularity=selective", "recompute.modules=[moe]"],
            "has moe, which Qwen3-8B does not contain",
        ),
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


def test_one_off_load_of_the_optimizer() -> None:
    options = [f"parallel.{option}" for option in CPU_ADAM]
    with pytest.raises(ConfigError, match=r"requires policy.offload=none, got optimizer"):
        problems(*options, "policy.offload=optimizer")


def test_plan_counts_the_optimizers_and_the_buffers() -> None:
    """By hand: moments of 4 or 8 bytes, none on the GPU with all of Adam on the CPU; twelve bf16
    buffers.
    """

    def planned(*options: str) -> tuple[dict[str, float], float]:
        on_gpu = ["policy.offload=none", *(f"parallel.megatron.{option}" for option in options)]
        plan = make_plan(load_config(DENSE, on_gpu))
        items = state_items(plan.config, plan.spec, plan.layout, 0)
        return {
            item.name.split(" (")[0]: item.num_bytes for item in items
        }, plan.host_bytes_per_rank

    plain, plain_host = planned()
    small, _ = planned(
        "use_precision_aware_optimizer=true", "exp_avg_dtype=bf16", "exp_avg_sq_dtype=bf16"
    )
    assert (
        small["Adam moments"] * 2 == plain["Adam moments"]
        and small["master weights"] == plain["master weights"]
    )
    moved, host = planned("use_precision_aware_optimizer=true", "optimizer_cpu_offload=true")
    assert moved["Adam moments"] == moved["master weights"] == 0
    assert host - plain_host == 2 * plain["Adam moments"]  # and fp32 weights and gradients
    tokens = load_config(DENSE, []).config.batch.tokens_per_microbatch
    assert (
        planned("tp_comm_overlap=true")[0]["buffers of tp_comm_overlap"] == 12 * tokens * 4096 * 2
    )


def test_communication_buffers_have_no_blockwise_form() -> None:
    """transformer_engine/pytorch/module/base.py, fill_userbuffers_buffer_for_all_gather:

    "Unsupported quantizer".
    """
    overlap = "parallel.megatron.tp_comm_overlap=true"
    assert not problems(overlap, "precision.fp8={recipe: tensorwise}")
    with pytest.raises(
        ConfigError, match=r"requires precision.fp8.recipe=tensorwise \| delayed, got blockwise"
    ):
        problems(overlap, "precision.fp8={recipe: blockwise, format: e4m3}")


def test_a_rejected_option_names_its_reason_and_an_unknown_one_its_name() -> None:
    with pytest.raises(
        ConfigError,
        match=r"fp8_param does not combine with this project: .*read the weights in bf16",
    ):
        load_config(DENSE, ["parallel.megatron.fp8_param=true"])
    with pytest.raises(ConfigError, match=r"parallel.megatron.overlap_grad_reduction"):
        load_config(DENSE, ["parallel.megatron.overlap_grad_reduction=true"])
