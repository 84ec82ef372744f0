"""Writes verl_golden.json:

GAE, whitening, value loss, policy loss and group advantages of verl 0.5.0 on fixed tensors.

Not a test, and verl is in no environment of the project. Beside an environment with torch:
    pip install --no-deps --target DIR verl==0.5.0 && PYTHONPATH=DIR python
    tests/golden/make_verl_golden.py

Two files of verl are loaded, `core_algos.py` and `torch_functional.py`. Modules that they import
for other functions, and the package's own `__init__`, which imports Ray, are empty here.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch

LENS = [3, 5, 1, 4, 2, 5]
GROUPS = [0, 0, 0, 1, 1, 1]
GAMMA = 0.97
LAM = 0.9
VALUE_CLIP = 0.2
CLIP_LOW = 0.1
CLIP_HIGH = 0.15


def load(name: str) -> Any:
    """One file of verl, without the package's `__init__`."""
    path = next(
        p
        for p in (Path(folder, *name.split(".")).with_suffix(".py") for folder in sys.path)
        if p.is_file()
    )
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors() -> dict[str, torch.Tensor]:
    """[samples, longest], float64."""
    generator = torch.Generator().manual_seed(11)
    noise = torch.randn((5, len(LENS), max(LENS)), generator=generator, dtype=torch.float64)
    logps = -noise[0].abs() - 0.05
    return {
        "logps": logps,
        "old": logps - 0.15 * noise[1],
        "values": noise[2],
        "new_values": noise[2] + 0.3 * noise[3],
        "rewards": 0.1 * noise[4],
    }


def main() -> None:
    for name in ("tensordict", "verl.utils.device", "verl.trainer.config"):
        sys.modules[name] = MagicMock()
    for name in ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo"):
        sys.modules[name] = ModuleType(name)
    sys.modules["verl.utils"].torch_functional = load("verl.utils.torch_functional")  # type: ignore[attr-defined]
    algos = load("verl.trainer.ppo.core_algos")
    t = tensors()
    mask = (torch.arange(max(LENS))[None] < torch.tensor(LENS)[:, None]).double()

    def flat(values: torch.Tensor) -> list[float]:
        found: list[float] = values[mask.bool()].tolist()
        return found

    advantages, returns = algos.compute_gae_advantage_return(
        t["rewards"] * mask, t["values"] * mask, mask, GAMMA, LAM
    )
    new_values = t["new_values"].clone().requires_grad_(True)
    value_loss, value_clipped = algos.compute_value_loss(
        new_values, returns, t["values"], mask, VALUE_CLIP
    )
    value_loss.backward()
    logps = t["logps"].clone().requires_grad_(True)
    policy_loss, clipped, *_ = algos.compute_policy_loss(
        t["old"], logps, advantages, mask, cliprange_low=CLIP_LOW, cliprange_high=CLIP_HIGH
    )
    policy_loss.backward()
    names = ("compute_grpo_outcome_advantage", "compute_rloo_outcome_advantage")
    index = [str(group) for group in GROUPS]
    by_group = {name: getattr(algos, name)(t["rewards"] * mask, mask, index)[0] for name in names}
    by_group["dr_grpo"] = algos.compute_grpo_outcome_advantage(
        t["rewards"] * mask, mask, index, norm_adv_by_std_in_grpo=False
    )[0]
    content = {
        "verl": "0.5.0",
        "torch": version("torch"),
        "lens": LENS,
        "groups": GROUPS,
        "options": {
            "gamma": GAMMA,
            "lam": LAM,
            "value_clip": VALUE_CLIP,
            "clip_low": CLIP_LOW,
            "clip_high": CLIP_HIGH,
        },
        "tokens": {name: flat(values) for name, values in t.items()},
        "advantages": flat(advantages),
        "returns": flat(returns),
        "value_loss": float(value_loss.detach()),
        "value_clip_frac": float(value_clipped),
        "value_gradient": flat(new_values.grad),
        "policy_loss": float(policy_loss.detach()),
        "policy_clip_frac": float(clipped),
        "policy_gradient": flat(logps.grad),
        "group_advantages": {name: values[:, 0].tolist() for name, values in by_group.items()},
    }
    Path(__file__).with_name("verl_golden.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
