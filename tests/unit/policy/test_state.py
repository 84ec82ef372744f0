"""The state of torch's random generators in a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pacs_megatron.errors import CheckpointError
from pacs_megatron.policy.state import load_rng_state, rng_state


def test_the_state_comes_back() -> None:
    state = rng_state()
    drawn = torch.rand(3)
    load_rng_state(state, Path("rng"))
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize(
    "state", [{}, {"cpu": torch.zeros(1, dtype=torch.uint8)}, {"cpu": torch.zeros(5056)}]
)
def test_another_tensor_is_named(state: dict[str, torch.Tensor]) -> None:
    with pytest.raises(CheckpointError, match="step_000002/rng: no state of torch's generators"):
        load_rng_state(state, Path("step_000002/rng"))
