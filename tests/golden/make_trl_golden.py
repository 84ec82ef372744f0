"""Writes trl_golden.json: losses and gradients of TRL's GRPOTrainer and RLOOTrainer on fixed
tensors, in float64.

Not a test, and TRL is in no environment of the project. In an environment of its own:
    pip install trl==1.16.0 && python tests/golden/make_trl_golden.py

The trainers' own `_compute_loss` runs on a stand-in for `self` with the attributes that it reads;
log-probs and entropies are inputs. One micro-batch, no gradient accumulation.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

LENS = [3, 5, 1, 4, 2, 5]
ADVANTAGES = [1.25, -0.75, 0.5, -1.0, 0.0, 2.0]
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.1},
    "grpo-kl": {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.1, "beta": 0.3},
    "grpo-token-mean-entropy": {
        "loss_type": "bnpo",
        "epsilon": 0.1,
        "epsilon_high": 0.1,
        "entropy_coef": 0.2,
    },
    "dapo": {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "epsilon": 0.1, "epsilon_high": 0.1},
    "cispo": {"loss_type": "cispo", "epsilon": 0.2, "epsilon_high": 1.1},
    "gspo": {"loss_type": "grpo", "epsilon": 0.03, "epsilon_high": 0.04, "level": "sequence"},
    "luspo": {"loss_type": "luspo", "epsilon": 0.03, "epsilon_high": 0.04, "level": "sequence"},
    "luspo-kl": {
        "loss_type": "luspo",
        "epsilon": 0.03,
        "epsilon_high": 0.04,
        "level": "sequence",
        "beta": 0.2,
    },
    "dapo-truncate-token": {
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "correction": "token_truncate",
    },
    "dapo-mask-sequence": {
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "correction": "sequence_mask",
    },
    "gspo-truncate-sequence": {
        "loss_type": "grpo",
        "epsilon": 0.03,
        "epsilon_high": 0.04,
        "level": "sequence",
        "correction": "sequence_truncate",
    },
    "rloo": {"trainer": "rloo", "epsilon": 0.2, "epsilon_high": 0.2},
}
CAP = 1.3
FLOOR = 0.7
OVERLONG = {"length": 20, "buffer": 8, "lens": [1, 11, 12, 13, 15, 17, 19, 20, 21, 40]}
"""DAPO's punishment of long responses"""


def tensors() -> dict[str, torch.Tensor]:
    """[samples, longest], float64."""
    generator = torch.Generator().manual_seed(7)
    shape = (len(LENS), max(LENS))
    logps = -torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 0.05
    noise = torch.randn((4, *shape), generator=generator, dtype=torch.float64)
    return {
        "logps": logps,
        "old": logps - 0.15 * noise[0],
        "reference": logps - 0.3 * noise[1],
        "sampler": logps - 0.15 * noise[0] - 0.4 * noise[2],
        "entropies": noise[3].abs(),
    }


def importance(mode: str, log_ratio: torch.Tensor) -> torch.Tensor:
    """As in `_generate_and_score_completions` of TRL, which needs a model: the masked ratio,
    bounded or masked.
    """
    ratio = (log_ratio.sum(-1, keepdim=True) if mode.startswith("sequence") else log_ratio).exp()
    if mode.endswith("truncate"):
        return ratio.clamp(max=CAP)
    return ratio.masked_fill((ratio < FLOOR) | (ratio > CAP), 0.0)


def run(case: dict[str, Any]) -> dict[str, Any]:
    data = tensors()
    mask = torch.tensor([[column < n for column in range(max(LENS))] for n in LENS]).double()
    logps = data["logps"].clone().requires_grad_(True)
    entropies = data["entropies"].clone().requires_grad_(True)
    identity = SimpleNamespace(
        gather=lambda x: x,
        reduce=lambda x, **_: x,
        gather_for_metrics=lambda x: x,
        num_processes=1,
        sync_gradients=False,
    )
    entropy_coef = case.get("entropy_coef", 0.0)
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_a, **_k: (logps, entropies, None),
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        accelerator=identity,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=case.get("level", "token"),
        beta=case.get("beta", 0.0),
        epsilon_low=case["epsilon"],
        epsilon_high=case["epsilon_high"],
        loss_type=case.get("loss_type"),
        use_vllm="correction" in case,
        vllm_importance_sampling_correction=True,
        max_completion_length=7,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=entropy_coef > 0,
        use_adaptive_entropy=False,
        entropy_coef=entropy_coef,
        _metrics={"train": defaultdict(list)},
    )
    empty = torch.zeros(len(LENS), 0, dtype=torch.int64)
    inputs = {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "completion_mask": mask,
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "old_per_token_logps": data["old"],
        "old_logps": (data["old"] * mask).sum(1),
        "ref_per_token_logps": data["reference"],
        "num_items_in_batch": mask.sum(),
    }
    if "correction" in case:
        log_ratio = (data["old"] - data["sampler"]) * mask
        inputs["importance_sampling_ratio"] = importance(case["correction"], log_ratio)
    owner: Any = RLOOTrainer if case.get("trainer") == "rloo" else GRPOTrainer
    loss = owner._compute_loss(trainer, trainer.model, inputs)
    loss.backward()
    found = {"trl": case, "loss": loss.item(), "gradient": logps.grad[mask == 1].tolist()}
    if entropies.grad is not None:
        found["entropy_gradient"] = entropies.grad[mask == 1].tolist()
    return found


def punishments() -> list[float]:
    reward = get_soft_overlong_punishment(OVERLONG["length"], OVERLONG["buffer"])
    return reward(completion_ids=[[0] * n for n in OVERLONG["lens"]])


def main() -> None:
    mask = torch.tensor([[column < n for column in range(max(LENS))] for n in LENS])
    versions = {name: importlib.metadata.version(name) for name in ("trl", "torch", "transformers")}
    content = {
        "versions": versions,
        "lens": LENS,
        "advantages": ADVANTAGES,
        "cap": CAP,
        "floor": FLOOR,
        "constant_length": 7,
        "tokens": {name: values[mask].tolist() for name, values in tensors().items()},
        "cases": {name: run(case) for name, case in CASES.items()},
        "overlong": OVERLONG | {"punishment": punishments()},
    }
    path = Path(__file__).with_name("trl_golden.json")
    path.write_text(json.dumps(content, indent=1) + "\n")
    print(path, versions)


if __name__ == "__main__":
    main()
