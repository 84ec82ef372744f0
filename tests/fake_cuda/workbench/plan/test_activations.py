"""The formulas of `plan` against a trace with local layers, where those do not matter.

With full recomputation the peak of a dense model is in the output layer, beside the layers'
inputs, which every kind of layer keeps. tests/te compares the other formulas.
"""

from __future__ import annotations

import pytest

from tests.support.planned_peak import peak_of

FULL = "parallel.recompute.granularity=full"
FP32 = "precision.head=fp32"


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        pytest.param("grpo-qwen3-8b-1n8g-tp1", [FULL], id="8b"),
        pytest.param("grpo-qwen3-8b-1n8g-tp1", [FULL, FP32], id="fp32", marks=pytest.mark.full),
        pytest.param("grpo-qwen3-32b-4n8g-tp4", [FULL], id="32b", marks=pytest.mark.full),
    ],
)
def test_the_output_layer_beside_kept_inputs(config: str, overrides: list[str]) -> None:
    peak = peak_of(f"configs/runs/{config}.yaml", overrides, transformer_engine=False)

    assert abs(peak.error) < 0.02
    assert abs(peak.error_of_activations) < 0.02
