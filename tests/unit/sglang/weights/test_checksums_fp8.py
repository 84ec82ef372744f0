"""Blockwise FP8 against an independent, element-by-element construction of e4m3 rounding."""

from __future__ import annotations

import bisect

import pytest
import torch

from pacs_megatron.sglang.weights.bucket import is_quantized, quantize_blockwise, scale_name


def e4m3_values() -> list[float]:
    """All finite non-negative values of e4m3fn from its definition: bias 7, 3 bits of mantissa, no
    infinity.
    """
    subnormal = [m * 2.0**-9 for m in range(8)]
    normal = []
    for e in range(1, 16):
        for m in range(8):
            if not (e == 15 and m == 7):
                normal.append((1 + m / 8) * 2.0 ** (e - 7))
    return subnormal + normal


VALUES = e4m3_values()


def round_e4m3(x: float) -> float:
    """To the nearest value, ties to the even mantissa."""
    size = min(abs(x), 448.0)
    above = bisect.bisect_left(VALUES, size)
    if VALUES[min(above, len(VALUES) - 1)] == size:
        best = above
    else:
        low = VALUES[above - 1]
        high = VALUES[above]
        best = (
            above
            if size - low > high - size or (size - low == high - size and above % 2 == 0)
            else above - 1
        )
    return VALUES[best] if x >= 0 else -VALUES[best]


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 70), (3, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(shape) * torch.logspace(-4, 1, shape[1])).to(dtype)
    values, scale_inv = quantize_blockwise(weight)
    assert values.dtype is torch.float8_e4m3fn
    assert values.shape == weight.shape
    assert scale_inv.dtype is torch.float32
    assert scale_inv.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    for i in range(0, shape[0], 128):
        for j in range(0, shape[1], 128):
            block = weight[i : i + 128, j : j + 128].float()
            scale = float(block.abs().max() / 448)
            assert float(scale_inv[i // 128, j // 128]) == pytest.approx(scale, rel=1e-7)
            got = values[i : i + 128, j : j + 128].float()
            for row, column in torch.randint(0, min(block.shape), (200, 2)).tolist():
                exact = float(block[row, column]) / float(scale_inv[i // 128, j // 128])
                expected = round_e4m3(exact)
                # A quotient within fp32 rounding of a tie may go either way.
                step = abs(round_e4m3(expected * 1.07) - expected) or 2.0**-9
                assert abs(float(got[row, column]) - expected) <= (step if _is_tie(exact) else 0)
            error = (got * scale_inv[i // 128, j // 128] - block).abs()
            assert bool((error <= block.abs() / 16 * 1.001 + scale * 2.0**-10 * 1.001).all())


def _is_tie(x: float) -> bool:
    size = abs(x)
    above = bisect.bisect_left(VALUES, size)
    if above in (0, len(VALUES)):
        return False
    middle = (VALUES[above - 1] + VALUES[above]) / 2
    return abs(size - middle) <= 1e-6 * max(size, 2.0**-9)


def test_zeros_and_the_largest_value() -> None:
    weight = torch.zeros(128, 256)
    weight[0, 200] = -3.0
    values, scale_inv = quantize_blockwise(weight)
    assert scale_inv.tolist() == [[1.0, pytest.approx(3.0 / 448)]]
    assert float(values[0, 200].float()) == -448.0
    assert int(values.float().count_nonzero()) == 1


def test_which_weights_are_quantized() -> None:
    assert is_quantized("model.layers.0.self_attn.q_proj.weight")
    assert is_quantized("model.layers.0.mlp.experts.3.down_proj.weight")
    for name in (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.mlp.gate.weight",
    ):
        assert not is_quantized(name)
    assert not is_quantized("model.layers.0.self_attn.q_proj.bias")
    assert scale_name("a.q_proj.weight") == "a.q_proj.weight_scale_inv"
