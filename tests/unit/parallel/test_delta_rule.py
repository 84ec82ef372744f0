"""The CPU's convolution and gated delta rule against the recurrence in float64, token by token."""

from __future__ import annotations

import itertools

import pytest
import torch

from pacs_megatron.parallel.delta_rule import causal_convolution, gated_delta_rule, normalized
from tests.support.policies import hybrid_reference

LENGTHS = (70, 1, 3, 0, 130)
"""Of the packed samples: more than a chunk of 64, more than two, fewer than the kernel, none."""
BOUNDS = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
HEADS = 2


def random_inputs(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    t = sum(LENGTHS)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(1, t, HEADS, *shape, generator=generator, dtype=torch.float64)

    inputs = {
        "query": normalized(draw(5)),
        "key": normalized(draw(5)),
        "value": draw(7),
        "g": -draw().exp(),
        "beta": draw().sigmoid(),
    }
    return {name: x.to(dtype).requires_grad_() for name, x in inputs.items()}


def recurrence(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """[1, t, heads, value], each sample alone."""
    samples = []
    for start, stop in itertools.pairwise(BOUNDS.tolist()):
        if start == stop:
            continue
        heads = []
        for head in range(HEADS):
            query, key, value, g, beta = (x[0, start:stop, head] for x in inputs.values())
            heads.append(hybrid_reference.delta_rule(query / 5**0.5, key, value, g.exp(), beta))
        samples.append(torch.stack(heads, dim=1))
    return torch.cat(samples)[None]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_outputs_and_gradients_equal_the_recurrence(dtype: torch.dtype, tolerance: float) -> None:
    inputs = random_inputs(dtype)
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    expected = recurrence(exact)
    found, _ = gated_delta_rule(**inputs, cu_seqlens=BOUNDS)
    assert found.dtype is dtype and found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)

    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for name, x in inputs.items():
        assert x.grad is not None and exact[name].grad is not None
        torch.testing.assert_close(
            x.grad.double(), exact[name].grad, atol=10 * tolerance, rtol=0, msg=name
        )


def test_a_long_decay_gives_no_overflow() -> None:
    inputs = random_inputs(torch.float32)
    inputs["g"] = torch.full_like(inputs["g"], -50.0)
    found, _ = gated_delta_rule(**inputs, cu_seqlens=BOUNDS)
    assert found.isfinite().all()
    found.sum().backward()
    assert all(x.grad is None or x.grad.isfinite().all() for x in inputs.values())


def test_only_inputs_and_outputs_are_bf16_where_the_weights_are() -> None:
    inputs = random_inputs(torch.bfloat16)
    exact = {name: x.detach().double() for name, x in inputs.items()}
    found, _ = gated_delta_rule(**inputs, cu_seqlens=BOUNDS)
    assert found.dtype is torch.bfloat16
    # One rounding of the output to bf16.
    torch.testing.assert_close(found.double(), recurrence(exact), atol=1e-4, rtol=2**-8)


@pytest.mark.parametrize("kernel", [1, 3, 4])
def test_the_convolution_starts_at_the_border_of_each_sample(kernel: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, sum(LENGTHS), 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, kernel, generator=generator, dtype=torch.float64)
    found, _ = causal_convolution(x, weight, activation="silu", cu_seqlens=BOUNDS)

    rows = []
    for start, stop in itertools.pairwise(BOUNDS.tolist()):
        for token in range(start, stop):
            row = torch.zeros(6, dtype=torch.float64)
            for tap in range(kernel):
                source = token - (kernel - 1 - tap)
                if source >= start:
                    row += weight[:, tap] * x[0, source]
            rows.append(row * row.sigmoid())
    torch.testing.assert_close(found[0], torch.stack(rows), atol=1e-13, rtol=0)


def test_without_bounds_the_tokens_are_one_sample() -> None:
    inputs = random_inputs(torch.float64)
    whole = torch.tensor([0, sum(LENGTHS)])
    first, _ = gated_delta_rule(**inputs)
    second, _ = gated_delta_rule(**inputs, cu_seqlens=whole)
    assert torch.equal(first, second)
