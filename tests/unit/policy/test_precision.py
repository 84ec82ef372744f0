"""The capabilities of a machine are one line; an unsupported option is rejected with the reason."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, get_args, get_type_hints

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from pacs_megatron.config import schema
from pacs_megatron.config.schema import (
    Fp8Options,
    MegatronOptions,
    ParallelOptions,
    PrecisionOptions,
)
from pacs_megatron.errors import ConfigError
from pacs_megatron.models import load_spec, weight_table
from pacs_megatron.policy import precision
from pacs_megatron.policy.model import transformer_config

H100 = precision.Machine(
    cuda=True,
    capability=(9, 0),
    cuda_version=(13, 0),
    transformer_engine=(2, 11),
    apex="none",
    megatron=(0, 16),
)
CPU = precision.inspect_machine()
ALL = MegatronOptions(
    overlap_grad_reduce=True,
    overlap_param_gather=True,
    gradient_accumulation_fusion=True,
    moe_permute_fusion=True,
    moe_token_dispatcher_type="flex",
    moe_flex_dispatcher_backend="hybridep",
    tp_comm_overlap=True,
    use_precision_aware_optimizer=True,
    exp_avg_dtype="bf16",
    exp_avg_sq_dtype="bf16",
    optimizer_cpu_offload=True,
    optimizer_offload_fraction=0.5,
)


def machine(**changes: Any) -> precision.Machine:
    from dataclasses import replace

    return replace(H100, **changes)


def fp8(recipe: str, **options: Any) -> PrecisionOptions:
    return PrecisionOptions(dtype="bf16", fp8=Fp8Options(recipe=recipe, **options))


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_an_h100_with_transformer_engine_takes_every_recipe(recipe: str) -> None:
    precision.check(fp8(recipe), H100)


@pytest.mark.parametrize(
    ("options", "changes", "reason"),
    [
        (fp8("tensorwise"), {"cuda": False}, "needs a CUDA GPU, but none was found"),
        (
            fp8("tensorwise"),
            {"transformer_engine": None},
            "needs Transformer Engine, which is not installed",
        ),
        (
            fp8("delayed"),
            {"capability": (8, 0)},
            "needs compute capability >= 8.9, this GPU has 8.0",
        ),
        (
            fp8("blockwise"),
            {"capability": (8, 9)},
            "needs compute capability >= 9.0, this GPU has 8.9",
        ),
        (fp8("blockwise"), {"cuda_version": (12, 4)}, "needs CUDA >= 12.9"),
        (
            fp8("delayed", first_last_layers_bf16=1),
            {},
            "cannot be combined with precision.fp8.recipe=delayed",
        ),
        (PrecisionOptions(), {"transformer_engine": (2, 8)}, "needs >= 2.9 and < 2.12"),
        (PrecisionOptions(), {"transformer_engine": (2, 12)}, "needs >= 2.9 and < 2.12"),
        (PrecisionOptions(), {"megatron": (0, 19)}, "needs >= 2.14 and < 2.21"),
        (
            PrecisionOptions(),
            {"megatron": (0, 19), "transformer_engine": (2, 21)},
            "needs >= 2.14 and < 2.21",
        ),
    ],
)
def test_what_cannot_be_done_is_rejected_in_one_line(
    options: PrecisionOptions, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError) as error:
        precision.check(options, machine(**changes))
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_the_log_line_lists_used_and_missing_capabilities() -> None:
    line = precision.describe(fp8("delayed"), H100)
    assert line == (
        "precision bf16, fp8 delayed/hybrid; using Transformer Engine 2.11, FusedAdam of "
        "Transformer Engine; missing: NVIDIA Apex"
    )
    assert "no CUDA" in precision.describe(PrecisionOptions(dtype="fp32"), CPU)
    assert "attention has no fp32" in precision.describe(PrecisionOptions(dtype="fp32"), H100)
    without = precision.describe(PrecisionOptions(), machine(transformer_engine=None))
    assert "using local layers, AdamW of torch; missing: Transformer Engine, NVIDIA Apex" in without


def test_the_log_line_names_apex() -> None:
    with_apex = machine(transformer_engine=None, apex="nvidia", gradient_fusion=True)
    line = precision.describe(PrecisionOptions(), with_apex)
    assert line == (
        "precision bf16, fp8 off; using local layers, FusedAdam of NVIDIA Apex, fused weight "
        "gradients of NVIDIA Apex; missing: Transformer Engine"
    )
    # Megatron-Core prefers Transformer Engine's Adam; Apex's gradient kernel is of local layers.
    both = precision.describe(PrecisionOptions(), machine(apex="nvidia", gradient_fusion=True))
    assert both.endswith("using Transformer Engine 2.11, FusedAdam of Transformer Engine")


def test_apex_without_its_kernels_is_rejected_where_megatron_would_use_it() -> None:
    without_kernels = machine(transformer_engine=None, apex="no kernels")
    with pytest.raises(ConfigError, match=r"without its CUDA kernels \(no amp_C\).*--cuda_ext"):
        precision.check(PrecisionOptions(), without_kernels)
    precision.check(PrecisionOptions(), machine(apex="no kernels"))
    precision.check(PrecisionOptions(), machine(apex="no kernels", cuda=False))


def test_the_fused_gradient_needs_a_kernel() -> None:
    """Apex's kernel computes it in the local layers, Transformer Engine's in its own."""
    local = machine(transformer_engine=None)
    with_apex = machine(transformer_engine=None, apex="nvidia", gradient_fusion=True)
    asked = MegatronOptions(gradient_accumulation_fusion=True)

    def is_on(of_machine: precision.Machine, dtype: torch.dtype) -> bool:
        options = precision.megatron_options(
            TransformerConfig, MegatronOptions(), of_machine, dtype
        )
        return bool(options["gradient_accumulation_fusion"])

    assert is_on(with_apex, torch.bfloat16)
    assert not is_on(with_apex, torch.float32), "its products of fp32 may have 16 bits"
    assert not is_on(local, torch.bfloat16)
    precision.check_kernels(asked, torch.bfloat16, with_apex)
    with pytest.raises(ConfigError, match="needs Transformer Engine, or NVIDIA Apex with"):
        precision.check_kernels(asked, torch.bfloat16, local)
    precision.check_kernels(asked, torch.bfloat16, H100)
    precision.check_kernels(MegatronOptions(), torch.bfloat16, local)


def test_moments_in_bf16_need_transformer_engines_adam() -> None:
    asked = MegatronOptions(use_precision_aware_optimizer=True)
    with_apex = machine(transformer_engine=None, apex="nvidia")
    with pytest.raises(ConfigError, match="needs Transformer Engine's FusedAdam"):
        precision.check_kernels(asked, torch.bfloat16, with_apex)
    precision.check_kernels(asked, torch.bfloat16, H100)
    on_host = asked.model_copy(update={"optimizer_cpu_offload": True})
    precision.check_kernels(on_host, torch.bfloat16, with_apex)


def test_fp32_never_takes_transformer_engines_attention() -> None:
    assert precision.uses_transformer_engine(torch.bfloat16, H100)
    assert not precision.uses_transformer_engine(torch.float32, H100)
    assert not precision.uses_transformer_engine(torch.bfloat16, machine(transformer_engine=None))


def test_options_of_megatron_have_its_own_names_and_types() -> None:
    """Every field of `parallel.megatron` is a field of one of Megatron's dataclasses, which accept
    its values.
    """
    targets = (TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
    found = set()
    for target in targets:
        found |= set(precision.megatron_options(target, ALL, H100, torch.bfloat16))
    assert found == set(MegatronOptions.model_fields)
    for target in targets:
        hints = get_type_hints(target)
        for name, value in precision.megatron_options(target, ALL, H100, torch.bfloat16).items():
            hint = hints[name]
            assert value in get_args(hint) if get_args(hint) else isinstance(value, hint), (
                target,
                name,
            )


def test_rejected_options_are_megatrons_and_name_their_reason() -> None:
    names = set()
    for target in (TransformerConfig, OptimizerConfig):
        for field in dataclasses.fields(target):
            names.add(field.name)
    for name in schema._INCOMPATIBLE_MEGATRON_OPTIONS:
        assert name in names
        with pytest.raises(
            ValueError, match=f"{name} does not combine with this project: .+; remove it"
        ):
            MegatronOptions.model_validate({name: True})


def test_overlap_and_gradient_fusion_are_on_with_cuda() -> None:
    defaults = MegatronOptions()
    ddp = precision.megatron_options(DistributedDataParallelConfig, defaults, H100, torch.bfloat16)
    assert ddp["overlap_grad_reduce"] and ddp["overlap_param_gather"]
    model = precision.megatron_options(TransformerConfig, defaults, H100, torch.bfloat16)
    assert model["gradient_accumulation_fusion"]
    assert not precision.megatron_options(TransformerConfig, defaults, H100, torch.float32)[
        "gradient_accumulation_fusion"
    ]
    ddp = precision.megatron_options(DistributedDataParallelConfig, defaults, CPU, torch.bfloat16)
    assert not ddp["overlap_grad_reduce"] and not ddp["overlap_param_gather"]
    off = precision.megatron_options(
        DistributedDataParallelConfig,
        MegatronOptions(overlap_grad_reduce=False),
        H100,
        torch.bfloat16,
    )
    assert not off["overlap_param_gather"]


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_recipes_become_what_megatrons_config_accepts(tiny_qwen3: Any, recipe: str) -> None:
    """Megatron's own validation runs; rotary fusion is put aside because its kernel is not
    installed here.
    """
    arguments = precision.megatron_arguments(fp8(recipe), H100) | {"apply_rope_fusion": False}
    config = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=4, **arguments)
    assert (config.fp8, config.fp8_recipe) == ("hybrid", recipe)
    edges = precision.megatron_arguments(fp8("tensorwise", first_last_layers_bf16=1), H100)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        **(edges | {"apply_rope_fusion": False}),
    )
    assert config.first_last_layers_bf16 and config.num_layers_at_start_in_bf16 == 1


def test_tokens_are_padded_to_what_fp8_products_need() -> None:
    assert precision.token_multiple(PrecisionOptions()) == 1
    assert precision.token_multiple(fp8("tensorwise")) == 16
    assert precision.token_multiple(fp8("blockwise")) == 128


def test_the_config_of_this_machine_is_valid(tiny_qwen3: Any) -> None:
    spec = load_spec(tiny_qwen3)
    config = transformer_config(spec, ParallelOptions(), PrecisionOptions(dtype="bf16"), CPU)
    assert config.params_dtype is torch.bfloat16 and config.use_cpu_initialization
    assert config.calculate_per_token_loss, "pure sums"
    assert weight_table(spec).padded_vocab % 128 == 0


def test_megatrons_output_layer_rejects_the_fused_gradient_without_apex() -> None:
    """`build_chunks` sets this private flag.

    The flag goes when Megatron accepts Transformer Engine's kernel itself.
    """
    from megatron.core.tensor_parallel import layers

    source = inspect.getsource(layers.ColumnParallelLinear.__init__)
    assert "gradient_accumulation_fusion and not _grad_accum_fusion_available" in source
    assert hasattr(layers, "_grad_accum_fusion_available")
