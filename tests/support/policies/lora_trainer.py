"""LoRA by hand on transformers (Hu et al. 2021, section 4.1): h = W0 x + alpha / r * B A x."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.policies.plain_trainer import PlainTrainer
from tests.support.policies.policy_cases import OPTIMIZER
from tests.support.tiny_models import make_tiny_qwen3


class LoraTrainer(PlainTrainer):
    """A frozen transformers model in float64, and AdamW on the matrices A and B.

    `matrices` has them under PEFT's names.
    """

    def __init__(
        self,
        folder: Path,
        matrices: Mapping[str, np.ndarray],
        *,
        rank: int,
        alpha: float,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__(folder, dtype=dtype)
        self.model.requires_grad_(False)
        self.scale = alpha / rank
        self.matrices = {
            name: torch.tensor(values, dtype=dtype, requires_grad=True)
            for name, values in matrices.items()
        }
        self.num_adapted = 0
        for name, layer in self.model.named_modules():
            prefix = f"base_model.model.{name}."
            if f"{prefix}lora_A.weight" in self.matrices:
                self.num_adapted += 1
                layer.register_forward_hook(self._term(prefix))
        assert 2 * self.num_adapted == len(self.matrices)
        self.optimizer = torch.optim.AdamW(
            self.matrices.values(),
            lr=OPTIMIZER["lr"],
            betas=(0.9, 0.95),
            eps=OPTIMIZER["adam_eps"],
            weight_decay=0.0,
        )

    def _term(self, prefix: str) -> Any:
        down = self.matrices[f"{prefix}lora_A.weight"]
        up = self.matrices[f"{prefix}lora_B.weight"]

        def hook(_layer: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            term: torch.Tensor = (inputs[0] @ down.T) @ up.T
            return output + self.scale * term

        return hook

    def update(self, facts: Any, tokens: Any, loss: Any) -> tuple[float, float]:
        self.model.parameters = self.matrices.values  # what the clipping reads
        return super().update(facts, tokens, loss)

    def adapters(self) -> dict[str, np.ndarray]:
        """A and B under PEFT's names."""
        return {name: matrix.detach().numpy().copy() for name, matrix in self.matrices.items()}


def random_matrices(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, np.ndarray]:
    """Values that make every adapter visible, B included: fp32."""
    rng = np.random.default_rng(seed)
    matrices = {}
    for name, shape in shapes.items():
        spread = 0.3 if "lora_A" in name else 0.1
        matrices[name] = rng.normal(0, spread, shape).astype(np.float32)
    return matrices


# --------------------------------------------------------------------------------------------------
# The case of tests/golden/make_peft_golden.py

PEFT_CASE: dict[str, Any] = {
    "rank": 2,
    "alpha": 3,
    "targets": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}


def peft_base(folder: Path) -> Path:
    """The frozen model of the case."""
    return make_tiny_qwen3(
        folder,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        head_dim=8,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )


def nll(model: Any, seed: int) -> torch.Tensor:
    """The mean negative log-likelihood of 12 random tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 64, (1, 12), generator=generator)
    logprobs = torch.log_softmax(model(ids).logits[0, :-1], dim=-1)
    return -logprobs.gather(1, ids[0, 1:, None]).mean()
