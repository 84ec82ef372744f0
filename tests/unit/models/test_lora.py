"""The matrices of adapters: which modules have them, their shapes and names."""

import math

import pytest

from pacs_megatron.config.schema import LORA_TARGETS, LoraOptions
from pacs_megatron.errors import ConfigError
from pacs_megatron.models import read_spec, weight_table
from pacs_megatron.models.lora import all_matrices, check_targets, target_of
from pacs_megatron.workbench.plan.known_models import find_config


def table_of(path: str):  # type: ignore[no-untyped-def]
    config = find_config(path)
    assert config is not None
    return weight_table(read_spec(config))


def test_the_matrices_of_qwen3_14b() -> None:
    """Hidden size 5120, 40 heads and 8 key-value heads of 128, intermediate size 17408, 40 layers:
    the sum over modules of rank * (inputs + outputs), by hand.
    """
    options = LoraOptions(rank=16, alpha=32.0)
    matrices = all_matrices(table_of("Qwen/Qwen3-14B"), options)
    widths = 2 * (5120 + 5120) + 2 * (5120 + 1024) + 3 * (5120 + 17408)
    assert sum(math.prod(matrix.shape) for matrix in matrices) == 40 * 16 * widths
    assert len(matrices) == 40 * 7 * 2
    assert matrices[0].name == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert matrices[1].shape == (5120, 16)
    assert {target_of(matrix.hf_name) for matrix in matrices} == set(LORA_TARGETS)


def test_experts_have_none_and_are_named() -> None:
    table = table_of("Qwen/Qwen3-30B-A3B")
    attention = LoraOptions(rank=4, alpha=8.0, targets=("o_proj", "q_proj"))
    check_targets(table, attention)
    assert not any("experts" in matrix.name for matrix in all_matrices(table, attention))
    with pytest.raises(ConfigError) as caught:
        check_targets(table, LoraOptions(rank=4, alpha=8.0))
    expected = (
        "policy.lora.targets contains gate_proj, up_proj, down_proj, but the model (qwen3_moe) has "
        "such modules only in its experts, which have no adapters; use "
        "policy.lora.targets=[q_proj, k_proj, v_proj, o_proj]"
    )
    assert str(caught.value) == expected


def test_the_split_of_a_matrix_is_that_of_its_layer() -> None:
    """The dimension of the outputs of column-parallel layers, of the inputs of the others."""
    matrices = all_matrices(table_of("Qwen/Qwen3-14B"), LoraOptions(rank=2, alpha=1.0))
    for matrix in matrices[:14]:
        is_row_parallel = target_of(matrix.hf_name) in ("o_proj", "down_proj")
        if matrix.kind == "A":
            assert matrix.split_dim == (1 if is_row_parallel else None)
        else:
            assert matrix.split_dim == (None if is_row_parallel else 0)
